"""The contract of one LoRA step, shared by every implementation.

Shapes: N entries, T rows sent, U rows returned, K input width (or its window), R lora rank,
O output rows of the site (or their windows).

Semantics (all implementations, fp32 accumulation):

    out = 0
    for segment in segments:
        for i in range(segment.first, segment.first + segment.num_entries):
            x = rows[in_map[i]]                                  (rows[i] without in_map)
            for pair in segment.block.pairs:
                v = x @ pair.a_RK[:, in_window].T * pair.scale * weights[i]     (1 without weights)
                out[out_map[i], pair's rows] += v @ pair.b_OR.T  (out[i] without out_map)
    return out[:, windows side by side]

Segments are consecutive, disjoint and cover all N entries. A block without pairs adds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch

Windows: TypeAlias = tuple[tuple[int, int], ...]


class Pair(NamedTuple):
    """One (A, B) of one expert of one site; B fills output rows from `out_begin`."""

    a_RK: torch.Tensor
    b_OR: torch.Tensor
    scale: float
    out_begin: int


@dataclass(eq=False)
class Block:
    """The weights of one expert of one site. The A of all pairs lie in one tensor, one below the other."""

    a_RK: torch.Tensor
    pairs: tuple[Pair, ...]
    views: Any = None  # a cache of kernels_cuda.cpu

    def to(self, device: torch.device) -> Block:
        """Return the block on another device; itself if it is there already."""
        if self.a_RK.device == device:
            return self
        return stack([pair._replace(a_RK=pair.a_RK.to(device), b_OR=pair.b_OR.to(device)) for pair in self.pairs])


NOTHING = Block(torch.empty(0, 0), ())  # an expert without a delta


def stack(pairs: Sequence[Pair]) -> Block:
    """Make a block of pairs; their A become views of the stacked one."""
    if not pairs:
        return NOTHING
    a_RK = torch.cat([pair.a_RK for pair in pairs]).contiguous()
    views = torch.split(a_RK, [pair.a_RK.shape[0] for pair in pairs])
    return Block(a_RK, tuple(pair._replace(a_RK=view) for pair, view in zip(pairs, views, strict=True)))


class Segment(NamedTuple):
    """Consecutive entries that meet the same adapter and expert."""

    block: Block
    first: int
    num_entries: int


@dataclass(frozen=True, kw_only=True)
class Step:
    """One call. `windows` are (begin, end) of site output rows; `in_begin` is where rows' window starts in A.

    rows_TK: float tensor; in_map_N, out_map_N: int32 or int64; weights_N: float32.
    """

    rows_TK: torch.Tensor
    segments: Sequence[Segment]
    num_entries: int
    num_out_rows: int
    windows: Windows
    in_begin: int = 0
    in_map_N: torch.Tensor | None = None
    out_map_N: torch.Tensor | None = field(default=None)
    weights_N: torch.Tensor | None = None

    @property
    def out_width(self) -> int:
        """Columns of the result."""
        return sum(end - begin for begin, end in self.windows)
