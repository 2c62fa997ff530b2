"""Steps of plain blocks as the CUDA kernels take them: packed into scattered pages, on any device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels_cuda.launch import DeviceStep, Workspace
from kernels_cuda.layout import PAGE_BYTES, pack, shape_of
from kernels_cuda.ops import Step
from kernels_cuda.sizes import PAGE_TILES, TILE_BYTES
from kernels_cuda.tables import SEGMENT_INTS, BlockTable

POISON = 0xFF  # NaN in every float format, wherever a kernel reads unwritten memory


class Pages:
    """A page table with pages that lie apart from each other, in memory that holds NaNs."""

    def __init__(self, device: str, first_tile: int, num_tiles: int) -> None:
        self.free_tile, count = first_tile, -(-(first_tile + num_tiles) // PAGE_TILES)
        page = torch.full((PAGE_BYTES + 512,), POISON, dtype=torch.uint8, device=device)
        self.memory = [page.clone() for _ in range(count)][::-1]
        self.starts = [-page.data_ptr() % 512 for page in self.memory]
        addresses = [page.data_ptr() + start for page, start in zip(self.memory, self.starts, strict=True)]
        self.addresses = torch.tensor(addresses, dtype=torch.int64, device=device)

    def write(self, tiles: torch.Tensor) -> int:
        """Store tiles one after the other; return the number of the first."""
        first, self.free_tile = self.free_tile, self.free_tile + len(tiles)
        for i, tile in enumerate(tiles, first):
            at = self.starts[i // PAGE_TILES] + i % PAGE_TILES * TILE_BYTES
            self.memory[i // PAGE_TILES][at : at + TILE_BYTES] = tile
        return first


@dataclass
class PackedStep:
    """A step on a device, with all that it points to."""

    step: DeviceStep
    out_rows: int
    max_rank: int
    keep: tuple[object, ...]

    def poisoned_out(self) -> torch.Tensor:
        shape = (self.out_rows, self.step.out_width)
        return torch.full(shape, float("nan"), dtype=self.step.rows_TK.dtype, device=self.step.rows_TK.device)

    def poisoned_workspace(self, max_entries: int, spare_rank: int = 0) -> Workspace:
        workspace = Workspace.new(
            max_entries=max_entries,
            max_rank=max(16, self.max_rank + spare_rank),
            max_in_width=self.step.in_width,
            max_out_width=self.step.out_width,
            device=self.step.rows_TK.device,
        )
        for tensor in (workspace.partial, workspace.v, workspace.delta):
            tensor.fill_(float("nan"))
        return workspace


def pack_step(
    step: Step, in_width: int, out_width: int, device: str = "cpu", first_tile: int = PAGE_TILES - 3
) -> PackedStep:
    """Pack a step for the kernels, so that its first blocks cross the border of a page."""
    dtype = step.rows_TK.dtype
    blocks = {id(segment.block): segment.block for segment in step.segments}
    shapes = {key: shape_of(block, in_width, out_width) for key, block in blocks.items()}
    pages = Pages(device, first_tile, sum(shape.num_tiles for shape in shapes.values()))
    table, places = BlockTable(max(1, len(blocks)), device), {}
    for key, block in blocks.items():
        tile = pages.write(pack(block, shapes[key], dtype).to(device))
        places[key] = table.add(pages.addresses.data_ptr(), shapes[key]), tile
    rows = [(*places[id(s.block)], s.first, s.num_entries) for s in step.segments]
    segments = torch.tensor(rows, dtype=torch.int32).view(-1, SEGMENT_INTS)
    counts = torch.tensor([len(step.segments), step.num_entries, step.num_out_rows], dtype=torch.int32)

    def moved(tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
        return None if tensor is None else tensor.to(device=device, dtype=dtype).contiguous()

    on_device = DeviceStep(
        rows_TK=step.rows_TK.to(device),
        segments=segments.to(device),
        blocks=table.tensor,
        counts=counts.to(device),
        in_width=in_width,
        windows=step.windows,
        in_begin=step.in_begin,
        in_map_N=moved(step.in_map_N, torch.int32),
        out_map_N=moved(step.out_map_N, torch.int32),
        weights_N=moved(step.weights_N, torch.float32),
    )
    max_rank = max((shape.groups * 16 for shape in shapes.values()), default=16)
    return PackedStep(on_device, step.num_out_rows, max_rank, (pages, table))
