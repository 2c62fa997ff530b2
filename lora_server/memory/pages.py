"""The pool of 2 MiB pages on one device, allocated once; who holds which page, and nothing else."""

from __future__ import annotations

import threading

import torch

from kernels_cuda.layout import PAGE_BYTES

ALIGNMENT = 512  # of a fragment, which the kernels copy whole


class PagePool:
    """Thread-safe. Pages are handed out in any order; `memory` is all of them, uint8 [pages, PAGE_BYTES]."""

    def __init__(self, num_pages: int, device: torch.device | str) -> None:
        """Raises torch.OutOfMemoryError where the device has less."""
        whole = torch.empty(num_pages * PAGE_BYTES + ALIGNMENT, dtype=torch.uint8, device=device)
        skip = -whole.data_ptr() % ALIGNMENT
        self.memory = whole[skip : skip + num_pages * PAGE_BYTES].view(num_pages, PAGE_BYTES)
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._lock = threading.Lock()

    @property
    def num_free(self) -> int:
        """Pages that can be allocated now."""
        return len(self._free)

    def allocate(self) -> int | None:
        """A page, or None if all are taken."""
        with self._lock:
            return self._free.pop() if self._free else None

    def deallocate(self, pages: list[int]) -> None:
        """Give pages back."""
        with self._lock:
            self._free.extend(pages)

    def address(self, page: int) -> int:
        """Where a page begins, in the device's address space."""
        return self.memory.data_ptr() + page * PAGE_BYTES

    def check_integrity(self, held: list[int]) -> None:
        """When idle: every page is free or in `held`, once. Raises AssertionError."""
        everyone = sorted([*self._free, *held])
        assert everyone == list(range(self.num_pages)), f"{len(self._free)} free and {len(held)} held pages"
