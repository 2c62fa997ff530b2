"""512 adapters of one site in device memory, packed as the server packs them, and draws over them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from bench.kernels.draws import Draw
from bench.kernels.models import NUM_ADAPTERS, Model, Site
from kernels_cuda.cuda import CudaKernels
from kernels_cuda.launch import DeviceStep, Workspace
from kernels_cuda.layout import PAGE_BYTES, unpack
from kernels_cuda.ops import Block
from kernels_cuda.routing import Choice, Route, Router
from kernels_cuda.sizes import PAGE_TILES, TILE_BYTES
from kernels_cuda.tables import BlockTable

DTYPE = torch.bfloat16
WEIGHT_SCALE = 0.02
FILL_ELEMENTS = 1 << 29


def fill(tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Normal weights of a trained LoRA's magnitude, without a second tensor of that size."""
    for part in tensor.view(-1).split(FILL_ELEMENTS):
        part.normal_(0.0, WEIGHT_SCALE, generator=generator)


def aligned_pages(count: int, device: torch.device) -> torch.Tensor:
    """uint8 [count, 2 MiB] at an address that is a multiple of 512: a GPU's memory always is, a CPU's need not be."""
    memory = torch.empty(count * PAGE_BYTES + 512, dtype=torch.uint8, device=device)
    begin = -memory.data_ptr() % 512
    return memory[begin : begin + count * PAGE_BYTES].view(count, PAGE_BYTES)


class Adapters:
    """Every adapter takes whole pages, in shuffled order, as in a pool that has seen evictions.

    Its experts lie one behind the other. Ranks and widths here are multiples of what tiles pad to, so random
    pages are the tiles of random weights, and `block` unpacks them.
    """

    def __init__(self, model: Model, site: Site, generator: torch.Generator, num_adapters: int = NUM_ADAPTERS) -> None:
        device = generator.device
        self.site, self.shape = site, site.shape
        pages_each = -(-model.num_experts * self.shape.num_tiles // PAGE_TILES)
        self.pages = aligned_pages(num_adapters * pages_each, device)
        fill(self.pages.view(DTYPE), generator)
        order = torch.randperm(num_adapters * pages_each, generator=torch.Generator().manual_seed(7))
        self.order = order.view(num_adapters, pages_each)
        self.addresses = (self.pages.data_ptr() + self.order * PAGE_BYTES).to(device)
        self.table = BlockTable(num_adapters, device)
        rows = [self.table.add(addresses.data_ptr(), self.shape) for addresses in self.addresses]
        self.directory = np.array([(row, 0, self.shape.num_tiles) for row in rows], np.int32)

    def block(self, adapter: int, expert: int) -> Block:
        """The weights of one expert, as the kernels must understand them."""
        first = expert * self.shape.num_tiles
        tile = torch.arange(first, first + self.shape.num_tiles)
        page = self.order[adapter][tile // PAGE_TILES].to(self.pages.device)
        tiles = self.pages.view(-1, PAGE_TILES, TILE_BYTES)
        return unpack(tiles[page, (tile % PAGE_TILES).to(page.device)], self.shape, DTYPE)


@dataclass
class DeviceDraw:
    """One draw on the device, with everything that a graph's launch needs."""

    drawn: Draw
    rows: torch.Tensor
    out: torch.Tensor
    route: Route
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
    step: DeviceStep
    num_experts: int
    among: range | None = None


def device_draw(
    model: Model, adapters: Adapters, drawn: Draw, rows: torch.Tensor, among: range | None = None
) -> DeviceDraw:
    """gate_up: a row per token, a result per entry; down: a row per (token, expert), a result per token.

    among: the experts of one shard; by default all.
    """
    site, device = adapters.site, rows.device
    tokens, top_k = drawn.experts_Tk.shape
    route = Route.empty(tokens * top_k, device)
    arrays = (*drawn, adapters.directory)
    inputs = tuple(torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in arrays)
    maps = (
        {"in_map_N": route.pair_N, "out_map_N": route.token_N, "weights_N": route.weights_N}
        if site.combine
        else {"in_map_N": route.token_N}
    )
    step = DeviceStep(
        rows_TK=rows,
        segments=route.segments,
        blocks=adapters.table.tensor,
        counts=route.counts,
        in_width=site.in_width,
        windows=((0, site.out_width),),
        **maps,
    )
    out = torch.empty(tokens if site.combine else tokens * top_k, site.out_width, dtype=rows.dtype, device=device)
    return DeviceDraw(drawn, rows, out, route, inputs, step, model.num_experts, among)  # type: ignore[arg-type]


def workspace_for(model: Model, site: Site, tokens: int, device: torch.device) -> Workspace:
    return Workspace.new(
        max_entries=tokens * model.top_k,
        max_rank=site.shape.groups * 16,
        max_in_width=site.in_width,
        max_out_width=site.out_width if site.combine else 0,
        device=device,
    )


def route(draw: DeviceDraw, router: Router) -> None:
    """Fills the draw's segments and maps on the device."""
    router.launch(Choice(*draw.inputs, draw.num_experts, draw.among), draw.route)


def launch(draw: DeviceDraw, kernels: CudaKernels, workspace: Workspace) -> None:
    """The draw's step itself; its route must have been filled."""
    kernels.launch(draw.step, draw.out, workspace)


def sampled_error(draw: DeviceDraw, adapters: Adapters, count: int, seed: int) -> float:
    """The largest norm-wise relative error of sampled rows of the result, against float64 of unpacked weights."""
    site, (experts, weights, adapters_T) = adapters.site, draw.drawn
    top_k = experts.shape[1]
    entries = draw.route.pair_N[: int(draw.route.counts[1])].cpu().numpy()  # of which each is a pair of `among`
    results = np.unique(entries // top_k) if site.combine else np.arange(len(entries))
    worst = 0.0
    for result in np.random.default_rng(seed).choice(results, min(count, len(results)), replace=False):
        pairs = sorted(entries[entries // top_k == result]) if site.combine else [int(entries[result])]
        expected = torch.zeros(site.out_width, dtype=torch.float64, device=draw.rows.device)
        for pair in pairs:
            token = pair // top_k
            x = draw.rows[pair if site.combine else token].double()
            scale = float(weights.reshape(-1)[pair]) if site.combine else 1.0
            expected += delta(adapters.block(int(adapters_T[token]), int(experts.reshape(-1)[pair])), x, site) * scale
        worst = max(worst, relative_error(draw.out[result], expected))
    return worst


def delta(block: Block, x: torch.Tensor, site: Site) -> torch.Tensor:
    out = torch.zeros(site.out_width, dtype=torch.float64, device=x.device)
    for pair in block.pairs:
        rows = slice(pair.out_begin, pair.out_begin + pair.b_OR.shape[0])
        out[rows] = pair.b_OR.double() @ (pair.a_RK.double() @ x) * pair.scale
    return out


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """|got - expected| / |expected|, infinite if anything is not finite."""
    error = float((got.double() - expected).norm() / expected.norm())
    return error if np.isfinite(error) else float("inf")
