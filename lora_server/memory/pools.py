"""Pools of memory, and the extents that are allocated from them."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch


class Extent(ABC):
    """Bytes [0, nbytes) of one adapter, addressed as if they were contiguous. Not thread-safe."""

    nbytes: int

    @abstractmethod
    def pieces(self, begin: int, end: int) -> list[torch.Tensor]:
        """Return the memory of bytes [begin, end) as uint8 views in order; one where it is contiguous."""

    def write(self, begin: int, data: torch.Tensor) -> None:
        """Write uint8 `data` at `begin`; a copy from host to device memory may still be in flight."""
        for piece in self.pieces(begin, begin + len(data)):
            piece.copy_(data[: len(piece)], non_blocking=True)
            data = data[len(piece) :]

    def copy(self, source: Extent, begin: int, end: int) -> None:
        """Copy bytes [begin, end) from an extent of the same kind of pool."""
        for piece, other in zip(self.pieces(begin, end), source.pieces(begin, end), strict=True):
            piece.copy_(other, non_blocking=True)


class Pool(ABC):
    """Thread-safe. Call `can_allocate` first: an extent is allocated completely or not at all."""

    capacity: int  # bytes
    used: int

    @property
    def free(self) -> int:
        """Number of bytes that can be allocated now."""
        return self.capacity - self.used

    @abstractmethod
    def size_of(self, nbytes: int) -> int:
        """Return the bytes of the pool that an extent of `nbytes` takes."""

    def can_allocate(self, nbytes: int) -> bool:
        """Return whether `allocate` would succeed now."""
        return self.size_of(nbytes) <= self.free

    @abstractmethod
    def allocate(self, nbytes: int) -> Extent:
        """Allocate an extent; raises MemoryError where there is too little memory."""

    @abstractmethod
    def deallocate(self, extent: Extent) -> None:
        """Free an extent, which no step reads any more."""

    @abstractmethod
    def check_integrity(self, held: list[Extent]) -> None:
        """Raises AssertionError unless `held` has exactly what is not free, once. For an idle pool."""
