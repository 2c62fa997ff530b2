"""Rows on their way: what a client's kernels copy and add, of any width and alignment, beside torch's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels_cuda.heuristics import Variant
from lora_server.transport import put
from lora_server.transport.gpu import source
from lora_server.transport.gpu.layout import CLIENT
from lora_server.wire.slot import HEADER_BYTES
from tests.support.gpu.emulated import MISSING, run

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)
WARPS = Variant(bulk_copy=False, warps=2)
ALONE = {"alone.cu": '#define NVSHMEM 0\n#include "link.cu"\nstruct BlockMemory { LinkMemory its; };'}
KERNELS = {name: text for name, text in source.FILES.items() if name != "nvshmem.cuh"}


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
def test_put_copies_whole_rows_and_nothing_else(kernel, width, begin, rows):
    generator = np.random.default_rng(width)
    x = generator.integers(1, 1 << 16, (12, width + 24), dtype=np.uint16)
    which = generator.permutation(12)[:rows].astype(np.int32)
    to = np.zeros((rows + 1, width), np.uint16)
    signal, finished = np.zeros(1, np.uint64), np.zeros(1, np.uint32)
    from_ = x[:, begin:]
    values = [from_.ctypes.data, which.ctypes.data, to.ctypes.data, 0, 0, 0, 0, 0, finished.ctypes.data]
    values += [signal.ctypes.data, 7, rows, 2 * width, x.strides[0]]
    run(kernel, values, WARPS, source="put.cu", grid=2)
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
def test_add_adds_its_window_and_nothing_else(dtype, widths, window, column, columns):
    generator = torch.Generator().manual_seed(columns)
    answer_NO = torch.randn(5, sum(widths), generator=generator).to(dtype)
    y = torch.randn(9, columns, generator=generator).to(dtype)
    rows = torch.tensor([7, 0, 8, 3, 4], dtype=torch.int32)
    skip, count = sum(widths[:window]), widths[window]
    expected = y.float()
    expected[rows.long(), column : column + count] += answer_NO[:, skip : skip + count].float()
    memory = torch.zeros(HEADER_BYTES + 2 * answer_NO.numel(), dtype=torch.uint8)
    memory[HEADER_BYTES:] = answer_NO.view(torch.uint8).flatten()
    state, counts = np.zeros(1, CLIENT), np.array([1, 5, 5, 5], np.int32)
    state["response_slots"], state["depth"], state["answered"] = memory.data_ptr(), 1, 3
    values = [state.ctypes.data, counts.ctypes.data, rows.data_ptr(), 0, y.data_ptr(), 2 * columns]
    values += [sum(widths), column, count, skip]
    name = f"link_add_{str(dtype).removeprefix('torch.')}"
    run(name, values, WARPS, source="alone.cu", grid=2, instead=put.FILES | KERNELS | ALONE)
    assert torch.equal(y, expected.to(dtype))
