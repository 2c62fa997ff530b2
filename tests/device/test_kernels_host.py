"""What stands around the kernels on a host: tiles, tables, shares of jobs, variants and texts for compilers.

What a compiler makes of every kernel: make gpu-build.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from bench import gpu_build, gpu_ptx
from kernels_cuda import build
from kernels_cuda.cuda import CudaKernels
from kernels_cuda.heuristics import Variant, choose
from kernels_cuda.launch import DeviceStep, Workspace, arguments, max_rank_of
from kernels_cuda.layout import GROUP, MAX_RANK, BlockShape, PairShape, pack, shape_of, unpack
from kernels_cuda.ops import NOTHING, Block, Pair, stack
from kernels_cuda.shares import job_cost, rows_of_jobs, shares
from kernels_cuda.sizes import CHUNK, CHUNKS, FRAGMENT_BYTES, TILE_BYTES
from kernels_cuda.tables import BLOCK, BlockTable
from lora_server.device.protocol import source
from tests.support.gpu import emulated, gpu_texts

# -- tiles and tables


def random_block(random: np.random.Generator, dtype: torch.dtype) -> tuple[Block, int, int]:
    in_width, row, pairs = int(random.integers(1, 1200)), 0, []
    for _ in range(random.integers(0, 4)):
        row += int(random.choice([0, 0, 7]))
        rank, rows = int(random.integers(1, 257)), int(random.integers(1, 500))
        noise = torch.from_numpy(random.standard_normal((rank, in_width + rows)).astype(np.float32)).to(dtype)
        pairs.append(Pair(noise[:, :in_width], noise[:, in_width:].t(), 0.5, row))
        row += rows
    return stack(pairs), in_width, row + int(random.choice([1, 30]))


@pytest.mark.parametrize("seed", range(60))
def test_unpack_undoes_pack(seed):
    random = np.random.default_rng(seed)
    dtype = (torch.bfloat16, torch.float16)[seed % 2]
    block, in_width, out_width = random_block(random, dtype)
    shape = shape_of(block, in_width, out_width)
    tiles = pack(block, shape, dtype)
    assert tiles.shape == (shape.num_tiles, TILE_BYTES) and tiles.dtype == torch.uint8
    again = unpack(tiles, shape, dtype)
    assert [pair[2:] for pair in again.pairs] == [pair[2:] for pair in block.pairs]
    for got, expected in zip(again.pairs, block.pairs, strict=True):
        assert torch.equal(got.a_RK, expected.a_RK) and torch.equal(got.b_OR, expected.b_OR)
    assert sum(pair.out_rows for pair in shape.pairs) == out_width
    assert shape.read_bytes <= tiles.nbytes


def test_fragments_follow_the_mma_layout():
    """Lane (line, quad) register i of a fragment, by the PTX manual's table for 16-bit A operands."""
    rank, in_width, rows = 40, CHUNK * 3, 100
    a_RK = torch.arange(rank * in_width).view(rank, in_width)
    b_OR = torch.arange(rows * rank).view(rows, rank) + 30000
    halves = [t.to(torch.int16).view(torch.bfloat16) for t in (a_RK, b_OR)]  # numbers as bit patterns
    shape = shape_of(stack([Pair(*halves, 1.0, 0)]), in_width, rows)
    tiles = pack(stack([Pair(*halves, 1.0, 0)]), shape, torch.bfloat16).view(torch.int16).view(-1, 16, 32, 8).numpy()
    tiles_of_a = {(0, 0): 0, (1, 0): 1, (0, 2): 4, (2, 0): 6, (2, 1): 7}
    for lane in range(32):
        line, quad = divmod(lane, 4)
        for element in range(8):
            row, k = line + 8 * (element // 2 % 2), element % 2 + 2 * (element // 4)
            for (chunk, group), tile_of_a in tiles_of_a.items():
                for fragment in range(16):
                    column = chunk * 256 + fragment // 2 * 32 + 8 * quad + fragment % 2 * 4 + k
                    expected = int(a_RK[group * 16 + row, column].short()) if group * 16 + row < rank else 0
                    assert tiles[tile_of_a, fragment, lane, element] == expected
            for tile in range(2):  # 3 groups: 5 blocks of 16 rows, in bands of 4 and 1; the second tile has 2
                bands = [(0, 4), (4, 1)] if tile == 0 else [(0, 2)]
                for first, blocks in bands:
                    for block in range(blocks):
                        out = tile * 80 + first * 16 + line * 2 * blocks + 2 * block + row // 8
                        for group in range(3):
                            at = group * 16 + 4 * quad + k
                            expected = int(b_OR[out, at].short()) if out < rows and at < rank else 0
                            assert tiles[9 + tile, (first + block) * 3 + group, lane, element] == expected


def test_a_layout_in_numbers():
    shape = BlockShape(2880, (PairShape(64, 0, 5760, 2.0),))
    assert shape.num_tiles == 12 * 4 + 90
    assert shape.read_bytes == 64 * (2880 + 5760) * 2, "no byte more than the weights"
    assert shape_of(NOTHING, 64, 10) == BlockShape(64, (PairShape(0, 0, 10, 0.0),))
    assert max_rank_of([8, 64, 65]) == 16 + 64 + 80
    assert FRAGMENT_BYTES * 16 == TILE_BYTES


def test_what_cannot_be_packed_is_refused():
    def pair(rank: int, width: int, rows: int, begin: int) -> Pair:
        return Pair(torch.zeros(rank, width), torch.zeros(rows, rank), 1.0, begin)

    for pairs, reason in (
        ([pair(257, 8, 4, 0)], "257"),
        ([pair(4, 9, 4, 0)], r"\[4, 9\], expected \[1..256, 8\]"),
        ([pair(4, 8, 4, 7)], r"rows \[7, 11\)"),
        ([pair(4, 8, 4, 0), pair(4, 8, 4, 3)], r"rows \[3, 7\)"),
        ([pair(1, 8, 1, 2 * i + 1) for i in range(4)], "9 pairs and gaps"),
    ):
        with pytest.raises(ValueError, match=reason):
            shape_of(stack(pairs), 8, 10)
    with pytest.raises(ValueError, match="got rank 257"):
        max_rank_of([257])


def test_the_block_table_gives_rows_and_takes_them_back():
    shape = BlockShape(64, (PairShape(20, 0, 30, 2.0), PairShape(0, 30, 10, 0.0)))
    table = BlockTable(2, "cpu")
    rows = [table.add(pages, shape) for pages in (4096, 8192)]
    with pytest.raises(ValueError, match="all 2 rows"):
        table.add(0, shape)
    table.remove(rows[0])
    assert table.add(512, shape) == rows[0]
    stored = table.tensor.numpy().view(BLOCK).ravel()
    assert stored["pages"][rows].tolist() == [512, 8192]
    assert stored["groups"].tolist() == [2, 2] and stored["num_pairs"].tolist() == [2, 2]
    assert stored["pairs"][0][:2].tolist() == [(2, 0, 30, 2.0), (0, 30, 10, 0.0)]


BUILT = [Variant(True, 2), Variant(False, 2), Variant(True, 3, 3)]  # by other tests
OTHERS = [pytest.param(one, marks=pytest.mark.long) for one in (Variant(False, 1), Variant(True, 8))]


@pytest.mark.emulator
@pytest.mark.parametrize("variant", BUILT + OTHERS)
def test_shared_memory_is_what_the_source_declares(variant):
    assert variant.shared_bytes == emulated.shared_bytes(variant)


# -- shares: each job in exactly one, none much dearer than another; the CUDA source cuts the same

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
    first, last = chunks[0] // CHUNKS, chunks[-1] // CHUNKS
    return [
        [(chunk, group * GROUP, partial - first) for chunk in chunks if chunk // CHUNKS == partial]
        for partial in range(first, last + 1)
        for group in range(shape.groups)
    ]


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
            self.window = tuple(np.sort(random.choice(self.in_width + 1, 2, replace=False)).tolist())
        if random.random() < 0.5:
            bounds = np.sort(random.choice(self.out_width + 1, 6, replace=False)).tolist()
            self.windows = list(zip(bounds[::2], bounds[1::2], strict=True))
        self.warps, self.grid = int(random.choice([1, 2, 5])), int(random.choice([1, 2, 9]))

    def listed(self) -> list[tuple[list[Tile], list[Tile]]]:
        """What the CUDA source gives each worker: tiles of A, tiles of B."""
        pages = torch.zeros(4096, dtype=torch.int64)
        table = BlockTable(4, "cpu")
        index = {shape: table.add(pages.data_ptr(), shape) for shape in dict.fromkeys(self.shape_S)}
        of_each = zip(self.shape_S, self.first_S, self.rows_S, strict=True)
        segments = [(index[shape], 0, first, rows) for shape, first, rows in of_each]
        entries = max(1, int(self.rows_S.sum()))
        step = DeviceStep(
            rows_TK=torch.zeros(1, self.window[1] - self.window[0], dtype=torch.bfloat16),
            segments=torch.tensor(segments, dtype=torch.int32).view(-1, 4), blocks=table.tensor,
            counts=torch.tensor([len(segments), entries, entries], dtype=torch.int32), in_width=self.in_width,
            windows=self.windows, in_begin=self.window[0], in_map_N=torch.zeros(entries, dtype=torch.int32),
        )  # fmt: skip
        out = torch.zeros(1, step.out_width, dtype=torch.bfloat16)
        most = {"max_entries": entries, "max_rank": 16, "max_in_width": self.in_width, "max_out_width": 0}
        workspace = Workspace.new(**most, device="cpu")
        variant = Variant(bulk_copy=True, warps=self.warps)
        records = torch.zeros(self.grid * self.warps, 2, MOST_TILES, RECORD_INTS, dtype=torch.int32)
        counts = torch.full(records.shape[:2], -1, dtype=torch.int32)
        values = arguments(step, out, workspace, variant.stages)
        values[OUT], values[GROUPS] = records.data_ptr(), counts.data_ptr()
        emulated.run("list_shares", values, variant, source="list_shares.cu", grid=self.grid, instead=LISTER)

        def tiles(worker: int, phase: int, fields: tuple[int, ...]) -> list[Tile]:
            return [tuple(tile) for tile in records[worker, phase, : counts[worker, phase], fields].tolist()]

        return [(tiles(worker, 0, SHRINK), tiles(worker, 1, EXPAND)) for worker in range(len(records))]

    def tiles_of(self, shape: BlockShape, phase: int) -> list[list[Tile]]:
        return jobs_of_b(shape, self.windows) if phase else jobs_of_a(shape, *self.window)

    def jobs(self, phase: int) -> Iterator[list[Tile]]:
        """The tiles of each job of a phase, by the words of the layout."""
        for first, rows, shape in zip(self.first_S, self.rows_S, self.shape_S, strict=True):
            for row in range(0, rows, 32):
                for job in self.tiles_of(shape, phase):
                    yield [(int(first + row), int(min(rows - row, 32)), *tile) for tile in job]


@pytest.mark.emulator
@pytest.mark.parametrize("seed", range(80))
def test_the_source_gives_every_job_to_one_worker_as_the_mirror_does(seed):
    step = RandomStep(seed)
    listed = step.listed()
    for phase in (0, 1):
        jobs = list(step.jobs(phase))
        per_rows_S = [len(step.tiles_of(shape, phase)) for shape in step.shape_S]
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


# -- variants, and texts for compilers

# compute capability, and shared memory per block
HOSTS = {"H100, H200": ((9, 0), 232448), "A100": ((8, 0), 166912), "A10, L40": ((8, 6), 101376)}


@pytest.mark.parametrize("name", HOSTS)
def test_what_is_built_is_the_variant_that_the_gpu_gets(name):
    chosen, gpu = choose(*HOSTS[name]), gpu_build.GPUS[name]
    assert list(chosen.defines) == gpu.defines and gpu.arch.startswith("sm_90" if chosen.bulk_copy else "sm_80")
    assert chosen.shared_bytes <= HOSTS[name][1]


def test_every_source_is_built_and_held_to_its_bounds():
    sources = {path.name for path in build.SOURCE.glob("*.cu")} | source.FILES.keys() | gpu_build.OTHERS.keys()
    built = {job.name for job in gpu_build.JOBS}
    assert {name for name in sources if name.endswith(".cu")} == built
    job = gpu_build.Job("lora_step.cu", gpu_build.HOPPER)
    good = gpu_build.Usage("lora_step_bfloat16", 0, 0, 0, 255)
    assert not job.complaints(good, 1)
    for bad, nbytes in (
        (good._replace(stack=8), 1), (good._replace(spill_stores=4), 1), (good._replace(spill_loads=4), 1),
        (good._replace(registers=257), 1), (good, 0), (good, 200_000),
    ):  # fmt: skip
        (complaint,) = job.complaints(bad, nbytes)
        assert "lora_step_bfloat16" in complaint
    protocol = gpu_build.Usage("serve_bfloat16", 8, 0, 0, 162)
    assert gpu_build.Job("serve.cu", gpu_build.HOPPER).complaints(protocol, 1)
    assert not gpu_build.Job("serve.cu", gpu_build.HOPPER, nvshmem=True).complaints(protocol, 1)


def test_gpus_that_cannot_run_them_are_refused():
    with pytest.raises(ValueError, match=r"\(7, 5\), expected at least \(8, 0\)"):
        choose((7, 5), 65536)
    with pytest.raises(ValueError, match="16384 bytes of shared memory"):
        choose((8, 0), 16384)


def test_a_kernel_alone_is_the_text_without_the_others():
    assert build.read_source().count("struct Ring {") == 1 and "#include" not in build.read_source()
    assert "instead" in build.read_source(instead={"ptx.cuh": "// instead"})
    kernels = [f"{kernel}_{dtype}" for kernel in build.KERNELS for dtype in build.DTYPES]
    for name in kernels:
        text = build.read_kernel(name)
        assert [kernel for kernel in kernels if f"KERNEL({kernel}," in text] == [name]
        assert len(text.splitlines()) == len(build.read_source().splitlines()) - len(kernels) + 1


class FakeCuPy(ModuleType):
    """As much of CuPy as compiling takes; `compiled` holds the texts."""

    def __init__(self) -> None:
        super().__init__("cupy")
        self.compiled: list[str] = []
        device = MagicMock()
        device.return_value.attributes = {"MaxSharedMemoryPerBlockOptin": 232448, "MultiProcessorCount": 132}
        self.cuda = SimpleNamespace(Device=device, driver=MagicMock(), runtime=MagicMock())

    def RawModule(self, *, code: str, options: tuple[str, ...], enable_cooperative_groups: bool) -> MagicMock:  # noqa: N802
        assert enable_cooperative_groups and build.STANDARD in options
        self.compiled.append(code)
        return MagicMock()


def test_a_process_compiles_what_it_launches_and_nothing_else(monkeypatch):
    fake = FakeCuPy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    kernels = CudaKernels(torch.device("cuda", 0), Variant(bulk_copy=True, warps=8))
    assert not fake.compiled
    assert kernels.compile(torch.bfloat16) > 0
    assert kernels.compile(torch.bfloat16) == 0
    assert fake.compiled == [build.read_kernel("lora_step_bfloat16")]
    kernels.compile(torch.float16, "shrink")
    assert fake.compiled[1:] == [build.read_kernel("shrink_float16")]
    with pytest.raises(ValueError, match=r"got torch.float32, expected torch.bfloat16 or torch.float16"):
        kernels.compile(torch.float32)


def test_wrappers_are_those_of_the_table():
    """Nothing else here can tell: the emulator has a ptx.cuh and a system.cuh of its own."""
    gpu_texts.look_at_instructions()


def test_launch_bounds_are_the_threads_that_hosts_launch():
    gpu_texts.look_at_launch_bounds()


@pytest.mark.parametrize("kernel", ["link_wait", "put_e4m3_bfloat16", "lora_step_float16"])
@pytest.mark.parametrize("bulk_copy", [True, False])
def test_the_build_looks_for_each_instruction_and_for_launch_bounds(kernel, bulk_copy):
    emitted = {one: "\n".join(one.templates).replace("1, %0", "1, 128") for one in gpu_ptx.wrappers()}

    def look(without="", bounds=".maxntid 128, 1, 1", **changed):
        its = [changed.get(one.name, text) for one, text in emitted.items() if one.name != without]
        body = re.sub(r"%(?=\d)", "%rd", "\n".join(its)).replace("%%", "%")
        ptx = f".visible .entry {kernel}(\n)\n{bounds}\n{{\n{body}\n}}\n"
        return gpu_ptx.complaints(kernel, gpu_ptx.kernels(ptx)[kernel], bulk_copy, warps=4, launched=128)

    assert look() == []
    for name in gpu_ptx.used_by(kernel, bulk_copy):
        its = [one for one in emitted if one.name == name and one.branch is not (not bulk_copy)]
        assert f"no {name}()" in look(without=name) or not any(one.templates for one in its)
    assert look(sync_block="bar.sync 1, 96;") and look(bounds=".maxntid 96, 1, 1") and look(bounds="")
