"""Tiles: pack and unpack are inverse, and a tile holds what the layout's words say, element by element."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels_cuda.heuristics import Variant
from kernels_cuda.launch import max_rank_of
from kernels_cuda.layout import CHUNK, FRAGMENT_BYTES, TILE_BYTES, BlockShape, PairShape, pack, shape_of, unpack
from kernels_cuda.ops import NOTHING, Block, Pair, stack
from kernels_cuda.tables import BLOCK, BlockTable
from tests.support.gpu import emulated


def random_block(random: np.random.Generator, dtype: torch.dtype) -> tuple[Block, int, int]:
    in_width, row, pairs = int(random.integers(1, 1200)), 0, []
    for _ in range(random.integers(0, 4)):
        row += int(random.choice([0, 0, 7]))
        rank, rows = int(random.integers(1, 257)), int(random.integers(1, 500))
        noise = torch.from_numpy(random.standard_normal((rank, in_width + rows)).astype(np.float32)).to(dtype)
        pairs.append(Pair(noise[:, :in_width], noise[:, in_width:].t(), 0.5, row))
        row += rows
    return stack(pairs), in_width, row + int(random.choice([1, 30]))


@pytest.mark.parametrize("seed", range(60))
def test_unpack_undoes_pack(seed):
    random = np.random.default_rng(seed)
    dtype = (torch.bfloat16, torch.float16)[seed % 2]
    block, in_width, out_width = random_block(random, dtype)
    shape = shape_of(block, in_width, out_width)
    tiles = pack(block, shape, dtype)
    assert tiles.shape == (shape.num_tiles, TILE_BYTES) and tiles.dtype == torch.uint8
    again = unpack(tiles, shape, dtype)
    assert [pair[2:] for pair in again.pairs] == [pair[2:] for pair in block.pairs]
    for got, expected in zip(again.pairs, block.pairs, strict=True):
        assert torch.equal(got.a_RK, expected.a_RK) and torch.equal(got.b_OR, expected.b_OR)
    assert sum(pair.out_rows for pair in shape.pairs) == out_width
    assert shape.read_bytes <= tiles.nbytes


def test_fragments_follow_the_mma_layout():
    """Lane (line, quad) register i of a fragment, by the PTX manual's table for 16-bit A operands."""
    rank, in_width, rows = 40, CHUNK * 3, 100
    a_RK = torch.arange(rank * in_width).view(rank, in_width)
    b_OR = torch.arange(rows * rank).view(rows, rank) + 30000
    halves = [t.to(torch.int16).view(torch.bfloat16) for t in (a_RK, b_OR)]  # numbers as bit patterns
    shape = shape_of(stack([Pair(*halves, 1.0, 0)]), in_width, rows)
    tiles = pack(stack([Pair(*halves, 1.0, 0)]), shape, torch.bfloat16).view(torch.int16).view(-1, 16, 32, 8).numpy()
    tiles_of_a = {(0, 0): 0, (1, 0): 1, (0, 2): 4, (2, 0): 6, (2, 1): 7}
    for lane in range(32):
        line, quad = divmod(lane, 4)
        for element in range(8):
            row, k = line + 8 * (element // 2 % 2), element % 2 + 2 * (element // 4)
            for (chunk, group), tile_of_a in tiles_of_a.items():
                for fragment in range(16):
                    column = chunk * 256 + fragment // 2 * 32 + 8 * quad + fragment % 2 * 4 + k
                    expected = int(a_RK[group * 16 + row, column].short()) if group * 16 + row < rank else 0
                    assert tiles[tile_of_a, fragment, lane, element] == expected
            for tile in range(2):  # 3 groups: 5 blocks of 16 rows, in bands of 4 and 1; the second tile has 2
                bands = [(0, 4), (4, 1)] if tile == 0 else [(0, 2)]
                for first, blocks in bands:
                    for block in range(blocks):
                        out = tile * 80 + first * 16 + line * 2 * blocks + 2 * block + row // 8
                        for group in range(3):
                            at = group * 16 + 4 * quad + k
                            expected = int(b_OR[out, at].short()) if out < rows and at < rank else 0
                            assert tiles[9 + tile, (first + block) * 3 + group, lane, element] == expected


def test_a_layout_in_numbers():
    shape = BlockShape(2880, (PairShape(64, 0, 5760, 2.0),))
    assert shape.num_tiles == 12 * 4 + 90
    assert shape.read_bytes == 64 * (2880 + 5760) * 2, "no byte more than the weights"
    assert shape_of(NOTHING, 64, 10) == BlockShape(64, (PairShape(0, 0, 10, 0.0),))
    assert max_rank_of([8, 64, 65]) == 16 + 64 + 80
    assert FRAGMENT_BYTES * 16 == TILE_BYTES


def test_what_cannot_be_packed_is_refused():
    def pair(rank: int, width: int, rows: int, begin: int) -> Pair:
        return Pair(torch.zeros(rank, width), torch.zeros(rows, rank), 1.0, begin)

    for pairs, reason in (
        ([pair(257, 8, 4, 0)], "257"),
        ([pair(4, 9, 4, 0)], r"\[4, 9\], expected \[1..256, 8\]"),
        ([pair(4, 8, 4, 7)], r"rows \[7, 11\)"),
        ([pair(4, 8, 4, 0), pair(4, 8, 4, 3)], r"rows \[3, 7\)"),
        ([pair(1, 8, 1, 2 * i + 1) for i in range(4)], "9 pairs and gaps"),
    ):
        with pytest.raises(ValueError, match=reason):
            shape_of(stack(pairs), 8, 10)
    with pytest.raises(ValueError, match="got rank 257"):
        max_rank_of([257])


def test_the_block_table_gives_rows_and_takes_them_back():
    shape = BlockShape(64, (PairShape(20, 0, 30, 2.0), PairShape(0, 30, 10, 0.0)))
    table = BlockTable(2, "cpu")
    rows = [table.add(pages, shape) for pages in (4096, 8192)]
    with pytest.raises(ValueError, match="all 2 rows"):
        table.add(0, shape)
    table.remove(rows[0])
    assert table.add(512, shape) == rows[0]
    stored = table.tensor.numpy().view(BLOCK).ravel()
    assert stored["pages"][rows].tolist() == [512, 8192]
    assert stored["groups"].tolist() == [2, 2] and stored["num_pairs"].tolist() == [2, 2]
    assert stored["pairs"][0][:2].tolist() == [(2, 0, 30, 2.0), (0, 30, 10, 0.0)]


@pytest.mark.skipif(bool(emulated.MISSING), reason=emulated.MISSING)
@pytest.mark.parametrize(
    "variant",
    [
        *(Variant(True, 2), Variant(False, 2), Variant(True, 3, 3)),  # other tests have them built
        *(pytest.param(one, marks=pytest.mark.long) for one in (Variant(False, 1), Variant(True, 8))),
    ],
)
def test_shared_memory_is_what_the_source_declares(variant):
    assert variant.shared_bytes == emulated.shared_bytes(variant)
