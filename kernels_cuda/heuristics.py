"""Chooses the variant of the kernels for a GPU. Pure: numbers in, a Variant out.

All variants compute the same bits: they differ in how tiles reach shared memory and in how many warps
share the work, never in the instruction, the split of K or the order of sums.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernels_cuda.layout import GROUP, MAX_RANK
from kernels_cuda.sizes import FRAGMENT_BYTES, TILE_BYTES

STAGES = 2  # tiles that a warp has under way or in hand
WARPS = 8


_RECORD_BYTES, _BARRIER_BYTES, _SEGMENT_BYTES = 48, 8, 16


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 128) * 128


@dataclass(frozen=True)
class Variant:
    """Compile-time parameters of a kernel. bulk_copy needs sm_90."""

    bulk_copy: bool
    warps: int
    stages: int = STAGES

    @property
    def shared_bytes(self) -> int:
        """Shared memory of one block: sizeof(BlockMemory) in source/lora_step.cu."""
        warp = self.stages * (TILE_BYTES + _RECORD_BYTES + _BARRIER_BYTES) + MAX_RANK // GROUP * FRAGMENT_BYTES
        shares = (2 * 4 + _SEGMENT_BYTES) * self.warps * 32 + 16
        return _aligned(self.warps * _aligned(warp) + shares)

    @property
    def defines(self) -> tuple[str, ...]:
        """The compiler options that select this variant."""
        return (f"-DBULK_COPY={int(self.bulk_copy)}", f"-DWARPS={self.warps}", f"-DSTAGES={self.stages}")


def choose(capability: tuple[int, int], shared_bytes: int, most_warps: int = WARPS) -> Variant:
    """Choose the variant for a GPU of this compute capability with `shared_bytes` of shared memory for one block.

    Raises ValueError for a GPU before sm_80, which has no bf16 MMA.
    """
    if capability < (8, 0):
        raise ValueError(
            f"got compute capability {capability}, expected at least (8, 0): before it there is no bf16 MMA"
        )
    for warps in range(most_warps, 0, -1):
        variant = Variant(bulk_copy=capability >= (9, 0), warps=warps)
        if variant.shared_bytes <= shared_bytes:
            return variant
    raise ValueError(f"got {shared_bytes} bytes of shared memory per block, expected at least {variant.shared_bytes}")
