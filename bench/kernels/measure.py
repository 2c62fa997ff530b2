"""Our kernels at one site of one model: right first, then how fast, routing left out and routing included."""

from __future__ import annotations

import statistics
from typing import Any

import torch

from bench.kernels import ours
from bench.kernels.draws import distinct_pairs, draws
from bench.kernels.models import Model, Site
from bench.kernels.roofline import distinct_bytes
from bench.kernels.timing import Flush, capture, median_us, replay_us
from kernels_cuda.cuda import CudaKernels, on_torch_stream
from kernels_cuda.launch import DeviceStep, Workspace
from kernels_cuda.layout import BlockShape, PairShape
from kernels_cuda.routing import Router
from kernels_cuda.tables import BlockTable

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


SAMPLES = 12  # rows of each draw's result that are checked
SEED = 11


def rows_of(model: Model, site: Site, tokens: int, generator: torch.Generator) -> torch.Tensor:
    """gate_up gets one row per token, down one per (token, expert)."""
    count = tokens * model.top_k if site.combine else tokens
    return torch.randn(count, site.in_width, generator=generator, device=generator.device).to(ours.DTYPE)


def floor_bytes(model: Model, site: Site, tokens: int) -> list[float]:
    return [
        distinct_bytes(model, site, tokens, distinct_pairs(draw, model.num_experts)).total
        for draw in draws(model, tokens)
    ]


def site_result(model: Model, site: Site, tokens: int, adapters: ours.Adapters, gpu: Gpu) -> dict[str, Any]:
    """One model, number of tokens and site; times are medians per draw, averaged over the draws."""
    generator = torch.Generator(gpu.device).manual_seed(SEED)
    workspace = ours.workspace_for(model, site, tokens, gpu.device)
    on_device = [
        ours.device_draw(model, adapters, drawn, rows_of(model, site, tokens, generator))
        for drawn in draws(model, tokens)
    ]
    errors = []
    for seed, draw in enumerate(on_device):
        draw.out.fill_(float("nan"))
        for tensor in (workspace.partial, workspace.v, workspace.delta):
            tensor.fill_(float("nan"))
        ours.route(draw, gpu.router)
        ours.launch(draw, gpu.kernels, workspace)
        errors.append(ours.sampled_error(draw, adapters, SAMPLES, seed))

    def routed(draw: ours.DeviceDraw) -> None:
        ours.route(draw, gpu.router)
        ours.launch(draw, gpu.kernels, workspace)

    bare = [capture(lambda draw=draw: ours.launch(draw, gpu.kernels, workspace), gpu.device) for draw in on_device]
    whole = [capture(lambda draw=draw: routed(draw), gpu.device) for draw in on_device]
    bare_us, whole_us = replay_us(bare, gpu.flush, gpu.device), replay_us(whole, gpu.flush, gpu.device)
    nbytes = statistics.mean(floor_bytes(model, site, tokens))
    us, floor_us = statistics.mean(bare_us), nbytes / gpu.read_gbps / 1e3
    return {
        "model": model.name,
        "tokens": tokens,
        "site": site.name,
        "us": us,
        "with_routing_us": statistics.mean(whole_us),
        "draws_us": bare_us,
        "floor_us": floor_us,
        "floor_ratio": floor_us / us,
        "distinct_mb": nbytes / 1e6,
        "distinct_gbps": nbytes / us / 1e3,
        "max_rel_err": max(errors),
    }


class Gpu:
    def __init__(self, device: torch.device) -> None:
        from kernels_cuda.cuda import kernels
        from kernels_cuda.routing import router

        self.device = device
        self.kernels: CudaKernels = kernels(device)
        self.compile_s = self.kernels.compile(ours.DTYPE)
        self.router: Router = router(device)
        self.flush = Flush(device)
        self.read_gbps = read_gbps(device)


def overhead_us(gpu: Gpu, launches: int = 32) -> dict[str, float]:
    """A graph-replayed step with one rank-16 segment of one row, 2048 -> 2048: alone, and one of many in a graph.

    `empty_us` is a replayed graph of one tiny kernel of torch's: what events and a replay cost by themselves.
    """
    device, width = gpu.device, 2048
    shape = BlockShape(width, (PairShape(16, 0, width, 1.0),))
    page = ours.aligned_pages(1, device)
    ours.fill(page.view(ours.DTYPE), torch.Generator(device).manual_seed(SEED))
    addresses = torch.tensor([page.data_ptr()], device=device)
    table = BlockTable(1, device)
    segments = torch.tensor([[table.add(addresses.data_ptr(), shape), 0, 0, 1]], dtype=torch.int32, device=device)
    counts = torch.tensor([1, 1, 1], dtype=torch.int32, device=device)
    rows = torch.randn(1, width, device=device).to(ours.DTYPE)
    out = torch.empty(1, width, dtype=ours.DTYPE, device=device)
    workspace = Workspace.new(max_entries=1, max_rank=16, max_in_width=width, max_out_width=0, device=device)
    step = DeviceStep(
        rows_TK=rows, segments=segments, blocks=table.tensor, counts=counts, in_width=width, windows=((0, width),)
    )

    def many(count: int) -> None:
        for _ in range(count):
            gpu.kernels.launch(step, out, workspace)

    graphs = [capture(lambda: many(1), device), capture(lambda: many(launches), device), capture(out.zero_, device)]
    alone, together, empty = (replay_us([graph] * 2, gpu.flush, device)[0] for graph in graphs)
    return {"overhead_us": alone, "overhead_in_sequence_us": together / launches, "empty_us": empty}
