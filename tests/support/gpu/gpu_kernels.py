"""Kernels that a host launches, each alone in a modelled world: a step, a put into host memory, a route."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Mapping
from functools import cache

import numpy as np
import torch

from kernels_cuda import routing
from kernels_cuda.heuristics import Variant
from kernels_cuda.launch import arguments
from kernels_cuda.ops import Pair, Segment, Step, stack
from lora_server.wire import slot
from tests.support.bounds import quantised
from tests.support.gpu import emulated
from tests.support.gpu.gpu_world import World, address, of_worlds
from tests.support.packed import PackedStep, pack_step

VARIANT = Variant(bulk_copy=True, warps=3)
GRIDS = 3, 5
SEEDS = 3
WIDTH, TOP_K = 40, 2


def load(source: str, instead: Mapping[str, str] | None = None) -> ctypes.CDLL:
    own = {path.name: path.read_text() for path in emulated.EMULATOR.glob("*.cu")}
    return of_worlds(emulated.library(source, VARIANT, own | dict(instead or {})))


def launched(world: World, kernel: str, values: list[int], grid: int) -> int:
    where = {"threads": 32 * VARIANT.warps, "device": 0, "shared_bytes": world.library.shared_bytes()}
    return world.launch(kernel, *values, grid=grid, **where)


@cache
def a_step(in_width: int, sizes: tuple[int, ...]) -> tuple[PackedStep, torch.Tensor]:
    """Segments of which some have more jobs than others, summed per token; and its result."""
    make = torch.Generator().manual_seed(3)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=make).to(torch.bfloat16)

    out_width, ranks = 72, (24, 8, 40, 16)[: len(sizes)]
    blocks = [stack([Pair(noise(r, in_width), noise(out_width, r), 0.5, 0)]) for r in ranks]
    firsts = np.cumsum([0, *sizes[:-1]]).tolist()
    segments = [Segment(block, first, size) for block, first, size in zip(blocks, firsts, sizes, strict=True)]
    entries, rows = sum(sizes), 11
    step = Step(
        rows_TK=noise(rows, in_width), segments=segments, num_entries=entries, num_out_rows=rows,
        windows=((0, out_width),), in_begin=0, in_map_N=torch.randint(rows, (entries,), generator=make),
        out_map_N=torch.randint(rows, (entries,), generator=make), weights_N=torch.rand(entries, generator=make),
    )  # fmt: skip
    packed = pack_step(step, in_width, out_width)
    out = packed.poisoned_out()
    emulated.launch(packed.step, out, packed.poisoned_workspace(64), Variant(bulk_copy=True, warps=2))
    return packed, out


def a_step_of_three_blocks_has_the_bits_of_two(library: ctypes.CDLL) -> None:
    """A short step, of which each reader adds the partial sums, and one of more partial sums than it may add."""
    for shape, seed in itertools.product(((700, (1, 40, 2, 9)), (4200, (30, 1))), range(SEEDS)):
        packed, expected = a_step(*shape)
        world, out, workspace = World(seed, library), packed.poisoned_out(), packed.poisoned_workspace(64)
        grid = launched(world, "lora_step_bfloat16", arguments(packed.step, out, workspace, VARIANT.stages), 3)
        ended(world, grid)
        assert torch.equal(out, expected), f"{shape[0]} columns, seed {seed}"
        assert workspace.v.isnan().all() == (shape[0] == 700), "a long step alone adds its partial sums once"


def ended(world: World, grid: int, turns: int = 300_000) -> None:
    while world.running(grid):
        world.run(1000)
        turns -= 1000
        assert turns > 0, "it never ends"


def a_put_of_any_grid_signals_what_is_there(library: ctypes.CDLL) -> None:
    """Twice, so that what counts blocks has to begin anew."""
    generator = np.random.default_rng(1)
    for grid in (1, *GRIDS):
        world = World(grid, library)
        x, which, finished = (world.private.new(*what) for what in (("<u2", 16, WIDTH), ("<i4", 16), ("<u4", 1)))
        to, signal = world.shared.new("<u2", 16, WIDTH), world.shared.new("<u8", 1)
        for value in (7, 8):
            x[:], which[:] = generator.integers(1, 1 << 16, x.shape, np.uint16), generator.permutation(16)
            values = [address(x), address(which), address(to), *[0] * 5, address(finished), address(signal), value, 16]
            its = launched(world, "put_vectors", [*values, 2 * WIDTH, x.strides[0], 0], grid)
            seen = False
            while world.running(its):
                world.run(1)
                if signal[0] == value and not seen:
                    seen = True
                    assert np.array_equal(to, x[which]), f"grid {grid}: the signal came before the rows"
                    assert world.is_ordered(address(signal), to), f"grid {grid}: the signal does not bring the rows"
            assert seen or (signal[0] == value and np.array_equal(to, x[which])), f"grid {grid}: no signal"
            assert finished[0] == 0


def a_routed_put_signals_tables_and_codes(library: ctypes.CDLL) -> None:
    """A step that was routed on the GPU: the put adds its tables, of more entries than threads, and makes codes."""
    generator, entries, tokens = np.random.default_rng(2), 700, 20
    for grid in (1, *GRIDS):
        world, new = World(grid, library), World.private.new
        x, which, counts = new("<u2", tokens, WIDTH), new("<i4", tokens), new("<i4", 4)
        segments, to_map, finished = new("<u4", entries, 4), new("<i4", entries), new("<u4", 1)
        to, signal = world.shared.new("u1", 1 << 15), world.shared.new("<u8", 1)
        rows = torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(grid)).to(torch.bfloat16)
        x[:], which[:] = rows.view(torch.uint16).numpy(), generator.permutation(tokens)
        counts[:] = [entries, entries, tokens, tokens]
        segments[:], to_map[:] = generator.integers(0, 99, segments.shape), generator.integers(0, tokens, entries)
        values = [address(x), address(which), 0, *map(address, (to, counts, segments, to_map)), 0]
        values += [address(finished), address(signal), 7, 0, 2 * WIDTH, x.strides[0], 0]
        its = launched(world, "put_e4m3_bfloat16", values, grid)
        while world.running(its) and signal[0] != 7:
            world.run(1)
        at = slot.request_offsets(entries, entries, slot.HAS_IN_MAP, tokens * WIDTH, tokens)
        codes, scales = quantised(rows[which.astype(np.int64)])
        parts = {at.segments: segments, at.in_map: to_map, at.scales: scales.numpy()}
        for begin, array in (parts | {at.rows: codes.view(torch.uint8).numpy()}).items():
            data = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
            assert np.array_equal(to[begin : begin + data.size], data), f"grid {grid}: byte {begin}"
            assert world.is_ordered(address(signal), to[begin : begin + data.size]), f"grid {grid}: byte {begin}"
        ended(world, its)
        assert finished[0] == 0 and signal[0] == 7


def codes_of_a_block_are_those_of_the_host(library: ctypes.CDLL) -> None:
    """Rows that keep all warps busy, in vectors and one by one; more than there are blocks."""
    for seed, width in enumerate((101, 264, 800) * 6):
        rows = torch.randn(9, width, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
        rows *= torch.arange(9, 0, -1)[:, None] ** 3
        world, x = World(seed, library), rows.contiguous()
        codes, scales = torch.empty(x.shape, dtype=torch.float8_e4m3fn), torch.empty(len(x))
        values = [x.data_ptr(), codes.data_ptr(), scales.data_ptr(), *x.shape]
        ended(world, launched(world, "to_codes", values, 2))
        expected = quantised(x)
        assert torch.equal(scales, expected[1]), f"seed {seed}"
        assert torch.equal(codes.view(torch.uint8), expected[0].view(torch.uint8)), f"seed {seed}"


def a_route_is_that_of_the_reference(library: ctypes.CDLL) -> None:
    """The route kernel equals the reference, with a map of tokens and without one, for many pairs and for few."""
    for seed, (tokens, absent) in enumerate([(150, 0.3), (1, 0.0), (150, 0.9), (37, 0.1)] * 16):
        rng, adapters, experts = np.random.default_rng(seed), 9, 11
        arrays = (
            rng.integers(-1, experts, (tokens, TOP_K)).astype(np.int32), rng.random((tokens, TOP_K), np.float32),
            np.where(rng.random(tokens) < absent, -1, rng.integers(0, adapters, tokens)).astype(np.int32),
            rng.integers(1, 1 << 20, (adapters, routing.DIRECTORY_INTS)).astype(np.int32),
        )  # fmt: skip
        world, route = World(seed, library), routing.Route.empty(tokens * TOP_K, "cpu", max_rows=tokens * TOP_K)
        choice = routing.Choice(*map(torch.from_numpy, arrays), experts, None)
        ended(world, launched(world, "route", routing.arguments(choice, route), 1))
        expected = routing.reference(*arrays, experts, None)
        assert route.counts.tolist() == [len(expected.segments), len(expected.pair_N), tokens, len(expected.token_M)]
        found = (route.segments, route.token_N, route.pair_N, route.weights_N, route.row_N, route.token_M)
        for tensor, wanted in zip(found, expected, strict=True):
            assert np.array_equal(tensor[: len(wanted)].numpy(), wanted), f"seed {seed}"


CASES = {
    "lora_step.cu": (a_step_of_three_blocks_has_the_bits_of_two,),
    "put.cu": (a_put_of_any_grid_signals_what_is_there, a_routed_put_signals_tables_and_codes),
    "to_codes.cu": (codes_of_a_block_are_those_of_the_host,),
    "route.cu": (a_route_is_that_of_the_reference,),
}
