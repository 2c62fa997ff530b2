"""Plain structs that describe weights and a step to the CUDA kernels; mirrored by source/step.cuh."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kernels_cuda.layout import GROUP, BlockShape
from kernels_cuda.sizes import MAX_PAIRS

PAIR = np.dtype([("groups", "<i4"), ("out_begin", "<i4"), ("out_rows", "<i4"), ("scale", "<f4")])
BLOCK = np.dtype(
    [
        ("pages", "<u8"),
        ("groups", "<i4"),
        ("tiles", "<i4"),
        ("out_rows", "<i4"),
        ("num_pairs", "<i4"),
        ("unused", "<i4", 2),
        ("pairs", PAIR, MAX_PAIRS),
    ]
)
SEGMENT_INTS = 4  # block, first tile, first entry, entries


class BlockTable:
    """Block descriptions in device memory, by index. Blocks of one shape on one list of pages share a row.

    `pages`: the address of an int64 [pages] tensor of page addresses, all in memory that the kernels can
    read; pages are 2 MiB each, 512-byte aligned and anywhere. The caller keeps both alive. Not thread-safe.
    """

    def __init__(self, capacity: int, device: torch.device | str) -> None:
        self._rows = np.zeros(capacity, BLOCK)
        self._max_ranks = np.zeros(capacity, np.int32)  # padded
        self._free = list(range(capacity - 1, -1, -1))
        self.tensor = torch.zeros(capacity, BLOCK.itemsize, dtype=torch.uint8, device=device)

    def add(self, pages: int, shape: BlockShape) -> int:
        """Add a row and return its index; raises ValueError when the table is full."""
        if not self._free:
            raise ValueError(f"all {len(self._rows)} rows of the block table are taken")
        index = self._free.pop()
        row = self._rows[index]
        row["pages"], row["groups"], row["tiles"] = pages, shape.groups, shape.num_expand_jobs
        self._max_ranks[index] = GROUP * shape.groups
        row["out_rows"], row["num_pairs"] = shape.out_width, len(shape.pairs)
        for i, pair in enumerate(shape.pairs):
            row["pairs"][i] = (pair.groups, pair.out_begin, pair.out_rows, pair.scale)
        self.tensor[index].copy_(torch.from_numpy(self._rows[index : index + 1].view(np.uint8)))
        return index

    def remove(self, index: int) -> None:
        """Free a row; no kernel may still read it."""
        self._free.append(index)

    def max_rank(self, rows_S: npt.NDArray[np.int32]) -> int:
        """Return the most ranks, padded, of the blocks of these rows; 0 without rows."""
        return int(self._max_ranks.take(rows_S).max(initial=0))


class PackedSegments(NamedTuple):
    """The segments of a step with blocks in device memory: int32 [S, 4] as the kernels read it, held on the host."""

    table_S4: npt.NDArray[np.int32]  # row of a BlockTable, first tile in that row's pages, first entry, entries
    max_rank: int  # of their blocks, padded
