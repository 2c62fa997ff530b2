"""Rows in 8 bits as kernels make them: the bits of the host's rule, for every value and shape of a row."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_cuda.heuristics import Variant
from lora_server.transport import e4m3, put
from lora_server.transport.put import Put
from tests.support.gpu import emulated

pytestmark = pytest.mark.skipif(bool(emulated.MISSING), reason=emulated.MISSING)
PUT = Variant(bulk_copy=False, warps=1)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def as_kernels_do(x_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of all rows, by put.cu."""
    rows, width = x_TK.shape
    codes, scales = torch.zeros(rows, width, dtype=torch.float8_e4m3fn), torch.zeros(rows)
    said, finished = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    step = Put(
        x=x_TK, to=codes.data_ptr(), slot=0, signal=said.data_ptr(), value=7, finished=finished, in_codes=True,
        rows_M=torch.arange(rows, dtype=torch.int32), scales=scales.data_ptr(),
    )  # fmt: skip
    emulated.run(step.kernel, step.arguments(), PUT, source="put.cu", grid=2, stack_bytes=32 << 10)
    assert int(said) == 7
    return codes, scales


def by_the_host(x_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales = torch.zeros(x_TK.shape, dtype=torch.float8_e4m3fn), torch.zeros(len(x_TK))
    e4m3.quantise(x_TK, codes, scales)
    return codes, scales


def same_bits(x_TK: torch.Tensor) -> None:
    for ours, theirs in zip(as_kernels_do(x_TK), by_the_host(x_TK), strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


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


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gpus_torch_makes_the_same_bits_and_its_host_waits_for_nothing(dtype):
    """What a shard's loop does with its answers, and a client with what it got."""
    pick = torch.Generator().manual_seed(7)
    x = torch.ldexp(torch.randn(64, 5000, generator=pick), torch.randint(-30, 12, (64, 1), generator=pick)).to(dtype)
    x[3], x[5, 7], x[6, 9] = 0, math.nan, -math.inf
    there, codes = x.cuda(), torch.zeros(x.shape, dtype=torch.float8_e4m3fn, device="cuda")
    scales = torch.zeros(64, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        e4m3.quantise(there, codes, scales)
        values = e4m3.expand(codes, scales)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    theirs = by_the_host(x)
    assert all(
        torch.equal(a.cpu().view(torch.uint8), b.view(torch.uint8))
        for a, b in zip((codes, scales), theirs, strict=True)
    )
    torch.testing.assert_close(values.cpu(), e4m3.expand(*theirs), rtol=0, atol=0, equal_nan=True)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gpus_instructions_make_the_same_bits(dtype):
    """And are within the error of the format, of float64."""
    gpu, pick = torch.device("cuda"), torch.Generator().manual_seed(5)
    x = torch.ldexp(torch.randn(64, 1000, generator=pick), torch.randint(-30, 12, (64, 1000), generator=pick)).to(dtype)
    x[3], x[5, 7], x[6, 9] = 0, math.nan, -math.inf
    there, codes, scales = x.to(gpu), torch.zeros(x.shape, dtype=torch.uint8, device=gpu), torch.zeros(64, device=gpu)
    said, finished = torch.zeros(1, dtype=torch.int64, device=gpu), torch.zeros(1, dtype=torch.int32, device=gpu)
    rows, stream = torch.arange(64, dtype=torch.int32, device=gpu), torch.cuda.Stream()
    torch.cuda.synchronize()
    addresses = {"to": codes.data_ptr(), "scales": scales.data_ptr(), "signal": said.data_ptr(), "slot": 0}
    put.launch(Put(x=there, value=7, finished=finished, rows_M=rows, in_codes=True, **addresses), stream)
    stream.synchronize()
    ours, theirs = (codes.cpu().view(torch.float8_e4m3fn), scales.cpu()), by_the_host(x)
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(ours, theirs, strict=True))
    finite = x.isfinite().all(1)
    exact, got = x[finite].double(), ours[0][finite].double() * ours[1][finite, None].double()
    assert ((got - exact).abs() <= (2.0**-4 + 1e-6) * exact.abs() + 2.0**-10 * ours[1][finite, None].double()).all()
