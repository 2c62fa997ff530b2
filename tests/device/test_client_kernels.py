"""Kernels of clients: rows copied and added, routes, rows in 8 bits, beside torch's, numpy's or the host's."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kernels_cuda import routing
from kernels_cuda.heuristics import Variant
from lora_server.device.client import put
from lora_server.device.client.put import Put, PutPlace
from lora_server.device.protocol.layout import CLIENT
from lora_server.transport import e4m3
from lora_server.wire.slot import HEADER_BYTES, OK, ResponseHeader, signal
from tests.support.bounds import quantised
from tests.support.gpu import emulated

pytestmark = pytest.mark.emulator
VARIANT = Variant(bulk_copy=False, warps=2)
ALONE = {"alone.cu": '#define NVSHMEM 0\n#include "link.cu"\nstruct BlockMemory { LinkMemory its; };'}


# -- rows on their way, of any width and alignment


@pytest.mark.parametrize(
    ("kernel", "width", "begin", "rows"),
    [
        ("put_vectors", 8, 0, 3),
        ("put_vectors", 2048, 8, 1),  # exactly a piece
        ("put_vectors", 2056, 0, 9),
        ("put_vectors", 5000, 16, 2),
        ("put_halves", 1, 3, 4),
        ("put_halves", 257, 1, 5),
        ("put_halves", 2880, 2, 2),
        ("put_vectors", 4096, 0, 0),
    ],
)
@pytest.mark.parametrize("grid", [2, 3, 5])
def test_put_copies_whole_rows_and_nothing_else(kernel, width, begin, rows, grid):
    generator = np.random.default_rng(width)
    x = generator.integers(1, 1 << 16, (12, width + 24), dtype=np.uint16)
    which = generator.permutation(12)[:rows].astype(np.int32)
    to = np.zeros((rows + 1, width), np.uint16)
    signal, finished = np.zeros(1, np.uint64), np.zeros(1, np.uint32)
    from_ = x[:, begin:]
    values = [from_.ctypes.data, which.ctypes.data, to.ctypes.data, 0, 0, 0, 0, 0, finished.ctypes.data]
    values += [signal.ctypes.data, 7, rows, 2 * width, x.strides[0]]
    emulated.run(kernel, values, VARIANT, source="put.cu", grid=grid)
    assert np.array_equal(to[:rows], from_[which, :width]) and not to[rows:].any()
    assert signal[0] == 7 and finished[0] == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("widths", "window", "column", "columns"),
    [
        ((1024,), 0, 0, 1024),  # exactly a piece, in vectors
        ((1040, 64), 0, 8, 1048),
        ((8, 2880), 1, 0, 2880),
        ((6, 40), 1, 0, 40),  # the answer's window begins within a vector
        ((40,), 0, 2, 48),  # that of y
        ((22,), 0, 0, 24),  # the row's length
        ((16,), 0, 0, 18),  # rows of y
    ],
)
@pytest.mark.parametrize("grid", [2, 3])
def test_add_adds_its_window_and_nothing_else(dtype, widths, window, column, columns, grid):
    generator = torch.Generator().manual_seed(columns)
    answer_NO = torch.randn(5, sum(widths), generator=generator).to(dtype)
    y = torch.randn(9, columns, generator=generator).to(dtype)
    rows = torch.tensor([7, 0, 8, 3, 4], dtype=torch.int32)
    skip, count = sum(widths[:window]), widths[window]
    expected = y.float()
    expected[rows.long(), column : column + count] += answer_NO[:, skip : skip + count].float()
    memory = torch.zeros(HEADER_BYTES + 2 * answer_NO.numel(), dtype=torch.uint8)
    memory[HEADER_BYTES:] = answer_NO.view(torch.uint8).flatten()
    ResponseHeader(OK, 0, 7, 3, *[0] * 8).pack_into(memoryview(memory.numpy()))
    state, counts = np.zeros(1, CLIENT), np.array([1, 5, 5, 5], np.int32)
    seq, answered = np.full(1, 3, np.uint64), np.full(1, signal(7, 3), np.uint64)
    state["response_slots"], state["response_signal"] = memory.data_ptr(), answered.ctypes.data
    state["depth"], state["epoch"] = 1, 7
    values = [state.ctypes.data, seq.ctypes.data, counts.ctypes.data, rows.data_ptr(), 0, y.data_ptr(), 2 * columns]
    values += [sum(widths), column, count, skip]
    name = f"link_add_{str(dtype).removeprefix('torch.')}"
    emulated.run(name, values, VARIANT, source="alone.cu", grid=grid, instead=ALONE)
    assert torch.equal(y, expected.to(dtype))


# -- routes

GARBAGE = -77


def garbage(pairs):
    route = routing.Route.empty(pairs, "cpu", max_rows=pairs)
    for tensor in (*outputs(route), route.counts):
        tensor.fill_(GARBAGE)
    return route


def outputs(route):
    return (route.segments, route.token_N, route.pair_N, route.weights_N, route.row_N, route.token_M)


def inputs(tokens, top_k, num_adapters, num_experts, seed, popularity="zipf", absent=0.1):
    rng = np.random.default_rng(seed)
    weight = np.ones(num_adapters) if popularity == "uniform" else np.arange(1, num_adapters + 1) ** -1.2
    adapters = np.full(tokens, num_adapters - 1)
    if popularity != "one":
        adapters = rng.choice(num_adapters, tokens, p=weight / weight.sum())
    adapters[rng.random(tokens) < absent] = -1
    experts = rng.integers(-1 if absent else 0, num_experts, (tokens, top_k))
    directory = rng.integers(0, 1 << 20, (num_adapters, routing.DIRECTORY_INTS))
    directory[rng.random(num_adapters) < absent / 2, 2] = 0  # no delta at this site
    weights = rng.random((tokens, top_k), np.float32)
    return experts.astype(np.int32), weights, adapters.astype(np.int32), directory.astype(np.int32)


def choice(arrays, num_experts, among=None):
    return routing.Choice(*(torch.from_numpy(array) for array in arrays), num_experts, among)


def launch_route(arrays, num_experts, route, variant=VARIANT, among=None):
    values = routing.arguments(choice(arrays, num_experts, among), route)
    emulated.run("route", values, variant, source="route.cu")


def check_route(arrays, num_experts, variant=VARIANT, among=None):
    experts, _, adapters, _ = arrays
    route = garbage(experts.size + 3)
    launch_route(arrays, num_experts, route, variant, among)
    expected = routing.reference(*arrays, num_experts, among)
    segments, entries = len(expected.segments), len(expected.pair_N)
    assert route.counts.tolist() == [segments, entries, len(adapters), len(expected.token_M)]
    for tensor, wanted in zip(outputs(route), expected, strict=True):
        np.testing.assert_array_equal(tensor[: len(wanted)].numpy(), wanted)
        assert (tensor[len(wanted) :] == GARBAGE).all(), "wrote beyond what there is"


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 70),
    top_k=st.integers(1, 8),
    num_adapters=st.integers(1, 600),
    num_experts=st.integers(1, 128),
    seed=st.integers(0, 2**31),
    popularity=st.sampled_from(["zipf", "uniform", "one"]),
    absent=st.sampled_from([0.0, 0.1, 1.0]),
)
@example(1, 1, 1, 1, 0, "one", 0.0)
@example(1, 1, 1, 1, 0, "one", 1.0)
@example(64, 8, 4095, 128, 7, "uniform", 0.0)
def test_equals_the_reference(tokens, top_k, num_adapters, num_experts, seed, popularity, absent):
    check_route(inputs(tokens, top_k, num_adapters, num_experts, seed, popularity, absent), num_experts)


@settings(max_examples=20, deadline=None)
@given(tokens=st.integers(1, 40), begin=st.integers(0, 16), size=st.integers(0, 16), seed=st.integers(0, 2**31))
def test_only_the_experts_of_one_shard(tokens, begin, size, seed):
    check_route(inputs(tokens, 4, 9, 16, seed), 16, among=range(begin, min(begin + size, 16)))


def test_weights_that_nobody_asks_for():
    experts, weights, adapters, directory = inputs(9, 4, 5, 8, 3)
    route = garbage(36)
    arrays = [torch.from_numpy(array) for array in (experts, adapters, directory)]
    values = routing.arguments(routing.Choice(arrays[0], None, *arrays[1:], 8), route)
    emulated.run("route", values, VARIANT, source="route.cu")
    expected = routing.reference(experts, weights, adapters, directory, 8)
    np.testing.assert_array_equal(route.pair_N[: len(expected.pair_N)].numpy(), expected.pair_N)
    assert (route.weights_N == GARBAGE).all()


@pytest.mark.parametrize("warps", [*(pytest.param(warps, marks=pytest.mark.long) for warps in (4, 6)), 8])
@pytest.mark.parametrize(("tokens", "top_k"), [(1024, 8), (1024, 2), (8192, 1), (1170, 7)])
def test_large_steps(tokens, top_k, warps):
    check_route(inputs(tokens, top_k, 512, 128, warps), 128, Variant(bulk_copy=False, warps=warps))


def test_shared_memory_is_what_the_source_says():
    for warps in (2, 8):
        variant = Variant(bulk_copy=False, warps=warps)
        assert emulated.shared_bytes(variant, "route.cu") == routing.shared_bytes(warps)


def test_a_second_step_in_the_same_memory():
    route = garbage(512)
    for seed, tokens in ((1, 64), (2, 3), (3, 64)):
        arrays = inputs(tokens, 8, 100, 32, seed)
        launch_route(arrays, 32, route)
        expected = routing.reference(*arrays, 32)
        assert route.counts.tolist()[:3] == [len(expected.segments), len(expected.pair_N), tokens]
        np.testing.assert_array_equal(route.pair_N[: len(expected.pair_N)].numpy(), expected.pair_N)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: (a[0].astype(np.int64), *a[1:]), "experts is torch.int64"),
        (lambda a: (a[0], a[1][:, :1].copy(), *a[2:]), r"weights is torch.float32 \(4, 1\)"),
        (lambda a: (*a[:2], a[2][:3], a[3]), r"adapters is torch.int32 \(3,\)"),
        (lambda a: (*a[:3], np.zeros((1 << 19, 3), np.int32)), "list only those that are in use"),
        (lambda a: (np.zeros((9, 2), np.int32), np.zeros((9, 2), np.float32), *a[2:]), "cut the step"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    arrays = change(inputs(4, 2, 5, 3, 0))
    with pytest.raises(ValueError, match=message):
        routing.arguments(choice(arrays, 3), garbage(8))


# -- rows in 8 bits: the bits of the host's rule, for every value and shape of a row

PUT = Variant(bulk_copy=False, warps=1)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def as_kernels_do(x_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, width = x_TK.shape
    codes, scales = torch.zeros(rows, width, dtype=torch.float8_e4m3fn), torch.zeros(rows)
    said, finished = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    step = Put(
        x=x_TK, to=codes.data_ptr(), place=PutPlace(0, said.data_ptr(), 7, finished), in_codes=True,
        rows_M=torch.arange(rows, dtype=torch.int32), scales=scales.data_ptr(),
    )  # fmt: skip
    emulated.run(step.kernel, step.arguments(), PUT, source="put.cu", grid=3, stack_bytes=32 << 10)
    assert int(said) == 7
    return codes, scales


def same_bits(x_TK: torch.Tensor, *found: torch.Tensor) -> None:
    """Codes and scales that were found, or that our kernel makes."""
    for ours, theirs in zip(found or as_kernels_do(x_TK), quantised(x_TK), strict=True):
        assert torch.equal(ours.cpu().view(torch.uint8), theirs.view(torch.uint8))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 5),
    width=st.integers(1, 300),
    exponent=st.integers(-149, 120),
    spread=st.integers(0, 40),
    dtype=st.sampled_from(DTYPES),
    odd=st.lists(st.sampled_from([math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0]), max_size=3),
)
def test_a_put_makes_the_bits_of_the_hosts_rule(seed, rows, width, exponent, spread, dtype, odd):
    pick = torch.Generator().manual_seed(seed)
    down = torch.randint(-spread, 1, (rows, width), generator=pick)
    x = torch.ldexp(torch.randn(rows, width, generator=pick), down + exponent).to(dtype)
    for value in odd:
        row, column = (int(torch.randint(high, (1,), generator=pick)) for high in (rows, width))
        x[row, column] = value
    same_bits(x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_value_there_is(dtype):
    """By itself, and beside a row's largest that is a code's, a power of two, and neither. Of 32 bits, some."""
    values = torch.arange(1 << 16, dtype=torch.int32)
    values = (values * 0x10001).view(dtype) if dtype == torch.float32 else values.to(torch.int16).view(dtype)
    finite = values[values.isfinite()]
    same_bits(finite[::7, None].contiguous())
    for largest in (448.0, 1.0, 1.7):
        below = finite[finite.abs() <= largest]
        same_bits(torch.cat([torch.tensor([largest], dtype=dtype), below])[None])
    same_bits(torch.zeros(2, 24, dtype=dtype))


def some_rows(width: int, spread: int, dtype: torch.dtype) -> torch.Tensor:
    """Of many magnitudes; a row of zeros, and two with values that are no number."""
    pick = torch.Generator().manual_seed(5)
    down = torch.randint(-30, 12, (64, spread), generator=pick)
    x = torch.ldexp(torch.randn(64, width, generator=pick), down).to(dtype)
    x[3], x[5, 7], x[6, 9] = 0, math.nan, -math.inf
    return x


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gpus_torch_makes_the_same_bits_and_its_host_waits_for_nothing(dtype):
    """What a shard's loop does with its answers, and a client with what it got."""
    x = some_rows(5000, 1, dtype)
    there, codes = x.cuda(), torch.zeros(x.shape, dtype=torch.float8_e4m3fn, device="cuda")
    scales = torch.zeros(64, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        e4m3.quantise(there, codes, scales)
        values = e4m3.expand(codes, scales)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    same_bits(x, codes, scales)
    torch.testing.assert_close(values.cpu(), e4m3.expand(*quantised(x)), rtol=0, atol=0, equal_nan=True)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gpus_instructions_make_the_same_bits(dtype):
    """And are within the error of the format, of float64."""
    gpu, x = torch.device("cuda"), some_rows(1000, 1000, dtype)
    there, codes, scales = x.to(gpu), torch.zeros(x.shape, dtype=torch.uint8, device=gpu), torch.zeros(64, device=gpu)
    said, finished = torch.zeros(1, dtype=torch.int64, device=gpu), torch.zeros(1, dtype=torch.int32, device=gpu)
    rows, stream = torch.arange(64, dtype=torch.int32, device=gpu), torch.cuda.Stream()
    torch.cuda.synchronize()
    place = PutPlace(0, said.data_ptr(), 7, finished)
    step = Put(x=there, to=codes.data_ptr(), place=place, rows_M=rows, in_codes=True, scales=scales.data_ptr())
    put.launch(step, stream)
    stream.synchronize()
    same_bits(x, codes, scales)
    finite = x.isfinite().all(1)
    exact, scale = x[finite].double(), scales.cpu()[finite, None].double()
    got = codes.cpu().view(torch.float8_e4m3fn)[finite].double() * scale
    assert ((got - exact).abs() <= (2.0**-4 + 1e-6) * exact.abs() + 2.0**-10 * scale).all()
