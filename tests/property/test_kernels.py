"""kernels_cuda.cpu against the float64 loops of kernels_cuda.reference."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_cuda import cpu, reference
from kernels_cuda.ops import Pair, Segment, Step, stack
from tests.support.bounds import magnitudes, replaced

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# largest error of a result, relative to the largest result that rounding could reach (sum of magnitudes)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8 + 2e-6, torch.float16: 2**-11 + 2e-6}


def run(step, dtype):
    """The result, for which no input was changed."""
    pairs = [pair for segment in step.segments for pair in segment.block.pairs]
    inputs = [step.rows_TK, *(m for pair in pairs for m in (pair.a_RK, pair.b_OR))]
    inputs += [] if step.weights_N is None else [step.weights_N]
    before = [tensor.clone() for tensor in inputs]
    out = torch.full((step.num_out_rows, step.out_width), float("nan"), dtype=dtype)
    cpu.lora_step(step, out)
    assert all(torch.equal(now, then) for now, then in zip(inputs, before, strict=True))
    return out


def check(step, dtype):
    out = run(step, dtype).double().numpy()
    expected = reference.lora_step(step)
    assert np.isfinite(out).all(), "garbage of the buffer survived"
    error, bound = np.abs(out - expected), TOLERANCE[dtype] * magnitudes(step) + 1e-30
    bound += 2.0**-25 if dtype is torch.float16 else 0  # float16 has subnormals that large
    worst = np.unravel_index(np.argmax(error / bound), error.shape) if error.size else ()
    assert (error <= bound).all(), f"{worst}: got {out[worst]}, expected {expected[worst]}, bound {bound[worst]}"


@st.composite
def steps(draw):
    """Any step that the contract allows; numbers from one drawn seed."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31), label="seed"))
    dtype, weight_dtype = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DTYPES))
    full_width, site_width = draw(st.sampled_from([1, 8, 33, 64])), draw(st.sampled_from([1, 12, 48]))
    in_begin = draw(st.integers(0, full_width - 1))
    in_end = draw(st.integers(in_begin + 1, full_width))
    if draw(st.booleans()):
        in_begin, in_end = 0, full_width

    def noise(*shape):
        return torch.randn(shape, generator=generator)

    def pairs():
        found, begin = [], 0
        for _ in range(draw(st.integers(0, 3), label="pairs")):
            begin += draw(st.integers(0, 5), label="gap")
            rows = draw(st.sampled_from([1, 4, site_width]), label="rows of B")
            if begin + rows > site_width:
                break
            rank = draw(st.one_of(st.integers(1, 16), st.integers(1, 256)), label="rank")
            a, b = noise(rank, full_width).to(weight_dtype), noise(rows, rank).to(weight_dtype)
            found.append(Pair(a, b, draw(st.sampled_from([2.0, 0.5, -1.25])), begin))
            begin += rows
        return stack(found)

    sizes = draw(st.lists(st.integers(1, 6), max_size=5), label="segments")
    firsts = np.cumsum([0, *sizes])
    segments = [Segment(pairs(), int(first), size) for first, size in zip(firsts[:-1], sizes, strict=True)]
    entries = int(firsts[-1])
    windows = draw(windows_of(site_width))
    rows, in_map = entries, None
    if draw(st.booleans(), label="in_map"):
        rows = draw(st.integers(1, 8))
        kind = draw(st.sampled_from([torch.int32, torch.int64]))
        in_map = torch.randint(rows, (entries,), generator=generator).to(kind)
    out_rows, out_map = entries, None
    if draw(st.booleans(), label="out_map"):
        out_rows = draw(st.integers(1, 8))
        out_map = torch.randint(out_rows, (entries,), generator=generator).to(torch.int32)
    weights = noise(entries) if draw(st.booleans(), label="weights") else None
    maps = {"in_map_N": in_map, "out_map_N": out_map, "weights_N": weights}
    sizes = {"num_entries": entries, "num_out_rows": out_rows, "windows": windows, "in_begin": in_begin}
    return Step(rows_TK=noise(rows, in_end - in_begin).to(dtype), segments=segments, **sizes, **maps)


@st.composite
def windows_of(draw, width):
    """One to three disjoint windows, in order: all of the site, or slices of it."""
    if draw(st.booleans()):
        return ((0, width),)
    bounds = draw(st.lists(st.integers(0, width), min_size=2, max_size=6, unique=True).map(sorted))
    return tuple(zip(bounds[0::2], bounds[1::2], strict=False)) or ((0, width),)


@settings(max_examples=120, deadline=None)
@given(step=steps())
def test_equals_the_reference(step):
    check(step, step.rows_TK.dtype)


@settings(max_examples=40, deadline=None)
@given(step=steps().filter(lambda step: step.num_entries), data=st.data())
def test_an_entry_alone_equals_itself_in_the_batch(step, data):
    """Within float32 rounding; without an out_map, since that sums over entries."""
    step = replaced(step, out_map_N=None, num_out_rows=step.num_entries, rows_TK=step.rows_TK.float())
    together, bound = run(step, torch.float32), TOLERANCE[torch.float32] * magnitudes(step)
    entry = data.draw(st.integers(0, step.num_entries - 1))
    (segment,) = (s for s in step.segments if s.first <= entry < s.first + s.num_entries)
    row = entry if step.in_map_N is None else int(step.in_map_N[entry])
    fields = {"rows_TK": step.rows_TK[row : row + 1], "segments": [Segment(segment.block, 0, 1)]}
    fields |= {"weights_N": None if step.weights_N is None else step.weights_N[entry : entry + 1]}
    alone = replaced(step, num_entries=1, num_out_rows=1, in_map_N=None, **fields)
    difference = (run(alone, torch.float32)[0] - together[entry]).abs().double().numpy()
    assert (difference <= bound[entry] + 1e-30).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rank", [1, 8, 64, 256])
def test_realistic_widths_and_mixed_ranks(dtype, rank):
    generator = torch.Generator().manual_seed(rank)

    def noise(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    half = 320
    pairs = [Pair(noise(rank, 512), noise(half, rank), 2.0, begin) for begin in (0, half)]
    gate_up, up = stack(pairs), stack(pairs[1:])
    small = stack([Pair(noise(3, 512), noise(2 * half, 3), 0.25, 0)])
    rows = torch.randint(20, (40,), generator=generator, dtype=torch.int32)
    for maps in ({}, {"in_map_N": rows}, {"in_map_N": rows, "out_map_N": rows, "weights_N": noise(40).float()}):
        segments = [Segment(gate_up, 0, 17), Segment(stack([]), 17, 2), Segment(small, 19, 1), Segment(up, 20, 20)]
        sizes = {"num_entries": 40, "num_out_rows": 20 if "out_map_N" in maps else 40}
        sizes |= {"windows": ((0, 100), (half, half + 200))}
        check(Step(rows_TK=noise(20 if maps else 40, 512), segments=segments, **sizes, **maps), dtype)
