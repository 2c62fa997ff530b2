"""The CPU path at Mixtral-sized sites beside plain loops over the same weights, as shares of the read bandwidth.

    python -m bench.kernels_cpu [--tokens 64] [--dtypes float32,bfloat16] [--rounds N] [--json]

Threads are OMP_NUM_THREADS. A share is distinct weight bytes / time / (bytes read per second by a torch
reduction over a large tensor), each the best of its rounds, which take turns in one run. Every path is checked
against float64. Paths: `step` is kernels_cuda.cpu; `segments` calls torch.linear twice per segment and pair on
rows already sorted, with B as stored (row-major) or transposed (column-major); `adapters` is what a
transformers layer with PEFT's weights does: for each adapter, for each expert it meets, select rows, two linears,
add to the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn.functional import linear

from bench import harness
from bench.kernels.correctness import reference
from bench.kernels.draws import Draw, distinct_pairs, draw
from bench.kernels.models import MODELS, NUM_ADAPTERS, Model, Site
from bench.kernels.report import text_table
from kernels_cuda import cpu, routing
from kernels_cuda.ops import Block, Pair, Segment, Step, stack

READ_BYTES = 1 << 30
LIMIT = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # of |error| / |result|; the loops keep v in bf16


def read_gbps(tensor: torch.Tensor) -> float:
    """Measure the bytes per ns of a reduction over a tensor, which should be far larger than the caches."""
    return tensor.nbytes / harness.least_s(1, tensor.max) / 1e9


def blocks_of(model: Model, site: Site, step: Draw, dtype: torch.dtype) -> dict[tuple[int, int], Block]:
    """Make random weights for every (adapter, expert) that the step meets, each in memory of its own."""
    generator = torch.Generator().manual_seed(3)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).mul_(0.02).to(dtype)

    of_tokens = zip(step.adapters_T, step.experts_Tk, strict=True)
    met = sorted({(int(adapter), int(expert)) for adapter, experts in of_tokens for expert in experts})
    rank, width = site.lora_rank, site.slice_width
    return {
        key: stack([Pair(noise(rank, site.in_width), noise(width, rank), 2.0, i * width) for i in range(site.slices)])
        for key in met
    }


def paths(site: Site, step: Step, out: torch.Tensor, adapters: list[int]) -> dict[str, Callable[[], object]]:
    """Return the paths that are compared, by name. Each fills `out` with the same result."""
    columns = {id(s.block): [pair.b_OR.t().contiguous() for pair in s.block.pairs] for s in step.segments}
    rows, in_map, out_map, weights = step.rows_TK, step.in_map_N, step.out_map_N, step.weights_N
    assert in_map is not None

    def one(x_nK: torch.Tensor, block: Block, column_major: bool) -> torch.Tensor:
        parts = []
        for i, pair in enumerate(block.pairs):
            b_OR = columns[id(block)][i].t() if column_major else pair.b_OR
            parts.append(linear(linear(x_nK, pair.a_RK), b_OR) * pair.scale)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def put(entries: torch.Tensor, delta: torch.Tensor) -> None:
        if out_map is None:
            out[entries] = delta
        else:
            assert weights is not None
            out.index_add_(0, out_map[entries], (delta * weights[entries, None]).to(out.dtype))

    def segments(column_major: bool) -> None:
        out.zero_()
        x_NK = rows.index_select(0, in_map)
        for block, first, size in step.segments:
            put(torch.arange(first, first + size), one(x_NK[first : first + size], block, column_major))

    def by_adapter() -> None:
        out.zero_()
        for adapter in dict.fromkeys(adapters):
            for (block, first, size), its in zip(step.segments, adapters, strict=True):
                if its == adapter:
                    entries = torch.arange(first, first + size)
                    put(entries, one(rows[in_map[entries]], block, False))

    return {
        "step": lambda: cpu.lora_step(step, out),
        "segments, B row-major": lambda: segments(False),
        "segments, B column-major": lambda: segments(True),
        "adapters": by_adapter,
    }


def site_rows(
    model: Model, site: Site, tokens: int, dtype: torch.dtype, rounds: int, read_bytes: int = READ_BYTES
) -> list[dict[str, Any]]:
    drawn = draw(model, tokens, 0)
    blocks = blocks_of(model, site, drawn, dtype)
    directory = np.array([(adapter, 0, 1) for adapter in range(NUM_ADAPTERS)], np.int32)
    routed = routing.reference(*drawn, directory, model.num_experts)
    segments = [Segment(blocks[int(row), int(expert)], int(f), int(n)) for row, expert, f, n in routed.segments]
    entries = len(routed.pair_N)
    count = entries if site.combine else tokens
    rows = torch.randn(count, site.in_width, generator=torch.Generator().manual_seed(4)).to(dtype)
    token, pair = torch.from_numpy(routed.token_N), torch.from_numpy(routed.pair_N)
    step = Step(
        rows_TK=rows,
        segments=segments,
        num_entries=entries,
        num_out_rows=tokens if site.combine else entries,
        windows=((0, site.out_width),),
        in_map_N=pair if site.combine else token,
        out_map_N=token if site.combine else None,
        weights_N=torch.from_numpy(routed.weights_N) if site.combine else None,
    )
    out = torch.empty(step.num_out_rows, site.out_width, dtype=dtype)
    compared = paths(site, step, out, routed.segments[:, 0].tolist())
    wanted, errors = reference(step, step.segments, out.shape), {}
    for name, run in compared.items():
        out.fill_(float("nan"))
        run()
        errors[name] = float((out.double() - wanted).norm() / wanted.norm())
        if not errors[name] < LIMIT[dtype]:
            raise SystemExit(f"{name} at {site.name}: relative error {errors[name]:.3g}, expected below {LIMIT[dtype]}")
    nbytes = distinct_pairs(drawn, model.num_experts) * (site.a_bytes + site.b_bytes) // 2 * dtype.itemsize
    large = torch.ones(read_bytes // 4, dtype=torch.int32)
    seconds, gbps = dict.fromkeys(compared, float("inf")), 0.0
    for _ in range(rounds):
        gbps = max(gbps, read_gbps(large))
        for name, run in compared.items():
            seconds[name] = min(seconds[name], harness.least_s(1, run))
    return [
        {
            "site": site.name,
            "dtype": str(dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "path": name,
            "ms": seconds[name] * 1e3,
            "gbps": nbytes / seconds[name] / 1e9,
            "read_gbps": gbps,
            "share": nbytes / seconds[name] / 1e9 / gbps,
            "error": errors[name],
        }
        for name in compared
    ]


def main() -> None:
    given = harness.flags(__doc__, tokens=64, dtypes="float32,bfloat16", rounds=15)
    model = MODELS["mixtral-8x7b"]
    rows: list[dict[str, Any]] = []
    for dtype in (getattr(torch, name) for name in given.dtypes.split(",")):
        for site in model.sites:
            rows += site_rows(model, site, given.tokens, dtype, given.rounds)
    harness.show(given, rows, text_table(list(rows[0]), [list(row.values()) for row in rows]))


if __name__ == "__main__":
    main()
