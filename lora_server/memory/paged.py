"""Weights as packed tiles in the pages of one device: what the CUDA kernels read in place.

The pages of an adapter lie anywhere; a page table in device memory says where, and a row of the block table, one per
adapter and shape, points to it. The directory is told of a layer's blocks when all of them can be read.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from kernels_cuda.layout import TILE_BYTES, BlockShape
from kernels_cuda.tables import BlockTable, PackedSegments
from lora_server.errors import AdapterLoadError, ConfigError
from lora_server.memory.directory import Directory, Ints
from lora_server.memory.formats import TileFormat
from lora_server.memory.manifest import Manifest, Placed
from lora_server.memory.pages import PageExtent, PagePool
from lora_server.memory.pools import Extent
from lora_server.memory.tier import Refusal, Tier
from lora_server.placement import Placement
from lora_server.spec import PROJECTIONS, Site

MAX_ROWS = 65536  # of the block table: one per adapter and shape


@dataclass
class _Published:
    """One adapter's place in the directory, its page table on the device, and its rows of the block table."""

    place: int
    page_table: torch.Tensor
    rows: dict[BlockShape, int] = field(default_factory=dict)


class PagedTier(Tier):
    """For `--device cuda`. The loader's thread publishes, the shard's loop gathers."""

    def __init__(self, placement: Placement, shard: int, dtype: torch.dtype, pool: PagePool) -> None:
        """Raises ConfigError for a dtype that the kernels do not have."""
        if dtype not in (torch.bfloat16, torch.float16):
            raise ConfigError(f"--dtype: got {dtype}, expected bfloat16 or float16 with --device cuda")
        self.pool, self.format, self.device = pool, TileFormat(placement.spec, dtype), pool.memory.device
        self.table = BlockTable(MAX_ROWS, self.device)
        self.directory = Directory(placement.spec)
        self._placement, self._shard = placement, shard
        self._stream = None
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the table is there before the loader writes to it
            self._stream = torch.cuda.Stream(self.device)
        self._empty_rows: dict[tuple[int, int], int] = {}
        self._published: dict[int, _Published] = {}
        self._table_lock = threading.Lock()

    @property
    @override
    def name(self) -> str:
        return f"{self.device} {torch.cuda.get_device_name(self.device)}" if self._stream is not None else "cpu"

    @override
    def gather(self, site: Site, segments_S4: npt.NDArray[np.int32], refusal: Refusal) -> PackedSegments:
        with self.directory.lock:
            blocks_S2 = self.directory.gather(site, segments_S4[:, 0], segments_S4[:, 1])
            if blocks_S2.min(initial=0) < 0:
                handle, expert = segments_S4[blocks_S2[:, 0].argmin(), :2].tolist()  # the first that is ABSENT
                raise refusal(handle, expert)
        table_S4 = segments_S4.copy()
        for column in (0, 1):  # one after the other: NumPy takes several times as long for both together
            table_S4[:, column] = blocks_S2[:, column]
        return PackedSegments(table_S4, self.table.max_rank(blocks_S2[:, 0]))

    @override
    def publish(self, handle: int, layer: int, extent: Extent, manifest: Manifest) -> None:
        published = self._published.get(handle)
        if published is None:
            published = self._published[handle] = self._new(handle, extent)
        sites = [Site(layer, projection) for projection in PROJECTIONS]
        blocks = manifest.blocks(layer)
        entries = {site: self._entries(site, published, blocks.get(site, {})) for site in sites}
        self.synchronize()
        self._tell(handle, layer, published.place, entries)

    def _tell(self, handle: int, layer: int, place: int, entries: Mapping[Site, Ints]) -> None:
        """Steps find it from now on."""
        self.directory.put(place, entries)

    def _new(self, handle: int, extent: Extent) -> _Published:
        assert isinstance(extent, PageExtent)
        with self.on_stream():
            page_table = torch.tensor(extent.addresses(), dtype=torch.int64).to(self.device)
        return _Published(self.directory.allocate(handle), page_table)

    def _entries(self, site: Site, published: _Published, blocks: Mapping[int, Placed]) -> Ints:
        """[E, 2]: row and first tile of each expert; where it has no delta, what says so."""
        entries_E2, own = self.directory.absent(site), self._placement.experts(site, self._shard)
        if own:
            entries_E2[own.start : own.stop] = self.empty_row(site), 0
        for expert, placed in blocks.items():
            if placed.shape not in published.rows:
                published.rows[placed.shape] = self.add_row(published.page_table.data_ptr(), placed.shape)
            entries_E2[expert] = published.rows[placed.shape], placed.begin // TILE_BYTES
        return entries_E2

    def add_row(self, pages: int, shape: BlockShape) -> int:
        """A row of the block table; raises AdapterLoadError when it is full."""
        with self._table_lock, self.on_stream():
            try:
                return self.table.add(pages, shape)
            except ValueError as error:
                raise AdapterLoadError(f"shard {self._shard}: {error}; remove an adapter") from error

    def empty_row(self, site: Site) -> int:
        """The row of a block without a delta."""
        shape = self.format.shape(site, ())
        widths = shape.in_width, shape.out_width
        if widths not in self._empty_rows:
            self._empty_rows[widths] = self.add_row(0, shape)
        return self._empty_rows[widths]

    @override
    def withdraw(self, handle: int) -> object:
        published = self._published.pop(handle, None)
        if published is not None:
            self.directory.hide(handle)
        return published

    @override
    def release(self, withdrawn: object) -> None:
        if isinstance(withdrawn, _Published):
            self.directory.deallocate(withdrawn.place)
            with self._table_lock:
                for row in withdrawn.rows.values():
                    self.table.remove(row)

    @override
    def on_stream(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext()

    @override
    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
