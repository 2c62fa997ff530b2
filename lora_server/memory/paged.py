"""Weights as packed tiles in the pages of one device: what the CUDA kernels read in place.

An adapter's tiles follow each other through its pages, layer after layer, so that only its last page
is partly empty; the pages lie anywhere, and a page table in device memory says where. Each adapter
takes what its own ranks need. A page is filled by a copy on a stream of the loader's own. The directory is
told of a layer's blocks when all of them can be read.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from kernels_cuda.layout import PAGE_BYTES, PAGE_TILES, TILE_BYTES, BlockShape, pack, shape_of
from kernels_cuda.ops import NOTHING, Block
from kernels_cuda.tables import BlockTable, PackedSegments
from lora_server.errors import AdapterLoadError, ConfigError
from lora_server.memory.directory import Directory, Ints
from lora_server.memory.loader import LoadingStore, Place
from lora_server.memory.pages import PagePool
from lora_server.memory.store import Memory
from lora_server.placement import Placement
from lora_server.spec import PROJECTIONS, Site

MAX_ROWS = 65536  # of the block table: one per adapter and shape


class PagedStore(LoadingStore["_Pages"]):
    """Weights in pages. `reading` keeps pages from being given away while a step uses them."""

    def __init__(
        self,
        placement: Placement,
        shard: int,
        dtype: torch.dtype,
        pool: PagePool,
        on_layer: Callable[[int, int], None] = lambda handle, layers: None,
    ) -> None:
        """Raises ConfigError unless dtype has 16 bits."""
        if dtype.itemsize != 2:
            raise ConfigError(f"--dtype: got {dtype}, expected bfloat16 or float16, which the CUDA kernels compute in")
        self.pool, self.device = pool, pool.memory.device
        self.table = BlockTable(MAX_ROWS, self.device)
        self.directory = Directory(placement.spec)
        self.spec, self.dtype = placement.spec, dtype
        self.stream = None
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the table is there before the loader writes to it
            self.stream = torch.cuda.Stream(self.device)
        self._empty_rows: dict[tuple[int, int], int] = {}
        self._readers = threading.Lock()
        self._table_lock = threading.Lock()
        super().__init__(placement, shard, dtype, on_layer)

    @override
    def reading(self) -> contextlib.AbstractContextManager[object]:
        """Held for one step, by the shard's loop."""
        return self._readers

    @override
    def gather(self, site: Site, segments_S4: npt.NDArray[np.int32], where: str) -> PackedSegments:
        """While `reading` is held."""
        with self.directory.lock:  # a layer becomes READY after the directory has it: what is absent here is not
            blocks_S2 = self.directory.gather(site, segments_S4[:, 0], segments_S4[:, 1])
            if blocks_S2.min(initial=0) < 0:
                handle, expert = segments_S4[blocks_S2[:, 0].argmin(), :2].tolist()  # the first that is ABSENT
                raise self._refusal(handle, self.state(handle, site.layer), site, expert, where)
        table_S4 = segments_S4.copy()
        for column in (0, 1):  # one after the other: NumPy takes several times as long for both together
            table_S4[:, column] = blocks_S2[:, column]
        return PackedSegments(table_S4, self.table.max_rank(blocks_S2[:, 0]))

    def check_integrity(self) -> None:
        """When idle: no page is lost or held twice."""
        self.pool.check_integrity([page for entry in self._entries.values() for page in entry.place.pages])

    def shape(self, site: Site, block: Block) -> BlockShape:
        """What a block of a site looks like; raises ValueError for what the kernels cannot serve."""
        return shape_of(block, self.spec.in_width(site), self.spec.out_width(site))

    def add_row(self, pages: int, shape: BlockShape) -> int:
        """A row of the block table; raises AdapterLoadError when it is full."""
        with self._table_lock, self.on_stream():
            try:
                return self.table.add(pages, shape)
            except ValueError as error:
                raise AdapterLoadError(f"shard {self._shard}: {error}; remove an adapter") from error

    def remove_rows(self, rows: list[int]) -> None:
        """Give rows of the block table back."""
        with self._table_lock:
            for row in rows:
                self.table.remove(row)

    def on_stream(self) -> contextlib.AbstractContextManager[object]:
        """Device work of the loader goes beside the shard's own."""
        return torch.cuda.stream(self.stream) if self.stream is not None else contextlib.nullcontext()

    def synchronize(self) -> None:
        """Wait for the loader's copies."""
        if self.stream is not None:
            self.stream.synchronize()

    def out_of_pages(self) -> AdapterLoadError:
        """Why a load fails when the pool is full."""
        return AdapterLoadError(
            f"shard {self._shard}: all {self.pool.num_pages} pages of 2 MiB on {self.device} are taken; "
            "remove an adapter, or start the server with more --pool-gib or more shards"
        )

    def no_blocks(self, site: Site) -> Ints:
        """[E, 2]: what the directory says of an adapter without a delta at a site, where this shard has experts."""
        blocks_E2, own = self.directory.absent(site), self._placement.experts(site, self._shard)
        if own:
            blocks_E2[own.start : own.stop] = self._empty_row(site), 0
        return blocks_E2

    def _empty_row(self, site: Site) -> int:
        widths = self.spec.in_width(site), self.spec.out_width(site)
        if widths not in self._empty_rows:
            self._empty_rows[widths] = self.add_row(0, self.shape(site, NOTHING))
        return self._empty_rows[widths]

    @override
    def memory(self) -> Memory:
        pool, device = self.pool, str(self.device)
        if self.device.type == "cuda":
            device = f"{device} {torch.cuda.get_device_name(self.device)}"
        return Memory(device, pool.num_free * PAGE_BYTES, pool.num_pages * PAGE_BYTES)

    def _place(self, handle: int) -> _Pages:
        return _Pages(self, handle)


class _Pages(Place):
    """One adapter's pages, its page table on the device, and its place in the directory."""

    def __init__(self, store: PagedStore, handle: int) -> None:
        self._store, self._handle = store, handle
        self.index: int | None = store.directory.allocate(handle)
        self.pages: list[int] = []
        self._used = 0  # tiles
        self._rows: dict[BlockShape, int] = {}
        self._unpublished: dict[Site, Ints] = {}
        self._table: torch.Tensor | None = None

    @override
    def put(self, site: Site, expert: int, block: Block) -> None:
        store = self._store
        try:
            shape = store.shape(site, block)
        except ValueError as error:
            raise AdapterLoadError(f"{site} expert {expert}: {error}") from error
        with store.on_stream():
            tiles = pack(block.to(store.device), shape, store.dtype)
        first = self._used
        self._reserve(len(tiles))
        self._copy(tiles, first)
        if shape not in self._rows:
            self._rows[shape] = store.add_row(self._page_table().data_ptr(), shape)
        self._blocks(site)[expert] = self._rows[shape], first

    def _blocks(self, site: Site) -> Ints:
        if site not in self._unpublished:
            self._unpublished[site] = self._store.no_blocks(site)
        return self._unpublished[site]

    def _page_table(self) -> torch.Tensor:
        if self._table is None:  # any adapter fits the pool, if none does besides it
            self._table = torch.zeros(self._store.pool.num_pages, dtype=torch.int64, device=self._store.device)
        return self._table

    def _reserve(self, num_tiles: int) -> None:
        pool, first_new = self._store.pool, len(self.pages)
        self._used += num_tiles
        while len(self.pages) * PAGE_TILES < self._used:
            page = pool.allocate()
            if page is None:
                raise self._store.out_of_pages()
            self.pages.append(page)
        new = [pool.address(page) for page in self.pages[first_new:]]
        if new:
            with self._store.on_stream():
                self._page_table()[first_new : len(self.pages)] = torch.tensor(new, device=self._store.device)
        self.nbytes = self._used * TILE_BYTES

    def _copy(self, tiles: torch.Tensor, first: int) -> None:
        """Fills the adapter's tiles [first, ...), page by page."""
        memory = self._store.pool.memory
        with self._store.on_stream():
            while len(tiles):
                page, tile = divmod(first, PAGE_TILES)
                count = min(len(tiles), PAGE_TILES - tile)
                target = memory[self.pages[page], tile * TILE_BYTES : (tile + count) * TILE_BYTES]
                target.copy_(tiles[:count].reshape(-1))
                tiles, first = tiles[count:], first + count

    @override
    def end_layer(self, layer: int) -> None:
        blocks = {site: self._blocks(site) for site in (Site(layer, projection) for projection in PROJECTIONS)}
        self._store.synchronize()
        assert self.index is not None  # `free` comes after the last `put`
        self._store.directory.put(self.index, blocks)
        self._unpublished = {}

    @override
    def hide(self) -> None:
        self._store.directory.hide(self._handle)

    @override
    def free(self) -> None:
        """Waits for the step that may read it."""
        with self._store.reading():
            if self.index is not None:
                self._store.directory.deallocate(self.index)
            rows, self._rows, self.index = list(self._rows.values()), {}, None
            pages, self.pages, self._used, self.nbytes, self._table = self.pages, [], 0, 0, None
        self._store.remove_rows(rows)
        self._store.pool.deallocate(pages)
