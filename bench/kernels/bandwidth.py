"""The read bandwidth of this GPU, measured in the run that uses it."""

from __future__ import annotations

import torch

from bench.kernels.timing import median_us
from kernels_cuda.cuda import on_torch_stream

BUFFER_BYTES = 4 << 30
SOURCE = r"""
extern "C" __global__ void read_all(const uint4* from, unsigned long long count, unsigned* out) {
    unsigned sum = 0;
    const unsigned long long stride = (unsigned long long)gridDim.x * blockDim.x;
    unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + 7 * stride < count; i += 8 * stride) {
        uint4 v[8];
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = __ldcs(from + i + j * stride);
#pragma unroll
        for (int j = 0; j < 8; j++) sum += v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
    }
    for (; i < count; i += stride) sum += from[i].x;
    if (sum == 0x12345678u) *out = sum;  // practically never: the reads must not be optimised away
}
"""


def read_gbps(device: torch.device) -> float:
    """Bytes per ns of a kernel that only reads, the best of several grids; its buffer is far larger than L2."""
    import cupy

    kernel = cupy.RawKernel(SOURCE, "read_all")
    buffer = torch.randint(-(2**62), 2**62, (BUFFER_BYTES // 8,), dtype=torch.int64, device=device)
    out = torch.zeros(1, dtype=torch.int32, device=device)
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    best = 0.0
    for blocks_per_sm, threads in ((2, 1024), (4, 512), (8, 256), (16, 256)):

        def run(grid: int = blocks_per_sm * sms, threads: int = threads) -> None:
            with on_torch_stream(device):
                kernel((grid,), (threads,), (buffer.data_ptr(), buffer.nbytes // 16, out.data_ptr()))

        best = max(best, buffer.nbytes / median_us(run, device) / 1e3)
    return best
