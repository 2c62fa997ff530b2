"""Layout of a block's weights (one expert of one site) in memory, which a step's kernels read in place.

Shapes: R lora rank, K input width, O output rows, B bytes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from typing_extensions import override

from kernels_cuda.layout import BlockShape, PairShape, block_shape, pack
from kernels_cuda.ops import Block, Pair, stack
from kernels_cuda.sizes import TILE_BYTES
from lora_server.adapters import DeltaPart
from lora_server.errors import AdapterLoadError
from lora_server.spec import ModelSpec, Site

ShapeT = TypeVar("ShapeT", bound=Hashable)


class Format(ABC, Generic[ShapeT]):
    """A shape is all of a block but its weights; blocks of equal parts have equal shapes."""

    alignment: int  # bytes; blocks begin at multiples of it

    @abstractmethod
    def shape(self, site: Site, parts: Sequence[DeltaPart]) -> ShapeT:
        """Return the shape of a block; raises AdapterLoadError for one that the kernels cannot serve."""

    @abstractmethod
    def nbytes(self, shape: ShapeT) -> int:
        """Return the size of a block."""


@dataclass(frozen=True)
class HostShape:
    """Shape of a block for the CPU kernels: the A of all pairs stacked, then each pair's B."""

    in_width: int
    parts: tuple[DeltaPart, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of elements of A, and of each B."""
        widths = (part.lora_rank * (part.out_end - part.out_begin) for part in self.parts)
        return (self.in_width * sum(part.lora_rank for part in self.parts), *widths)


class HostFormat(Format[HostShape]):
    """Plain matrices, each aligned to a cache line."""

    alignment = 64

    def __init__(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        self._spec, self._dtype = spec, dtype

    @override
    def shape(self, site: Site, parts: Sequence[DeltaPart]) -> HostShape:
        return HostShape(self._spec.in_width(site), tuple(parts))

    @override
    def nbytes(self, shape: HostShape) -> int:
        return sum(map(self._aligned, shape.sizes))

    def unpack(self, packed_B: torch.Tensor, shape: HostShape) -> Block:
        """Return views of packed weights."""
        matrices, begin = [], 0
        for size in shape.sizes:
            matrices.append(packed_B[begin : begin + size * self._dtype.itemsize].view(self._dtype))
            begin += self._aligned(size)
        a_RK = matrices[0].view(-1, shape.in_width)
        ranks = [part.lora_rank for part in shape.parts]
        pairs = (
            Pair(a_rK, b.view(-1, part.lora_rank), part.scale, part.out_begin)
            for part, a_rK, b in zip(shape.parts, torch.split(a_RK, ranks), matrices[1:], strict=True)
        )
        return Block(a_RK, tuple(pairs))

    def _aligned(self, size: int) -> int:
        return math.ceil(size * self._dtype.itemsize / self.alignment) * self.alignment


class TileFormat(Format[BlockShape]):
    """Tiles in the order of kernels_cuda.layout; 16-bit weights."""

    alignment = TILE_BYTES

    def __init__(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        self._spec, self._dtype = spec, dtype

    @override
    def shape(self, site: Site, parts: Sequence[DeltaPart]) -> BlockShape:
        pairs = [PairShape(part.lora_rank, part.out_begin, part.out_end - part.out_begin, part.scale) for part in parts]
        try:
            return block_shape(pairs, self._spec.in_width(site), self._spec.out_width(site))
        except ValueError as error:
            raise AdapterLoadError(f"{site}: {error}") from error

    @override
    def nbytes(self, shape: BlockShape) -> int:
        return shape.num_tiles * TILE_BYTES

    def pack(self, pairs: Sequence[Pair], shape: BlockShape, device: torch.device) -> torch.Tensor:
        """Pack a block's pairs as uint8 [B], on the device or on the host."""
        block = stack([pair._replace(a_RK=pair.a_RK.to(self._dtype), b_OR=pair.b_OR.to(self._dtype)) for pair in pairs])
        return pack(block.to(device), shape, self._dtype).reshape(-1)
