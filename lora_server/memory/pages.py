"""A pool of 2 MiB pages on one device, or pinned in host memory; allocated once."""

from __future__ import annotations

import threading

import torch
from typing_extensions import override

from kernels_cuda.layout import PAGE_BYTES
from lora_server.memory.pools import Extent, Pool

ALIGNMENT = 512  # bytes of a fragment, which the kernels copy at once


class PageExtent(Extent):
    """Pages at any places in the pool."""

    def __init__(self, nbytes: int, pages: list[int], memory: torch.Tensor) -> None:
        self.nbytes, self.pages, self._memory = nbytes, pages, memory

    @override
    def pieces(self, begin: int, end: int) -> list[torch.Tensor]:
        found = []
        while begin < end:
            page, first = divmod(begin, PAGE_BYTES)
            last = min(PAGE_BYTES, first + end - begin)
            found.append(self._memory[self.pages[page], first:last])
            begin += last - first
        return found

    def addresses(self) -> list[int]:
        """Return the device addresses of its pages."""
        base = self._memory.data_ptr()
        return [base + page * PAGE_BYTES for page in self.pages]


class PagePool(Pool):
    """`memory` is the whole pool, uint8 [pages, PAGE_BYTES]."""

    def __init__(self, num_pages: int, device: torch.device | str, pinned: bool = False) -> None:
        """Allocate the pool. Raises torch.OutOfMemoryError."""
        whole = torch.empty(num_pages * PAGE_BYTES + ALIGNMENT, dtype=torch.uint8, device=device, pin_memory=pinned)
        skip = -whole.data_ptr() % ALIGNMENT
        self.memory = whole[skip : skip + num_pages * PAGE_BYTES].view(num_pages, PAGE_BYTES)
        self.num_pages, self.capacity, self.used = num_pages, num_pages * PAGE_BYTES, 0
        self._free = list(range(num_pages - 1, -1, -1))
        self._lock = threading.Lock()

    @override
    def size_of(self, nbytes: int) -> int:
        return -(-nbytes // PAGE_BYTES) * PAGE_BYTES

    @override
    def allocate(self, nbytes: int) -> PageExtent:
        count = self.size_of(nbytes) // PAGE_BYTES
        with self._lock:
            if count > len(self._free):
                raise MemoryError(f"{count} pages of 2 MiB asked for, {len(self._free)} of {self.num_pages} free")
            self.used += count * PAGE_BYTES
            return PageExtent(nbytes, [self._free.pop() for _ in range(count)], self.memory)

    @override
    def deallocate(self, extent: Extent) -> None:
        assert isinstance(extent, PageExtent)
        with self._lock:
            self._free.extend(extent.pages)
            self.used -= len(extent.pages) * PAGE_BYTES
            extent.pages = []

    @override
    def check_integrity(self, held: list[Extent]) -> None:
        taken = [page for extent in held if isinstance(extent, PageExtent) for page in extent.pages]
        assert sorted([*self._free, *taken]) == list(range(self.num_pages)), (
            f"{len(self._free)} free and {len(taken)} held pages of {self.num_pages}"
        )
        assert self.used == len(taken) * PAGE_BYTES
