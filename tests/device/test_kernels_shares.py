"""Shares of a step's jobs: each job in exactly one, none much dearer than another; the CUDA source cuts the same."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kernels_cuda.heuristics import Variant
from kernels_cuda.launch import DeviceStep, Workspace, arguments
from kernels_cuda.layout import CHUNK, CHUNKS, GROUP, MAX_RANK, BlockShape, PairShape
from kernels_cuda.shares import job_cost, rows_of_jobs, shares
from kernels_cuda.tables import BlockTable
from tests.support.gpu import emulated

LISTER = {"list_shares.cu": (emulated.EMULATOR / "list_shares.cu").read_text()}
MOST_TILES, RECORD_INTS = 4096, 12  # see list_shares.cu, ring.cuh
OUT, GROUPS = 7, 11  # of the arguments
SHRINK, EXPAND = (1, 2, 4, 5, 6), (1, 2, 6)  # first, rows, chunk, rank, partial; first, rows, output row: of a record

Tile = tuple[int, ...]


def random_shape(random: np.random.Generator, in_width: int, out_width: int) -> BlockShape:
    """Up to three pairs and as many gaps; sometimes no pair at all."""
    cuts = np.sort(random.integers(0, out_width + 1, int(random.integers(0, 6))))
    bounds = [0, *(int(cut) for cut in np.unique(cuts) if 0 < cut < out_width), out_width]
    ranks = [int(random.choice([0, 1, 16, 40, 64, 200, MAX_RANK])) for _ in bounds[1:]]
    if random.random() < 0.2:
        bounds, ranks = [0, out_width], [0]
    pairs = (PairShape(rank, a, b - a, 1.0) for rank, a, b in zip(ranks, bounds[:-1], bounds[1:], strict=True))
    return BlockShape(in_width, tuple(pairs))


def jobs_of_a(shape: BlockShape, begin: int, end: int) -> list[list[Tile]]:
    """For 32 entries: (chunk, rank, partial) of each tile of each job."""
    chunks = range(begin // CHUNK, -(-end // CHUNK))
    jobs = []
    for partial in range(chunks[0] // CHUNKS, chunks[-1] // CHUNKS + 1):
        mine = [chunk for chunk in chunks if chunk // CHUNKS == partial]
        for group in range(shape.groups):
            jobs.append([(chunk, group * GROUP, partial - chunks[0] // CHUNKS) for chunk in mine])
    return jobs


def jobs_of_b(shape: BlockShape, windows: list[tuple[int, int]]) -> list[list[Tile]]:
    """For 32 entries: the first output row of each tile that some window meets."""
    jobs = []
    for pair in shape.pairs:
        for row in range(pair.out_begin, pair.out_begin + pair.out_rows, GROUP * pair.tile_blocks):
            end = min(row + GROUP * pair.tile_blocks, pair.out_begin + pair.out_rows)
            if any(row < stop and begin < end for begin, stop in windows):
                jobs.append([(row,)])
    return jobs


class RandomStep:
    """A segment table over blocks without weights, some without ranks, and windows on both sides."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.in_width, self.out_width = int(random.choice([40, 256, 700, 1500])), int(random.choice([10, 300, 900]))
        shapes = [random_shape(random, self.in_width, self.out_width) for _ in range(4)]
        count = int(random.choice([0, 1, 3, 12, 100]))
        rows = random.choice([0, 1, 1, 1, 2, 8, 9, 31, 32, 33, 100], count)
        self.rows_S = rows.astype(np.int64) if count <= 12 else np.minimum(rows, 1).astype(np.int64)
        self.first_S = np.cumsum(self.rows_S) - self.rows_S
        self.shape_S = [shapes[i] for i in random.integers(0, len(shapes), count)]
        self.window, self.windows = (0, self.in_width), [(0, self.out_width)]
        if random.random() < 0.5:
            begin, end = np.sort(random.choice(self.in_width + 1, 2, replace=False))
            self.window = (int(begin), int(end))
        if random.random() < 0.5:
            bounds = [int(bound) for bound in np.sort(random.choice(self.out_width + 1, 6, replace=False))]
            self.windows = list(zip(bounds[::2], bounds[1::2], strict=True))
        self.warps, self.grid = int(random.choice([1, 2, 5])), int(random.choice([1, 2, 9]))

    def listed(self) -> list[tuple[list[Tile], list[Tile]]]:
        """What the CUDA source gives each worker: tiles of A, tiles of B."""
        pages = torch.zeros(4096, dtype=torch.int64)
        table = BlockTable(4, "cpu")
        index = {shape: table.add(pages.data_ptr(), shape) for shape in dict.fromkeys(self.shape_S)}
        segments = [
            (index[s], 0, first, rows) for s, first, rows in zip(self.shape_S, self.first_S, self.rows_S, strict=True)
        ]
        entries = max(1, int(self.rows_S.sum()))
        step = DeviceStep(
            rows_TK=torch.zeros(1, self.window[1] - self.window[0], dtype=torch.bfloat16),
            segments=torch.tensor(segments, dtype=torch.int32).view(-1, 4),
            blocks=table.tensor,
            counts=torch.tensor([len(segments), entries, entries], dtype=torch.int32),
            in_width=self.in_width,
            windows=self.windows,
            in_begin=self.window[0],
            in_map_N=torch.zeros(entries, dtype=torch.int32),
        )
        out = torch.zeros(1, step.out_width, dtype=torch.bfloat16)
        workspace = Workspace.new(
            max_entries=entries, max_rank=16, max_in_width=self.in_width, max_out_width=0, device="cpu"
        )
        variant = Variant(bulk_copy=True, warps=self.warps)
        records = torch.zeros(self.grid * self.warps, 2, MOST_TILES, RECORD_INTS, dtype=torch.int32)
        counts = torch.full(records.shape[:2], -1, dtype=torch.int32)
        values = arguments(step, out, workspace, variant.stages)
        values[OUT], values[GROUPS] = records.data_ptr(), counts.data_ptr()
        emulated.run("list_shares", values, variant, source="list_shares.cu", grid=self.grid, instead=LISTER)
        return [
            tuple(
                [tuple(tile) for tile in records[worker, phase, : counts[worker, phase], fields].tolist()]
                for phase, fields in enumerate((SHRINK, EXPAND))
            )
            for worker in range(len(records))
        ]

    def jobs(self, phase: int) -> Iterator[list[Tile]]:
        """The tiles of each job of a phase, by the words of the layout."""
        for first, rows, shape in zip(self.first_S, self.rows_S, self.shape_S, strict=True):
            tiles = jobs_of_b(shape, self.windows) if phase else jobs_of_a(shape, *self.window)
            for row in range(0, rows, 32):
                for job in tiles:
                    yield [(int(first + row), int(min(rows - row, 32)), *tile) for tile in job]


@pytest.mark.skipif(bool(emulated.MISSING), reason=emulated.MISSING)
@pytest.mark.parametrize("seed", range(80))
def test_the_source_gives_every_job_to_one_worker_as_the_mirror_does(seed):
    step = RandomStep(seed)
    listed = step.listed()
    for phase in (0, 1):
        jobs = list(step.jobs(phase))
        per_rows_S = [
            len(jobs_of_b(shape, step.windows) if phase else jobs_of_a(shape, *step.window)) for shape in step.shape_S
        ]
        rows_J = rows_of_jobs(step.rows_S, np.array(per_rows_S, np.int64))
        assert rows_J.tolist() == [job[0][1] for job in jobs]
        bounds = shares(job_cost(rows_J), len(listed))
        for worker, tiles in enumerate(listed):
            expected = [tile for job in jobs[bounds[worker] : bounds[worker + 1]] for tile in job]
            assert tiles[phase] == expected, (seed, phase, worker)


@pytest.mark.parametrize("seed", range(40))
def test_shares_are_a_partition_and_even(seed):
    random = np.random.default_rng(seed)
    cost_J = random.integers(1, 10, int(random.choice([0, 1, 5, 100, 5000])))
    workers = int(random.choice([1, 3, 7, 1056]))
    bounds = shares(cost_J, workers)
    assert bounds[0] == 0 and bounds[-1] == len(cost_J) and (np.diff(bounds) >= 0).all()
    costs = np.diff(np.concatenate([[0], np.cumsum(cost_J)])[bounds])
    assert costs.max() <= cost_J.sum() / workers + (cost_J.max() if len(cost_J) else 0)


def test_jobs_of_one_cost_are_shared_by_number():
    for jobs, workers in ((1792, 1056), (5, 1056), (1056, 1056), (1057, 1056), (0, 8)):
        assert np.diff(shares(np.full(jobs, 3), workers)).max() == -(-jobs // workers)


def test_what_jobs_cost():
    rows_J = rows_of_jobs(np.array([1, 0, 70, 9]), np.array([2, 3, 1, 0]))
    assert rows_J.tolist() == [1, 1, 32, 32, 6]
    assert job_cost(np.array([1, 8, 9, 16, 17, 32])).tolist() == [3, 3, 5, 5, 7, 9]
