"""vLLM 0.33: shrink and expand of a (token, expert) in one Triton launch (fused_moe_lora_op.py).

Below 1024 pairs * ranks it takes its GEMV kernel, as vLLM does. Ids are given as int64: with vLLM's own
int32 its weight offsets overflow at 512 adapters of these models. Its block alignment is an operator of its
compiled extension, which is not loaded: routing is prepared here, and only the unsorted mode, which needs
none, is timed with routing.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from bench.kernels.draws import Draw
from bench.kernels.models import Site
from bench.kernels.peers import PeerStep, PeerWeights, Prepared, stubs

SMALL_BATCH = 1024  # pairs * ranks, vLLM's own bound
SMALL_RANK = 64


def align(draw: Draw, num_experts: int, num_adapters: int, block: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """vLLM's sorted layout: pairs by (adapter, expert), each run padded to `block`, a row of it per adapter."""
    pairs = draw.experts_Tk.size
    width = pairs * block if pairs < num_experts else pairs + num_experts * (block - 1)
    width = -(-width // block) * block
    sorted_ids = np.full((num_adapters, width), pairs, np.int32)
    expert_ids = np.full((num_adapters, width // block), -1, np.int32)
    padded = np.zeros(num_adapters, np.int32)
    keys = draw.adapters_T.repeat(draw.experts_Tk.shape[1]).astype(np.int64) * num_experts + draw.experts_Tk.reshape(-1)
    order = np.argsort(keys, kind="stable")
    bounds = np.flatnonzero(np.diff(keys[order], prepend=-1, append=-1))
    for first, end in pairwise(bounds.tolist()):
        adapter, expert = divmod(int(keys[order[first]]), num_experts)
        at, blocks = int(padded[adapter]), -(-(end - first) // block)
        sorted_ids[adapter, at : at + end - first] = order[first:end]
        expert_ids[adapter, at // block : at // block + blocks] = expert
        padded[adapter] += blocks * block
    return sorted_ids, expert_ids, padded


@dataclass(frozen=True)
class Vllm:
    module: ModuleType
    name: str = "vllm"
    about: str = "vLLM 0.33.0 fused_moe_lora (one-shot, and small-batch where vLLM takes it)"

    def options(self, site: Site, tokens: int) -> list[dict[str, Any]]:
        return [{"mode": "naive"}, *({"mode": "sorted", "block_m": block} for block in (16, 32, 64))]

    def prepare(self, weights: PeerWeights, step: PeerStep, options: dict[str, Any]) -> Prepared:
        model, site, device = weights.model, weights.site, step.rows.device
        planes = (weights.num_adapters, model.num_experts)
        rank, width = site.lora_rank, site.slice_width
        a = weights.a_XRK.view(*planes, site.slices * rank, site.in_width)
        b = weights.b_XOR.view(*planes, site.out_width, rank)
        a_slices = [a[:, :, i * rank : (i + 1) * rank] for i in range(site.slices)]
        b_slices = [b[:, :, i * width : (i + 1) * width] for i in range(site.slices)]
        out = step.out.view(*step.experts_Tk.shape, site.out_width)
        adapters, experts = step.adapters_T.long(), step.experts_Tk.reshape(-1)
        enabled = torch.ones(weights.num_adapters + 1, dtype=torch.int32, device=device)
        naive = options["mode"] == "naive"
        if naive and step.experts_Tk.numel() * rank <= SMALL_BATCH and rank <= SMALL_RANK:

            def small() -> None:
                self.module._run_fused_moe_lora_small_batch(
                    out, step.rows, a_slices, b_slices, step.weights_Tk, experts, adapters, model.top_k, enabled,
                    site.combine, add_inputs=False,
                )  # fmt: skip

            return Prepared(small, small, site.combine)
        active = np.unique(step.draw.adapters_T)
        sorted_ids, expert_ids, padded, block = None, experts, None, 16
        if not naive:
            block = options["block_m"]
            arrays = align(step.draw, model.num_experts, weights.num_adapters, block)
            sorted_ids, expert_ids, padded = (torch.from_numpy(array).to(device) for array in arrays)
        lora_ids = torch.from_numpy(active.astype(np.int64)).to(device)
        num_active = torch.tensor([len(active)], dtype=torch.int32)

        def run() -> None:
            self.module._run_fused_moe_lora_one_shot(
                out, step.rows, a_slices, b_slices, step.weights_Tk, sorted_ids, expert_ids, padded, adapters, rank,
                model.top_k, lora_ids, num_active, enabled, site.combine, block, add_inputs=False,
            )  # fmt: skip

        return Prepared(run, run if naive else None, site.combine)


def load(directory: Path) -> Vllm:
    """The Triton files of the wheel, its other imports stubbed."""
    stubs.vllm_modules(directory / "vllm")
    return Vllm(stubs.load("vllm.lora.ops.triton_ops.fused_moe_lora_op"))
