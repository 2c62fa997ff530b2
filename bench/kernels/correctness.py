"""Random steps of every width, rank and popularity against float64, and bit for bit against themselves.

The weights are packed by `layout.pack` from plain tensors, so that nothing is shared with the oracle, which
computes from those tensors on the same device in float64. Results and workspace are poisoned before each launch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from bench.kernels.ours import aligned_pages
from kernels_cuda.launch import DeviceStep, Workspace
from kernels_cuda.layout import PAGE_BYTES, pack, shape_of
from kernels_cuda.ops import Block, Pair, Segment, Step, stack
from kernels_cuda.sizes import PAGE_TILES, TILE_BYTES
from kernels_cuda.tables import SEGMENT_INTS, BlockTable

ROUNDINGS, MORE_ERROR = 1.1, 1e-4  # |error| / |result|: at most so many of a rounded exact result, and so much more
WIDTHS = (2048, 768, 4096, 14336, 2880, 6144, 10752, 33, 1000, 5121)
RANKS = (1, 8, 16, 17, 32, 64, 100, 128, 200, 256)
ROWS = (0, 1, 7, 130, 4096)
POPULARITY = ("one", "distinct", "zipf")
ADAPTERS = 24
Launch = Callable[[DeviceStep, torch.Tensor, Workspace, str], None]


@dataclass(frozen=True)
class Case:
    in_width: int
    out_width: int
    entries: int
    popularity: str
    combine: bool
    dtype: torch.dtype
    seed: int

    def __str__(self) -> str:
        kind = "tokens" if self.combine else "rows"
        return f"{self.in_width}->{self.out_width} {self.entries} {self.popularity} {kind} {self.dtype} #{self.seed}"


@dataclass
class Made:
    """A case's arrays on the device, the plain blocks for the oracle, and tensors that the kernels' pointers need."""

    step: DeviceStep
    segments: list[Segment]
    out_rows: int
    workspace: Workspace
    keep: tuple[object, ...]

    def run(self, launch: Launch, kernels: Sequence[str] = ("lora_step",)) -> torch.Tensor:
        shape = (self.out_rows, self.step.out_width)
        out = torch.full(shape, float("nan"), dtype=self.step.rows_TK.dtype, device=self.step.rows_TK.device)
        for tensor in (self.workspace.partial, self.workspace.v, self.workspace.delta):
            tensor.fill_(float("nan"))
        for kernel in kernels:
            launch(self.step, out, self.workspace, kernel)
        return out


def cases(count: int, seed: int) -> list[Case]:
    """Make `count` cases: every width, number of entries and popularity at least once, then random ones."""
    rng = np.random.default_rng(seed)
    found = []
    for i in range(count):
        width = WIDTHS[i % len(WIDTHS)]
        other = int(rng.choice(WIDTHS))
        dtype = torch.float16 if i % 4 == 3 else torch.bfloat16
        rows = ROWS[(i + i // len(WIDTHS)) % len(ROWS)]
        found.append(Case(width, other, rows, POPULARITY[i % 3], bool(rng.integers(2)), dtype, seed + i))
    return found


def sizes_of(case: Case, rng: np.random.Generator) -> list[tuple[int, int]]:
    """(adapter, entries) of each segment."""
    if case.popularity == "one":
        return [(0, case.entries)] if case.entries else []
    if case.popularity == "distinct":
        return [(i % ADAPTERS, 1) for i in range(case.entries)]
    weight = np.arange(1, ADAPTERS + 1) ** -1.2
    counts = np.bincount(rng.choice(ADAPTERS, case.entries, p=weight / weight.sum()), minlength=ADAPTERS)
    return [(adapter, int(size)) for adapter, size in enumerate(counts) if size]


def make(case: Case, device: torch.device) -> Made:
    """Blocks of one to three pairs with ranks of their own, packed into pages that lie in reverse order."""
    rng, generator = np.random.default_rng(case.seed), torch.Generator(device).manual_seed(case.seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(case.dtype)

    def block() -> Block:
        count = min(int(rng.integers(1, 4)), case.out_width)
        share = case.out_width // count
        ranks = [int(rng.choice(RANKS)) for _ in range(count)]
        return stack(
            [Pair(noise(r, case.in_width), noise(share, r), 2.0 / (i + 1), i * share) for i, r in enumerate(ranks)]
        )

    sizes = sizes_of(case, rng)
    blocks = {adapter: block() for adapter in sorted({adapter for adapter, _ in sizes})}
    shapes = {adapter: shape_of(one, case.in_width, case.out_width) for adapter, one in blocks.items()}
    total = max(1, sum(shape.num_tiles for shape in shapes.values()))
    pages = aligned_pages(-(-total // PAGE_TILES), device).fill_(0xFF)
    order = torch.arange(len(pages) - 1, -1, -1, device=device)
    addresses = pages.data_ptr() + order * PAGE_BYTES
    table, first_tile, places = BlockTable(max(1, len(blocks)), device), 0, {}
    tiles_of_pages = pages.view(len(pages), PAGE_TILES, TILE_BYTES)
    for adapter, shape in shapes.items():
        tile = torch.arange(first_tile, first_tile + shape.num_tiles, device=device)
        tiles_of_pages[order[tile // PAGE_TILES], tile % PAGE_TILES] = pack(blocks[adapter], shape, case.dtype)
        places[adapter] = table.add(addresses.data_ptr(), shape), first_tile
        first_tile += shape.num_tiles
    firsts = np.cumsum([0, *(size for _, size in sizes)])
    described = [(adapter, int(first), size) for (adapter, size), first in zip(sizes, firsts, strict=False)]
    tokens = max(1, case.entries // 2)

    def drawn(high: int) -> torch.Tensor:
        return torch.from_numpy(rng.integers(0, high, max(1, case.entries)).astype(np.int32)).to(device)

    segments = torch.tensor([(*places[adapter], *entries) for adapter, *entries in described], dtype=torch.int32)
    out_rows = tokens if case.combine else case.entries
    step = DeviceStep(
        rows_TK=noise(tokens, case.in_width),
        segments=segments.view(-1, SEGMENT_INTS).to(device),
        blocks=table.tensor,
        counts=torch.tensor([len(sizes), case.entries, out_rows], dtype=torch.int32, device=device),
        in_width=case.in_width,
        windows=((0, case.out_width),),
        in_map_N=drawn(tokens),
        out_map_N=drawn(tokens) if case.combine else None,
        weights_N=torch.rand(max(1, case.entries), generator=generator, device=device) if case.combine else None,
    )
    workspace = Workspace.new(
        max_entries=max(1, case.entries),
        max_rank=max([16, *(shape.groups * 16 for shape in shapes.values())]),
        max_in_width=case.in_width,
        max_out_width=case.out_width if case.combine else 0,
        device=device,
    )
    plain = [Segment(blocks[adapter], first, size) for adapter, first, size in described]
    return Made(step, plain, out_rows, workspace, (pages, addresses, table))


def expected(made: Made) -> torch.Tensor:
    """[U, O] float64, from the plain tensors."""
    return reference(made.step, made.segments, (made.out_rows, made.step.out_width))


def reference(step: Step | DeviceStep, segments: Sequence[Segment], shape: Sequence[int]) -> torch.Tensor:
    """[U, O] float64, of the shape, segment by segment."""
    out = torch.zeros(shape, dtype=torch.float64, device=step.rows_TK.device)
    assert step.in_map_N is not None
    for block, first, size in segments:
        entries = slice(first, first + size)
        x = step.rows_TK[step.in_map_N[entries].long()].double()
        factor = 1.0 if step.weights_N is None else step.weights_N[entries].double()[:, None]
        delta = torch.zeros(size, out.shape[1], dtype=torch.float64, device=out.device)
        for pair in block.pairs:
            columns = slice(pair.out_begin, pair.out_begin + pair.b_OR.shape[0])
            delta[:, columns] = x @ pair.a_RK.double().T @ pair.b_OR.double().T * pair.scale * factor
        if step.out_map_N is None:
            out[entries] = delta
        else:
            out.index_add_(0, step.out_map_N[entries].long(), delta)
    return out


def check(case: Case, device: torch.device, launches: Sequence[Launch]) -> dict[str, Any]:
    """Error against float64; whether repeats, two launches, other variants and single segments give the same bits."""
    made = make(case, device)
    out, wanted = made.run(launches[0]), expected(made)
    if not case.entries:
        return {"case": str(case), "error": float(out.nan_to_num(1).abs().sum()), "rounding": 0.0, "same_bits": True}
    found = errors(out, wanted)
    same = [torch.equal(made.run(launch), out) for launch in launches for _ in range(2)]
    same.append(torch.equal(made.run(launches[0], ("shrink", "expand")), out))
    if not case.combine:
        for number in {0, len(made.segments) // 2, len(made.segments) - 1}:
            segment = made.segments[number]
            entries = slice(segment.first, segment.first + segment.num_entries)
            counts = torch.tensor([1, case.entries, case.entries], dtype=torch.int32, device=device)
            one = replace(made.step, segments=made.step.segments[number : number + 1], counts=counts)
            alone = replace(made, step=one).run(launches[0])
            same.append(torch.equal(alone[entries], out[entries]))
    return {"case": str(case), **found, "same_bits": all(same)}


def errors(out: torch.Tensor, wanted: torch.Tensor) -> dict[str, float]:
    """|error| / |wanted| of a result, infinite where it is no number, and of the exact result once it is rounded."""

    def relative(found: torch.Tensor) -> float:
        norm = float(wanted.norm())
        error = float((found.double() - wanted).norm()) / norm if norm else 0.0
        return error if np.isfinite(error) else float("inf")

    return {"error": relative(out), "rounding": relative(wanted.to(out.dtype))}


def near(found: dict[str, Any]) -> bool:
    """Tell whether `errors` are within the limits."""
    return bool(np.isfinite(found["error"]) and found["error"] <= ROUNDINGS * found["rounding"] + MORE_ERROR)


def launches(device: torch.device) -> list[Launch]:
    """The GPU's own variant first, then, where that copies in bulk, the one that does not."""
    from kernels_cuda.cuda import CudaKernels, kernels

    best = kernels(device)
    found = [best.launch]
    if best.variant.bulk_copy:
        found.append(CudaKernels(device, replace(best.variant, bulk_copy=False)).launch)
    return found


def right(result: dict[str, Any]) -> bool:
    """Tell whether the findings of `check` are within the limits."""
    return near(result) and bool(result["same_bits"])


def main(as_json: bool, count: int = 60, seed: int = 1) -> int:
    """Run all cases on the first GPU. Returns the exit status: 0 if all are right."""
    device = torch.device("cuda", 0)
    ways, results, wrong = launches(device), [], []
    for case in cases(count, seed):
        results.append(check(case, device, ways))
        wrong += [] if right(results[-1]) else [results[-1]]
        if not as_json:
            print(json.dumps(results[-1]), flush=True)
    summary = {"cases": len(results), "worst_error": max(r["error"] for r in results), "wrong": wrong}
    print(json.dumps({**summary, "results": results} if as_json else summary, indent=2))
    return 1 if wrong else 0
