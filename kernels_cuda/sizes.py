"""Sizes that hosts and kernels share: kernels include `sizes.cuh`, which is made of this file."""

from __future__ import annotations

FRAGMENT_BYTES = 512
TILE_BYTES = 8192
PAGE_TILES = 256
CHUNK, CHUNKS = 256, 2  # columns of A in a tile; chunks of K that are summed before they meet the others: see step.cuh
JOB_ROWS = 32  # entries that share one copy of a tile
MAX_PAIRS = 7  # of a block
ROUTE_PAIR_BITS = 13  # a pair's number and its key lie in one word of 32 bits: see route.cu
ROUTE_DIGIT_BITS = 4
HEADER = "".join([f"#define LORA_{name} {value}\n" for name, value in globals().items() if isinstance(value, int)])
