"""Tells whether blocks of threads are sure to fit together on one multiprocessor of an H100 or H200.

Its registers belong to four partitions, 16,384 each, and a warp takes its own from one of them, rounded up to 256. The
warps of a block are dealt out over the partitions in turn: free registers in total do not help where one partition is
full. Numbers: cuda_occupancy.h of CUDA 13.0, compute capability 9.0. The rule is stricter than the header's: it is not
known at which partition a block begins, so every block is taken to have most of its warps in the same one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

LANES = 32
PARTITIONS = 4
PARTITION_REGISTERS = 16_384
REGISTER_UNIT = 256  # in which a warp gets them
MOST_REGISTERS = 255  # of a thread
MOST_WARPS, MOST_BLOCKS = 64, 32
SHARED_BYTES = 228 << 10
RESERVED_SHARED_BYTES = 1 << 10  # by CUDA, of each block
SERVE_WARPS = 7  # compute in a kernel that serves; an eighth polls, and beside nine no client's block would fit


class ThreadBlock(NamedTuple):
    """The demands of a block of threads. registers: of each thread, as the compiler reports them."""

    warps: int
    registers: int
    shared_bytes: int = 0

    @property
    def partition_registers(self) -> int:
        """Registers that it takes of the partition with most of its warps."""
        units = -(-LANES * self.registers // REGISTER_UNIT)
        return -(-self.warps // PARTITIONS) * units * REGISTER_UNIT


def fit(blocks: Iterable[ThreadBlock]) -> bool:
    """Tell whether a multiprocessor holds all of them at once, whichever partition the first warp of each lies in."""
    blocks = list(blocks)
    return (
        sum(block.partition_registers for block in blocks) <= PARTITION_REGISTERS
        and sum(block.warps for block in blocks) <= MOST_WARPS
        and sum(block.shared_bytes + RESERVED_SHARED_BYTES for block in blocks) <= SHARED_BYTES
        and len(blocks) <= MOST_BLOCKS
    )


def most_registers(beside: ThreadBlock, warps: int) -> int:
    """Return the most registers per thread with which a block of `warps` still fits beside another; 0 if none."""
    return max((n for n in range(MOST_REGISTERS + 1) if fit([beside, ThreadBlock(warps, n)])), default=0)
