"""The memory layout of weights for the CUDA kernels: tiles of 8 KB, cut and ordered when an adapter is loaded.

A tile is a run of up to 16 fragments of 512 bytes: 16 x 16 weights in the order in which the 32 lanes of an
`mma.m16n8k16` hold its 16-bit A operand, so that a warp reads a fragment as 32 x 16 bytes. Weights are
always the M side. Every tile takes 8 KB, 256 tiles make a page of 2 MiB, and a block (the A and B of one
expert of one site) takes consecutive tiles, which may continue on any other page:

    tiles of A    for each 512 columns, for each 16 ranks, for each 256 of the columns: [16 ranks, 256 columns]
    tiles of B    pair after pair: [16 * (16 // groups) output rows, all ranks of the pair]

Ranks are padded to 16 (a group), columns to 32. Each pair has ranks of its own; the groups of all pairs
lie one below the other in A. Mirrored by kernels_cuda/source/step.cuh.

Legend: R ranks, K input columns, O output rows, G groups of 16 ranks, C chunks of 256 columns, T tiles,
B bytes of a tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn.functional import pad

from kernels_cuda.ops import Block, Pair, stack
from kernels_cuda.sizes import CHUNK, CHUNKS, FRAGMENT_BYTES, MAX_PAIRS, PAGE_TILES, TILE_BYTES

PAGE_BYTES = PAGE_TILES * TILE_BYTES
GROUP = 16
MAX_RANK = 256
BAND = 4  # blocks of 16 output rows: a lane stores their results together

_TILE_ELEMENTS = TILE_BYTES // 2


@dataclass(frozen=True)
class PairShape:
    """One pair of a block. Without ranks it stands for output rows that no B reaches: they become zero."""

    lora_rank: int
    out_begin: int
    out_rows: int
    scale: float

    @property
    def groups(self) -> int:
        """Groups of 16 ranks, the last one padded."""
        return -(-self.lora_rank // GROUP)

    @property
    def tile_blocks(self) -> int:
        """Blocks of 16 output rows in a full tile of B."""
        return GROUP // self.groups if self.groups else GROUP

    @property
    def num_tiles(self) -> int:
        """Tiles of B."""
        return -(-self.out_rows // (GROUP * self.tile_blocks)) if self.groups else 0


@dataclass(frozen=True)
class BlockShape:
    """A block's shape without its weights: pairs in order, which together cover exactly the site's output rows."""

    in_width: int
    pairs: tuple[PairShape, ...]

    @cached_property
    def groups(self) -> int:
        """Groups of 16 ranks of all pairs."""
        return sum(pair.groups for pair in self.pairs)

    @cached_property
    def num_chunks(self) -> int:
        """Chunks of 256 input columns, the last one possibly shorter."""
        return -(-self.in_width // CHUNK)

    @cached_property
    def num_tiles(self) -> int:
        """Tiles of the block."""
        return self.num_chunks * self.groups + sum(pair.num_tiles for pair in self.pairs)

    @property
    def out_width(self) -> int:
        """Output rows of all pairs."""
        return sum(pair.out_rows for pair in self.pairs)

    @property
    def num_expand_jobs(self) -> int:
        """Tiles of output rows, those of gaps included."""
        return sum(-(-pair.out_rows // (GROUP * pair.tile_blocks)) for pair in self.pairs)

    @cached_property
    def read_bytes(self) -> int:
        """Bytes that a step reads of it: its tiles without their unused ends."""
        fragments = self.groups * 2 * -(-self.in_width // 32)
        return FRAGMENT_BYTES * (fragments + sum(-(-pair.out_rows // GROUP) * pair.groups for pair in self.pairs))


def shape_of(block: Block, in_width: int, out_width: int) -> BlockShape:
    """Return the `block_shape` of a block's pairs; raises ValueError also for an A of another width."""
    for pair in block.pairs:
        if pair.a_RK.shape[1] != in_width:
            raise ValueError(f"A is {list(pair.a_RK.shape)}, expected [1..{MAX_RANK}, {in_width}]")
    pairs = [PairShape(pair.a_RK.shape[0], pair.out_begin, pair.b_OR.shape[0], pair.scale) for pair in block.pairs]
    return block_shape(pairs, in_width, out_width)


def block_shape(pairs: Sequence[PairShape], in_width: int, out_width: int) -> BlockShape:
    """Return a block's shape at a site [in_width] -> [out_width], with pairs of rank 0 in the gaps between its pairs.

    Raises ValueError for what the kernels cannot serve: a rank above 256, pairs that overlap or lie
    outside the site, or more than 7 of them, gaps included.
    """
    filled: list[PairShape] = []
    reached = 0
    for pair in sorted(pairs, key=lambda pair: pair.out_begin):
        if not 1 <= pair.lora_rank <= MAX_RANK:
            raise ValueError(f"A is [{pair.lora_rank}, {in_width}], expected [1..{MAX_RANK}, {in_width}]")
        end = pair.out_begin + pair.out_rows
        if pair.out_begin < reached or end > out_width:
            raise ValueError(f"B fills rows [{pair.out_begin}, {end}) of [{reached}, {out_width})")
        if pair.out_begin > reached:
            filled.append(PairShape(0, reached, pair.out_begin - reached, 0.0))
        filled.append(pair)
        reached = end
    if reached < out_width:
        filled.append(PairShape(0, reached, out_width - reached, 0.0))
    if len(filled) > MAX_PAIRS:
        raise ValueError(f"got {len(filled)} pairs and gaps, expected at most {MAX_PAIRS}")
    return BlockShape(in_width, tuple(filled))


def pack(block: Block, shape: BlockShape, dtype: torch.dtype) -> torch.Tensor:
    """Pack a block into tiles, uint8 [T, 8192], on the weights' device. `dtype` has 16 bits; unused bytes are zero."""
    by_begin = {pair.out_begin: pair for pair in block.pairs}
    real = [(by_begin[pair.out_begin], pair) for pair in shape.pairs if pair.groups]
    device = block.a_RK.device
    if not real:
        return torch.empty(0, TILE_BYTES, dtype=torch.uint8, device=device)
    a_RK = torch.cat([_padded(pair.a_RK.to(dtype), GROUP, CHUNK) for pair, _ in real])
    parts = [_pack_a(a_RK, shape), *(_pack_b(pair.b_OR.to(dtype), its) for pair, its in real)]
    return torch.cat(parts).view(torch.uint8)


def unpack(tiles_TB: torch.Tensor, shape: BlockShape, dtype: torch.dtype) -> Block:
    """Return the block that `pack` was given, to the bit."""
    tiles = tiles_TB.view(dtype)
    a_RK = _unpack_a(tiles[: shape.num_chunks * shape.groups], shape)
    tile, row, pairs = shape.num_chunks * shape.groups, 0, []
    for pair in shape.pairs:
        if not pair.groups:
            continue
        b_OR = _unpack_b(tiles[tile : tile + pair.num_tiles], pair)
        pairs.append(Pair(a_RK[row : row + pair.lora_rank], b_OR, pair.scale, pair.out_begin))
        tile, row = tile + pair.num_tiles, row + pair.groups * GROUP
    return stack(pairs)


def _padded(matrix: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    return pad(matrix, (0, -matrix.shape[1] % columns, 0, -matrix.shape[0] % rows))


def _order_of_a(shape: BlockShape) -> list[int]:
    """List the index of the tile that holds (chunk, group), chunk by chunk and in each group by group."""
    order = []
    for chunk in range(shape.num_chunks):
        base = chunk // CHUNKS * CHUNKS
        length = min(CHUNKS, shape.num_chunks - base)
        order += [base * shape.groups + group * length + chunk - base for group in range(shape.groups)]
    return order


# rank = 16 g + 8 half + line; column = 256 c + 32 j + 8 quad + 4 step + 2 register + element; fragment = 2 j + step
_A_DIMS, _A_TO_TILES = (2, 8, 8, 4, 2, 2, 2), (3, 0, 4, 6, 2, 5, 7, 1, 8)


def _pack_a(a_RK: torch.Tensor, shape: BlockShape) -> torch.Tensor:
    half, line, *columns = _A_DIMS
    tiles = a_RK.view(shape.groups, half, line, shape.num_chunks, *columns).permute(_A_TO_TILES)
    out = torch.empty(shape.num_chunks * shape.groups, _TILE_ELEMENTS, dtype=a_RK.dtype, device=a_RK.device)
    out[torch.tensor(_order_of_a(shape), device=out.device)] = tiles.reshape(-1, _TILE_ELEMENTS)
    return out


def _unpack_a(tiles: torch.Tensor, shape: BlockShape) -> torch.Tensor:
    half, line, *columns = _A_DIMS
    permuted = [(shape.groups, half, line, shape.num_chunks, *columns)[dim] for dim in _A_TO_TILES]
    inverse = [_A_TO_TILES.index(dim) for dim in range(len(_A_TO_TILES))]
    ordered = tiles[torch.tensor(_order_of_a(shape), dtype=torch.int64, device=tiles.device)]
    a_RK = ordered.view(permuted).permute(inverse).reshape(shape.groups * GROUP, shape.num_chunks * CHUNK)
    return a_RK[:, : shape.in_width]


# row = band's first + line * 2 blocks + 2 block + half; rank = 16 g + 4 quad + 2 register + element
_B_TO_TILES = (0, 2, 4, 1, 5, 6, 3, 7)


def _bands(blocks: int) -> list[tuple[int, int]]:
    """Return (first block, blocks) of the bands of a tile."""
    return [(first, min(BAND, blocks - first)) for first in range(0, blocks, BAND)]


def _parts_of_b(pair: PairShape) -> list[tuple[int, int, int]]:
    """Return (first tile, tiles, blocks in each) of the full tiles, and of the last one if it has fewer blocks."""
    blocks = -(-pair.out_rows // GROUP)
    full, rest = divmod(blocks, pair.tile_blocks)
    return [part for part in ((0, full, pair.tile_blocks), (full, 1, rest)) if part[1] and part[2]]


def _pack_b(b_OR: torch.Tensor, pair: PairShape) -> torch.Tensor:
    b_OR = _padded(b_OR, GROUP, GROUP)
    tiles = torch.zeros(pair.num_tiles, _TILE_ELEMENTS, dtype=b_OR.dtype, device=b_OR.device)
    for first, count, blocks in _parts_of_b(pair):
        begin = first * pair.tile_blocks * GROUP
        rows = b_OR[begin : begin + count * blocks * GROUP].view(count, blocks * GROUP, -1)
        for band, width in _bands(blocks):
            part = rows[:, band * GROUP : (band + width) * GROUP].reshape(count, 8, width, 2, pair.groups, 4, 2, 2)
            part = part.permute(_B_TO_TILES).reshape(count, -1)
            at = band * pair.groups * GROUP * GROUP
            tiles[first : first + count, at : at + part.shape[1]] = part
    return tiles


def _unpack_b(tiles: torch.Tensor, pair: PairShape) -> torch.Tensor:
    b_OR = torch.empty(-(-pair.out_rows // GROUP) * GROUP, pair.groups * GROUP, dtype=tiles.dtype, device=tiles.device)
    inverse = [_B_TO_TILES.index(dim) for dim in range(len(_B_TO_TILES))]
    for first, count, blocks in _parts_of_b(pair):
        begin = first * pair.tile_blocks * GROUP
        rows = b_OR[begin : begin + count * blocks * GROUP].view(count, blocks * GROUP, -1)
        for band, width in _bands(blocks):
            at, size = band * pair.groups * GROUP * GROUP, width * pair.groups * GROUP * GROUP
            part = tiles[first : first + count, at : at + size].view(count, width, pair.groups, 8, 4, 2, 2, 2)
            rows[:, band * GROUP : (band + width) * GROUP] = part.permute(inverse).reshape(count, width * GROUP, -1)
    return b_OR[: pair.out_rows, : pair.lora_rank]
