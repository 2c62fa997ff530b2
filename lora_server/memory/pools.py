"""Memory that is handed out to adapters and taken back: how much there is, and to whom it went."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch


class Extent(ABC):
    """Bytes [0, nbytes) of one adapter, consecutive to who uses them, wherever they lie. Not thread-safe."""

    nbytes: int

    @abstractmethod
    def pieces(self, begin: int, end: int) -> list[torch.Tensor]:
        """The memory of bytes [begin, end), in order: uint8 views, one where it is consecutive."""

    def write(self, begin: int, data: torch.Tensor) -> None:
        """Put uint8 `data` at `begin`; from host to device memory it may still be under way."""
        for piece in self.pieces(begin, begin + len(data)):
            piece.copy_(data[: len(piece)], non_blocking=True)
            data = data[len(piece) :]

    def copy(self, source: Extent, begin: int, end: int) -> None:
        """Bytes [begin, end) of an extent of the same kind of pool."""
        for piece, other in zip(self.pieces(begin, end), source.pieces(begin, end), strict=True):
            piece.copy_(other, non_blocking=True)


class Pool(ABC):
    """Thread-safe. Ask `can_allocate` before you take: an extent is allocated whole, or not at all."""

    capacity: int  # bytes
    used: int

    @property
    def free(self) -> int:
        """Bytes that can be allocated now."""
        return self.capacity - self.used

    @abstractmethod
    def size_of(self, nbytes: int) -> int:
        """What an extent of so many bytes takes of the pool."""

    def can_allocate(self, nbytes: int) -> bool:
        """Whether `allocate` would succeed now."""
        return self.size_of(nbytes) <= self.free

    @abstractmethod
    def allocate(self, nbytes: int) -> Extent:
        """Memory for so many bytes; raises MemoryError where there is not enough."""

    @abstractmethod
    def deallocate(self, extent: Extent) -> None:
        """Take it back; nobody may still read it."""

    @abstractmethod
    def check_integrity(self, held: list[Extent]) -> None:
        """When idle: what is not free is in `held`, once. Raises AssertionError."""
