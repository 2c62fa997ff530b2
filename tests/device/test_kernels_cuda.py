"""The CUDA kernels against the float64 reference: their source on this CPU everywhere, themselves where a GPU is.

On a host with only numpy, torch, cupy and pytest:
python -m pytest -c /dev/null --noconftest tests/device/test_kernels_cuda.py
"""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))  # without a conftest
sys.path.insert(0, str(Path(__file__).parents[1] / "support" / "gpu"))
import emulated
from packed import PackedStep, pack_step

from kernels_cuda import reference
from kernels_cuda.heuristics import Variant
from kernels_cuda.launch import Workspace, arguments, most_combined_entries
from kernels_cuda.ops import NOTHING, Block, Pair, Segment, Step, stack

SMALL = Variant(bulk_copy=True, warps=2)
LIMIT = {torch.bfloat16: 2e-3, torch.float16: 3e-4}  # of |error| / |result|, both as norms over the whole step
HALF_ULP = {torch.bfloat16: 2**-8, torch.float16: 2**-11}  # of one rounded number, relative to it
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
BACKENDS = [
    pytest.param("cpu", marks=pytest.mark.emulator, id="emulated"),
    pytest.param("cuda", marks=[needs_gpu, pytest.mark.cuda]),
]


@pytest.fixture(params=BACKENDS)
def device(request):
    return request.param


@pytest.fixture(params=[False, True], ids=["rows", "tokens"])
def combine(request):
    return request.param


def launch(packed: PackedStep, variant: Variant | None = None, kernels=("lora_step",), workspace=None, **how):
    """`how`: late or grid, of an emulated launch."""
    out = packed.poisoned_out()
    workspace = workspace or packed.poisoned_workspace(max(64, len(out)) if packed.step.out_map_N is None else 600)
    for kernel in kernels:
        if packed.step.rows_TK.is_cuda:
            from kernels_cuda.cuda import kernels as compiled

            compiled(packed.step.rows_TK.device, variant).launch(packed.step, out, workspace, kernel)
        else:
            emulated.launch(packed.step, out, workspace, variant or SMALL, kernel=kernel, **how)
    return out


def check(out: torch.Tensor, step: Step[Block]) -> None:
    assert torch.isfinite(out).all(), "garbage survived"
    expected = reference.lora_step(step)
    error = np.abs(out.double().cpu().numpy() - expected)
    if expected.size:
        assert (error <= HALF_ULP[out.dtype] * np.abs(expected) + 1e-4 * np.abs(expected).max()).all()
    if expected.size >= 500:
        assert np.linalg.norm(error) < LIMIT[out.dtype] * np.linalg.norm(expected)


class Maker:
    """Random steps from one seed."""

    def __init__(self, seed: int, dtype: torch.dtype, in_width: int, out_width: int) -> None:
        self.random, self.dtype = np.random.default_rng(seed), dtype
        self.generator = torch.Generator().manual_seed(seed)
        self.in_width, self.out_width = in_width, out_width

    def noise(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def block(self, *ranks: int, gaps: bool = False) -> Block:
        """Pairs that share the output rows, with some left to nobody."""
        pairs, share = [], self.out_width // max(1, len(ranks))
        for i, rank in enumerate(ranks):
            rows = share - (share // 3 if gaps else 0)
            pairs.append(Pair(self.noise(rank, self.in_width), self.noise(rows, rank), 2.0 / (i + 1), i * share))
        return stack(pairs)

    def step(self, blocks: list[Block], sizes: list[int], *, combine=False, rows=0, windows=None, window=None):
        entries = sum(sizes)
        begin, end = window or (0, self.in_width)
        places = enumerate(zip(accumulate(sizes, initial=0), sizes, strict=False))
        segments = [Segment(blocks[i % len(blocks)], first, size) for i, (first, size) in places]
        draw = torch.from_numpy
        return Step(
            rows_TK=self.noise(rows or entries, end - begin),
            segments=segments,
            num_entries=entries,
            num_out_rows=rows if combine else entries,
            windows=windows or ((0, self.out_width),),
            in_begin=begin,
            in_map_N=draw(self.random.integers(0, rows, entries)) if rows else None,
            out_map_N=draw(self.random.integers(0, rows, entries)) if combine else None,
            weights_N=draw(self.random.random(entries).astype(np.float32)) if combine else None,
        )

    def packed(self, step: Step[Block], device: str) -> PackedStep:
        return pack_step(step, self.in_width, self.out_width, device)


SHAPES = [  # K, O, ranks of each block's pairs, sizes of segments
    (256, 64, [(16,)], [1]),
    (512, 256, [(64,), (16,), (32,)], [1, 3, 8, 9, 33, 1]),
    (33, 12, [(1,), (3, 2)], [2, 1, 5]),
    (600, 200, [(8, 40), (256,), (100,)], [1, 40, 7]),
    (768, 520, [(48,), (80,), (96, 112)], [1, 2, 70]),
    (1100, 30, [(130,), (200, 17, 9)], [1, 12]),
    (2048, 96, [(32,)], [1, 1, 1, 1]),
    (4800, 40, [(16,), (40, 8)], [1, 9, 2]),  # more partial sums of an entry than their readers add
]


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_reference(device, dtype, shape, combine):
    in_width, out_width, ranks, sizes = shape
    make = Maker(in_width, dtype, in_width, out_width)
    blocks = [make.block(*r) for r in ranks] + [make.block(*r, gaps=True) for r in ranks if out_width > 40] + [NOTHING]
    step = make.step(blocks, sizes + [2] * len(blocks), combine=combine, rows=11)
    check(launch(make.packed(step, device)), step)


@pytest.mark.parametrize("in_begin, in_end", [(0, 700), (256, 512), (512, 700), (8, 264), (3, 30), (255, 513)])
@pytest.mark.parametrize("windows", [((0, 300),), ((10, 11),), ((0, 64), (100, 207)), ((5, 60), (64, 128), (280, 300))])
def test_windows(device, in_begin, in_end, windows):
    """Tensor parallelism: a slice of the input columns, up to three slices of the output rows."""
    make = Maker(in_begin + len(windows), torch.bfloat16, 700, 300)
    blocks = [make.block(16), make.block(24, 50), make.block(8, 8, 8, gaps=True)]
    step = make.step(blocks, [1, 9, 2], windows=windows, window=(in_begin, in_end))
    check(launch(make.packed(step, device)), step)


def example(device: str, combine: bool = False) -> tuple[Step[Block], PackedStep]:
    make = Maker(1, torch.bfloat16, 700, 200)
    blocks = [make.block(64), make.block(8, 24), make.block(200, gaps=True)]
    step = make.step(blocks, [1, 5, 40, 1, 17, 3], combine=combine, rows=19)
    return step, make.packed(step, device)


def test_every_variant_and_every_run_gives_the_same_bits(device, combine):
    _, packed = example(device, combine)
    expected = launch(packed)
    variants = [Variant(True, 3, 3), Variant(False, 4, 3)]  # few, since a GPU's compiler takes seconds for each
    if device == "cpu":
        variants += [Variant(True, 1), Variant(False, 2)]
    elif torch.cuda.get_device_capability() < (9, 0):
        variants = variants[1:]
    for variant in variants:
        assert torch.equal(launch(packed, variant), expected), variant
    assert torch.equal(launch(packed, kernels=("shrink", "expand")), expected), "two launches"
    assert torch.equal(launch(packed, late=False), expected)
    for grid in (1, 3):
        assert torch.equal(launch(packed, grid=grid), expected), f"{grid} blocks"
    workspace = packed.poisoned_workspace(600, spare_rank=48)
    for _ in range(3):
        assert torch.equal(launch(packed, workspace=workspace), expected), "a workspace used before"


@pytest.mark.emulator
@pytest.mark.parametrize("cost", ["1", pytest.param("rows", marks=pytest.mark.long)])
def test_what_jobs_are_said_to_cost_changes_no_bits(combine, cost):
    """With a cost of 1, shares are of equal numbers of jobs."""
    _, packed = example("cpu", combine)
    expected = launch(packed)
    instead = {"cost.cuh": f'#pragma once\n#include "ptx.cuh"\nDEVICE int job_cost(int rows) {{ return {cost}; }}'}
    for variant in (SMALL, Variant(False, 4, 3)):
        out = packed.poisoned_out()
        emulated.launch(packed.step, out, packed.poisoned_workspace(600), variant, instead=instead)
        assert torch.equal(out, expected), variant


def test_a_row_does_not_depend_on_its_neighbours(device):
    step, packed = example(device)
    together = launch(packed)
    make = Maker(1, torch.bfloat16, 700, 200)
    for segment in step.segments:
        for entry in {segment.first, segment.first + segment.num_entries - 1}:
            row, segments = step.rows_TK[int(step.in_map_N[entry])][None], [Segment(segment.block, 0, 1)]
            one = {"num_entries": 1, "num_out_rows": 1, "in_map_N": None}
            alone = replace(step, rows_TK=row, segments=segments, **one)
            assert torch.equal(launch(make.packed(alone, device))[0], together[entry]), entry


def test_infinities_and_nans_stay_in_their_row(device, combine):
    step, packed = example(device, combine)
    clean = launch(packed)
    packed.step.rows_TK[4] = float("inf")
    packed.step.rows_TK[7, 100] = float("nan")
    out = launch(packed)
    hit = torch.isin(step.in_map_N, torch.tensor([4, 7]))
    rows = torch.zeros(len(out), dtype=torch.bool)
    rows[step.out_map_N[hit] if combine else hit.nonzero().ravel()] = True
    assert not torch.isfinite(out[rows]).all(dim=1).any()
    assert torch.equal(out[~rows], clean[~rows])


def test_counts_on_the_device_decide(device):
    """One launch, captured once, serves steps of any size up to its tensors'."""
    step, packed = example(device, combine=True)
    full = launch(packed)
    workspace, out = packed.poisoned_workspace(600), packed.poisoned_out()
    if device == "cuda":
        launch(packed, workspace=workspace)  # compiles
        from kernels_cuda.cuda import kernels

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kernels(packed.step.rows_TK.device).launch(packed.step, out, workspace)
        run = graph.replay
    else:
        run = lambda: emulated.launch(packed.step, out, workspace, SMALL)  # noqa: E731
    fewer = replace(step, segments=step.segments[:3], num_entries=46)
    cut = {name: getattr(step, name)[:46] for name in ("in_map_N", "out_map_N", "weights_N")}
    for counts, expected in (([3, 46, 19], replace(fewer, **cut)), ([6, 67, 19], None), ([0, 0, 0], None)):
        out.fill_(float("nan"))
        packed.step.counts.copy_(torch.tensor(counts, dtype=torch.int32))
        run()
        if expected is not None:
            check(out, expected)
        elif counts[0]:
            assert torch.equal(out, full)
        else:
            assert out.isnan().all(), "nothing was asked for"


def test_segments_without_entries_and_many_segments(device):
    make = Maker(5, torch.float16, 64, 40)
    blocks = [make.block(4), make.block(20), NOTHING]
    sizes = [0, 1, 0, 0, 2, 1, 0] + [1] * 130 + [0]
    step = make.step(blocks, sizes)
    check(launch(make.packed(step, device), workspace=None), step)


def test_a_step_that_does_not_fit_is_refused():
    _, packed = example("cpu", combine=True)
    step, out, workspace = packed.step, packed.poisoned_out(), packed.poisoned_workspace(100)

    arguments(step, out, workspace, stages=2)
    most = most_combined_entries(2)
    many = torch.zeros(most + 1, dtype=torch.int32)
    widths = {"max_in_width": 700, "device": "cpu"}
    narrow = Workspace.new(max_entries=100, max_rank=256, max_out_width=199, **widths)
    large = Workspace.new(max_entries=most + 1, max_rank=16, max_out_width=200, **widths)
    for reason, fields, given in (
        ("float32", {"rows_TK": step.rows_TK.float()}, {}),
        ("float16", {}, {"out_UO": out.half()}),
        ("0 output windows", {"windows": ()}, {}),
        ("4 output windows", {"windows": ((0, 1), (2, 3), (4, 5), (6, 7))}, {}),
        ("expected 200 columns", {}, {"out_UO": out[:, :100]}),
        ("within the workspace", {"in_begin": 1}, {}),
        ("67 entries, expected at most 66", {}, {"workspace": packed.poisoned_workspace(66)}),
        ("int64, expected torch.int32", {"out_map_N": step.out_map_N.long()}, {}),
        ("200 columns to combine, expected at most 199", {}, {"workspace": narrow}),
        (f"{most + 1} entries", {"in_map_N": many, "out_map_N": many, "weights_N": None}, {"workspace": large}),
    ):
        with pytest.raises(ValueError, match=reason):
            arguments(replace(step, **fields), **({"out_UO": out, "workspace": workspace} | given), stages=2)


# every width of the models that we plan for, and the row counts at which something changes; a GPU's work
@needs_gpu
@pytest.mark.cuda
@pytest.mark.parametrize("in_width", [768, 2048, 2880, 4096, 6144, 10752, 14336])
@pytest.mark.parametrize("dtype, combine", [(torch.bfloat16, False), (torch.float16, True)], ids=["rows", "tokens"])
@pytest.mark.parametrize("popularity", ["one", "distinct", "zipf"])
def test_real_widths(in_width, dtype, combine, popularity):
    out_width = 2880 if in_width != 2880 else 5760
    make = Maker(in_width, dtype, in_width, out_width)
    blocks = [make.block(rank) for rank in (64, 16, 256, 8, 32, 129)]
    # the reference takes most of the time, and the longer the more entries
    sizes = {"one": [260], "distinct": [1] * 200, "zipf": [300, 80, 41, 20, 9, 5, 3, 2, 1, 1, 1]}[popularity]
    step = make.step(blocks, sizes, combine=combine, rows=61)
    packed = make.packed(step, "cuda")
    check(launch(packed, workspace=packed.poisoned_workspace(sum(sizes))), step)


def on_fake_gpu(packed: PackedStep):
    """The step's tensors as shapes on a GPU that need not exist."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode()
    workspace, out = packed.poisoned_workspace(600), packed.poisoned_out()

    def fake(tensor):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")

    def faked(thing):
        tensors = {name: value for name, value in vars(thing).items() if isinstance(value, torch.Tensor)}
        return replace(thing, **{name: fake(tensor) for name, tensor in tensors.items()})

    with mode:
        return mode, faked(packed.step), fake(out), faked(workspace)


def test_the_torch_operator_is_one_opaque_node():
    from torch.fx.experimental.proxy_tensor import make_fx

    from kernels_cuda.torch_ops import lora_step

    mode, step, out, workspace = on_fake_gpu(example("cpu", combine=True)[1])

    def engine(x, out):
        lora_step(replace(step, rows_TK=x * 2), out, workspace)
        return out + 1

    with mode:
        graph = make_fx(engine)(step.rows_TK, out).graph
    called = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    assert called == ["aten.mul.Tensor", "lora_server.lora_step.default", "aten.add.Tensor"]


@needs_gpu
@pytest.mark.cuda
def test_the_torch_operator_compiles():
    from kernels_cuda.torch_ops import lora_step

    _, packed = example("cuda", combine=True)
    expected = launch(packed)
    workspace = packed.poisoned_workspace(600)

    @torch.compile(fullgraph=True)
    def engine(x, out):
        lora_step(replace(packed.step, rows_TK=x + 0), out, workspace)
        return out * 1

    assert torch.equal(engine(packed.step.rows_TK, packed.poisoned_out()), expected)
