"""Punica's SGMV, as vLLM 0.33 carries it in Triton (lora_shrink_op.py, lora_expand_op.py).

Punica itself publishes no wheel: the package of that name on PyPI is an unrelated project. A (token, expert)
is a row of its own here and an (adapter, expert) an adapter, so gate_up's rows are given once per expert; that
copy is made beforehand and not timed. Routing is prepared here. Expert ids are int64, as in the vllm peer.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from bench.kernels.models import Site
from bench.kernels.peers import PeerStep, PeerWeights, Prepared, stubs

OPS = "vllm.lora.ops.triton_ops"
FEW_ROWS = 128  # below it vLLM splits K 64 times


@dataclass(frozen=True)
class Punica:
    shrink: ModuleType
    expand: ModuleType
    name: str = "punica"
    about: str = "Punica SGMV: the Triton port in vLLM 0.33.0"

    def options(self, site: Site, tokens: int) -> list[dict[str, Any]]:
        """vLLM's default (shrink 32 rows, expand 64), and smaller tiles of rows, which suit one row per segment."""
        tried = ((32, 64, 8), (16, 16, 8), (16, 16, 1), (16, 32, 8))
        return [{"block_m": {"shrink": m, "expand": n}, "split_k": split} for m, n, split in tried]

    def prepare(self, weights: PeerWeights, step: PeerStep, options: dict[str, Any]) -> Prepared:
        model, site, device = weights.model, weights.site, step.rows.device
        pairs, rank, slices = step.out.shape[0], site.lora_rank, site.slices
        keys = step.draw.adapters_T.repeat(model.top_k).astype(np.int64) * model.num_experts
        keys += step.draw.experts_Tk.reshape(-1)
        ids, counts = np.unique(keys, return_counts=True)
        starts = np.concatenate([[0], np.cumsum(counts)])
        meta = (np.argsort(keys, kind="stable").astype(np.int64), counts, starts, ids)
        order, counts_D, starts_D, ids_D = (torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in meta)
        rows = step.rows if site.combine else step.rows.repeat_interleave(model.top_k, dim=0)
        v = torch.empty(pairs, slices * rank, dtype=torch.float32, device=device)
        # one pointer and first column per slice where there are several, else the weights and the column themselves
        width, bytes_per_slice = site.slice_width, site.slice_width * rank * weights.b_XOR.element_size()
        base = weights.b_XOR.data_ptr()
        pointers: Any = weights.b_XOR
        columns: Any = 0
        if slices > 1:
            pointers = torch.tensor([base + i * bytes_per_slice for i in range(slices)]).to(device).view(torch.uint64)
            columns = torch.tensor([i * width for i in range(slices)]).to(device)
        shrink, expand = self._configs(options, site, pairs)
        m, n = options["block_m"]["shrink"], options["block_m"]["expand"]
        shrink_grid = (shrink["SPLIT_K"] * -(-pairs // m) * -(-slices * rank // shrink["BLOCK_N"]), 1, len(ids))
        expand_grid = (-(-pairs // n) * -(-width // expand["BLOCK_N"]), slices, len(ids))

        def run() -> None:
            v.zero_()
            self.shrink._lora_shrink_kernel[shrink_grid](
                rows, weights.a_XRK, v, pairs, slices * rank, site.in_width, order, counts_D, starts_D, ids_D, 1.0,
                *rows.stride(), *weights.a_XRK.stride(), 0, *v.stride(), SLICE_NUM=1, USE_GDC=False, launch_pdl=False,
                **shrink,
            )  # fmt: skip
            self.expand._lora_expand_kernel[expand_grid](
                v, pointers, step.out, pairs, width, rank, order, counts_D, starts_D, ids_D, columns,
                rank, *v.stride(), *weights.b_XOR.stride(), *step.out.stride(), width, SLICE_NUM=slices,
                SAME_STRIDE=True, USE_GDC=False, launch_pdl=False, **expand,
            )  # fmt: skip

        return Prepared(run, None, weighted=False)

    @staticmethod
    def _configs(options: dict[str, Any], site: Site, pairs: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """vLLM's default tiles but for what is swept. One stage on sm_90: its guard against a ptxas bug."""
        split, rank = options["split_k"], site.lora_rank
        k = 256 if pairs < FEW_ROWS or split == 1 else 32
        shrink = {
            "BLOCK_M": options["block_m"]["shrink"], "BLOCK_N": 16, "BLOCK_K": k, "SPLIT_K": split,
            "EVEN_K": site.in_width % (k * split) == 0, "GROUP_SIZE_M": 8, "num_warps": 4, "num_stages": 2,
        }  # fmt: skip
        expand = {
            "BLOCK_M": options["block_m"]["expand"], "BLOCK_N": 64 if site.slices > 1 else 128, "BLOCK_K": 32,
            "EVEN_K": rank % 32 == 0, "ADD_INPUTS": False, "CAST_TYPE": True, "num_warps": 4, "num_stages": 1,
        }  # fmt: skip
        return shrink, expand


def load(directory: Path) -> Punica:
    stubs.vllm_modules(directory / "vllm")
    return Punica(stubs.load(f"{OPS}.lora_shrink_op"), stubs.load(f"{OPS}.lora_expand_op"))
