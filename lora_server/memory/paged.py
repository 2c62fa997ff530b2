"""Weights as packed tiles in the pages of one device, which the CUDA kernels read in place.

The pages of an adapter lie anywhere; a page table in device memory lists them, and a row of the block table, one per
adapter and shape, points to it. A layer's blocks are put into the directory when all of them can be read.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from kernels_cuda.layout import BlockShape
from kernels_cuda.ops import Pair
from kernels_cuda.sizes import TILE_BYTES
from kernels_cuda.tables import BlockTable, PackedSegments
from lora_server.adapters import Weights
from lora_server.errors import AdapterLoadError, ConfigError
from lora_server.memory.directory import BlockDirectory, Ints
from lora_server.memory.formats import TileFormat
from lora_server.memory.manifest import Blocks, Manifest, Placed
from lora_server.memory.pages import PageExtent, PagePool
from lora_server.memory.pools import Extent
from lora_server.memory.tier import Refusal, Tier
from lora_server.placement import Placement
from lora_server.spec import PROJECTIONS, Site

MAX_ROWS = 65536  # of the block table: one per adapter and shape


class DirectoryMirror:
    """Hears of each change of a tier's directory, to keep another one equal; this one keeps none."""

    def know(self, handle: int) -> None:
        """See Tier.know."""

    def forget(self, handle: int) -> None:
        """See Tier.forget."""

    def take_uses(self) -> list[int]:
        """See Tier.take_uses."""
        return []

    def prepare(self, blocks: Blocks) -> None:
        """Make the device ready for a layer that is about to be put."""

    def put(self, handle: int, layer: int, entries: Mapping[Site, Ints]) -> None:
        """Put a layer's entries, each [E, 2]."""

    def withdraw(self, handle: int) -> None:
        """Remove a handle's entries. Returns when no step reads them."""


@dataclass
class _PagedWeights:
    """One adapter's place in the directory, its page table on the device, and its rows of the block table."""

    place: int
    page_table: torch.Tensor
    rows: dict[BlockShape, int] = field(default_factory=dict)


class BlockRows:
    """Rows of the block table: one per adapter and shape, and one per shape without a delta. Thread-safe."""

    def __init__(
        self, device: torch.device, shard: int, on_stream: Callable[[], contextlib.AbstractContextManager[object]]
    ) -> None:
        self.table = BlockTable(MAX_ROWS, device)
        self._shard, self._on_stream, self._lock = shard, on_stream, threading.Lock()
        self._empty: dict[tuple[int, int], int] = {}

    def add(self, pages: int, shape: BlockShape) -> int:
        """Add a row for blocks in these pages; raises AdapterLoadError when the table is full."""
        with self._lock, self._on_stream():
            try:
                return self.table.add(pages, shape)
            except ValueError as error:
                raise AdapterLoadError(f"shard {self._shard}: {error}; remove an adapter") from error

    def empty(self, shape: BlockShape) -> int:
        """Return the row of a block of this shape without a delta."""
        widths = shape.in_width, shape.out_width
        if widths not in self._empty:
            self._empty[widths] = self.add(0, shape)
        return self._empty[widths]

    def remove(self, rows: Iterable[int]) -> None:
        """Free rows that no step reads."""
        with self._lock:
            for row in rows:
                self.table.remove(row)


class PagedTier(Tier):
    """Tier of `--device cuda`. The loader's thread publishes, the shard's loop gathers."""

    def __init__(
        self,
        placement: Placement,
        shard: int,
        dtype: torch.dtype,
        pool: PagePool,
        mirror: DirectoryMirror | None = None,
    ) -> None:
        """Raises ConfigError for a dtype that the kernels do not have."""
        if dtype not in (torch.bfloat16, torch.float16):
            raise ConfigError(f"--dtype: got {dtype}, expected bfloat16 or float16 with --device cuda")
        self.pool, self.device = pool, pool.memory.device
        self.format: TileFormat = TileFormat(placement.spec, dtype)
        self.rows = BlockRows(self.device, shard, self.on_stream)
        self.directory = BlockDirectory(placement.spec)
        self._placement, self._shard, self._mirror = placement, shard, mirror or DirectoryMirror()
        self._stream = None
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the table is there before the loader writes to it
            self._stream = torch.cuda.Stream(self.device)
        self._published: dict[int, _PagedWeights] = {}

    @property
    @override
    def name(self) -> str:
        return f"{self.device} {torch.cuda.get_device_name(self.device)}" if self._stream is not None else "cpu"

    @override
    def know(self, handle: int) -> None:
        self._mirror.know(handle)

    @override
    def forget(self, handle: int) -> None:
        self._mirror.forget(handle)

    @override
    def take_uses(self) -> list[int]:
        return self._mirror.take_uses()

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
        return PackedSegments(table_S4, self.rows.table.max_rank(blocks_S2[:, 0]))

    @override
    def read(self, weights: Weights, site: Site, expert: int, extent: Extent, placed: Placed) -> None:
        pairs = [Pair(a, b, part.scale, part.out_begin) for part, a, b in weights.read(site, expert)]
        with self.on_stream():
            extent.write(placed.begin, self.format.pack(pairs, placed.shape, self.device))

    @override
    def prepare(self, layer: int, extent: Extent, manifest: Manifest) -> Blocks:
        return manifest.blocks(layer)

    @override
    def publish(self, handle: int, layer: int, extent: Extent, prepared: Blocks) -> None:
        self._mirror.prepare(prepared)
        published = self._published.get(handle)
        if published is None:
            published = self._published[handle] = self._new(handle, extent)
        sites = [Site(layer, projection) for projection in PROJECTIONS]
        entries = {site: self._entries(site, published, prepared.get(site, {})) for site in sites}
        self.synchronize()
        self.directory.put(published.place, entries)
        self._mirror.put(handle, layer, entries)

    def _new(self, handle: int, extent: Extent) -> _PagedWeights:
        assert isinstance(extent, PageExtent)
        with self.on_stream():
            page_table = torch.tensor(extent.addresses(), dtype=torch.int64).to(self.device)
        return _PagedWeights(self.directory.allocate(handle), page_table)

    def _entries(self, site: Site, published: _PagedWeights, blocks: Mapping[int, Placed]) -> Ints:
        """Return [E, 2]: row and first tile of each expert; the row of an empty block where it has no delta."""
        entries_E2, own = self.directory.absent(site), self._placement.experts(site, self._shard)
        if own:
            entries_E2[own.start : own.stop] = self.rows.empty(self.format.shape(site, ())), 0
        for expert, placed in blocks.items():
            if placed.shape not in published.rows:
                published.rows[placed.shape] = self.rows.add(published.page_table.data_ptr(), placed.shape)
            entries_E2[expert] = published.rows[placed.shape], placed.begin // TILE_BYTES
        return entries_E2

    @override
    def withdraw(self, handle: int) -> object:
        published = self._published.get(handle)
        if published is not None:
            self._mirror.withdraw(handle)
            del self._published[handle]
            self.directory.hide(handle)
        return published

    @override
    def release(self, withdrawn: object) -> None:
        if isinstance(withdrawn, _PagedWeights):
            self.directory.deallocate(withdrawn.place)
            self.rows.remove(withdrawn.rows.values())

    @override
    def on_stream(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext()

    @override
    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
