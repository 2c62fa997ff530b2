"""A pool in host memory. The operating system maps its pages, so free bytes never fragment."""

from __future__ import annotations

import contextlib
import mmap
import threading

import torch
from typing_extensions import override

from lora_server.memory.pools import Extent, Pool

PAGE_BYTES, HUGE_BYTES = mmap.PAGESIZE, 2 << 20


class MappedExtent(Extent):
    """A mapping of its own: the system gets it back with the last view of it."""

    def __init__(self, nbytes: int, size: int) -> None:
        self.nbytes = nbytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.memory = torch.empty(0, dtype=torch.uint8)
        if size:
            pages = mmap.mmap(-1, size, flags=flags)
            if size >= HUGE_BYTES:
                with contextlib.suppress(OSError):  # a kernel without huge pages
                    pages.madvise(mmap.MADV_HUGEPAGE)  # one fault for all of one
            self.memory = torch.frombuffer(pages, dtype=torch.uint8)

    @override
    def pieces(self, begin: int, end: int) -> list[torch.Tensor]:
        return [self.memory[begin:end]]


class MappedPool(Pool):
    """A pool of `capacity` bytes of host memory; the system provides each page at the first write to it."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.used = capacity // PAGE_BYTES * PAGE_BYTES, 0
        self._lock = threading.Lock()

    @override
    def size_of(self, nbytes: int) -> int:
        return -(-nbytes // PAGE_BYTES) * PAGE_BYTES

    @override
    def allocate(self, nbytes: int) -> MappedExtent:
        size = self.size_of(nbytes)
        with self._lock:
            if size > self.free:
                raise MemoryError(f"{size} bytes asked for, {self.free} of {self.capacity} free")
            self.used += size
        return MappedExtent(nbytes, size)

    @override
    def deallocate(self, extent: Extent) -> None:
        with self._lock:
            self.used -= self.size_of(extent.nbytes)

    @override
    def check_integrity(self, held: list[Extent]) -> None:
        taken = sum(self.size_of(extent.nbytes) for extent in held)
        assert self.used == taken, f"{self.used} bytes are used, {taken} are held"
