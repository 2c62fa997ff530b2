"""SGLang 0.5.23: a grouped or per-row shrink, then a grouped or per-row expand (kernels/ops/lora/common).

Routing weights are applied by its finalize stage, not here. With routing, its Triton route builder runs; the
one that it prefers below 8192 buckets is compiled on its own and not loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from bench.kernels.models import Site
from bench.kernels.peers import PeerStep, PeerWeights, Prepared, stubs

COMMON = "sglang.kernels.ops.lora.common"
SHRINKS = ((32, 128, 4), (64, 128, 4), (64, 256, 8))  # columns, K, warps
EXPANDS = ((64, 4), (128, 4), (256, 8))  # columns, warps


@dataclass(frozen=True)
class Sglang:
    lora_a: ModuleType
    lora_b: ModuleType
    routing: ModuleType
    name: str = "sglang"
    about: str = "SGLang 0.5.23 grouped_lora_a/b and per_row_lora_a/b"

    def options(self, site: Site, tokens: int) -> list[dict[str, Any]]:
        """Each new tile is a compilation, which costs more than its runs: the corners, not the whole product."""
        small, middle, large = ({"shrink": s, "expand": e} for s, e in zip(SHRINKS, EXPANDS, strict=True))
        grouped = [{"family": "grouped", "block_m": 16, **tile} for tile in (small, middle, large)]
        grouped.append({"family": "grouped", "block_m": 32, **middle})
        grouped.append({"family": "grouped", "block_m": 16, "split_k": 4, **middle})
        return [*({"family": "per_row", **tile} for tile in (small, middle)), *grouped]

    def prepare(self, weights: PeerWeights, step: PeerStep, options: dict[str, Any]) -> Prepared:
        site, grouped = weights.site, options["family"] == "grouped"
        pairs, ranks, split = step.out.shape[0], site.slices * site.lora_rank, options.get("split_k", 1)
        (shrink_n, shrink_k, shrink_warps), (expand_n, expand_warps) = options["shrink"], options["expand"]
        shrink = {"BLOCK_SIZE_N": shrink_n, "BLOCK_SIZE_K": shrink_k, "num_warps": shrink_warps, "num_stages": 3}
        expand = {"BLOCK_SIZE_N": expand_n, "BLOCK_SIZE_K": 64, "num_warps": expand_warps, "num_stages": 3}
        bridge = torch.empty(pairs, ranks, dtype=step.out.dtype, device=step.out.device)
        offsets = tuple(range(0, site.out_width + 1, site.slice_width))
        geometry = self.lora_b.slice_geometry(offsets, expand_n, step.out.device)
        extra: dict[str, Any] = {}
        if grouped:
            for config in (shrink, expand):
                config["GROUP_SIZE_M"] = 1
            shrink |= {"SPLIT_K": split, "SPLIT_MODE": "serial"}
        if split > 1:
            device = step.out.device
            partial = torch.empty(split, pairs, ranks, dtype=torch.float32, device=device)
            extra = {"partial": partial, "counters": torch.zeros(1 << 20, dtype=torch.int32, device=device)}
        run_a = self.lora_a.grouped_lora_a if grouped else self.lora_a.per_row_lora_a
        run_b = self.lora_b.grouped_lora_b if grouped else self.lora_b.per_row_lora_b

        def route() -> Any:
            return self.routing.build_route(
                step.adapters_T,
                group_ids=step.experts_Tk,
                groups_per_slot=weights.model.num_experts,
                max_loras=weights.num_adapters,
                block_size=options.get("block_m", 16),
                view="aligned" if grouped else "raw",
                capacity=0 if grouped else None,
            )

        def compute(routing: Any) -> None:
            run_a(step.rows, weights.a_XRK, bridge, routing, config=shrink, pair_input=site.combine, stack=site.slices,
                  **extra)  # fmt: skip
            run_b(bridge, weights.b_XOR, step.out, routing, geometry=geometry, config=expand, add_inplace=False,
                  zero_sentinel=False)  # fmt: skip

        ready = route()
        return Prepared(lambda: compute(ready), lambda: compute(route()), weighted=False)


def load(directory: Path) -> Sglang:
    """The Triton files of the wheel, its other imports stubbed."""
    stubs.sglang_modules(directory / "sglang")
    route_view, *modules = (stubs.load(f"{COMMON}.{name}") for name in ("route_view", "routing", "lora_a", "lora_b"))
    assert route_view is not None
    routing, lora_a, lora_b = modules
    return Sglang(lora_a, lora_b, routing)
