"""A tiny model's adapters as tiles, and steps of them; what the Python loop's checks and compute answer to each."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch

from kernels_cuda.layout import BlockShape, pack, shape_of
from kernels_cuda.ops import Pair, stack
from kernels_cuda.sizes import PAGE_TILES, TILE_BYTES
from kernels_cuda.tables import BlockTable, PackedSegments
from lora_server.errors import LoraServerError
from lora_server.shard import request as requests
from lora_server.shard.compute import DeviceCompute
from lora_server.spec import PROJECTIONS, ModelSpec, Site
from lora_server.transport import e4m3
from lora_server.transport.rows import SlotRows
from lora_server.wire import slot
from lora_server.wire.region import Region, RegionLayout
from lora_server.wire.slot import RequestHeader
from tests.support.bounds import quantised
from tests.support.gpu import emulated
from tests.support.gpu.gpu_world import VARIANT

SPEC = ModelSpec(
    name="tiny", model_type="tiny", layers=2, hidden=32, ffn=16, experts=2, top_k=2, heads=2, kv_heads=1, head_dim=8,
    dense_ffn=16, moe_layers=(0, 1),
)  # fmt: skip
SITES = [Site(layer, projection) for layer in (0, 1) for projection in ("gate_up", "down")]
DTYPE, DTYPE_INDEX = torch.bfloat16, slot.DTYPES.index("bfloat16")
MAX_ROWS, DEPTH = 8, 3
VARIANTS = ((8, 8), (24,), (5, 16))  # ranks of the pairs of each version of an adapter
LAYOUT = RegionLayout.for_model(SPEC, MAX_ROWS, DEPTH)
TABLE_BYTES = slot.aligned(RegionLayout.for_model(SPEC, MAX_ROWS, DEPTH, "e4m3").table_bytes, 128)  # with scales


def site_index(site: Site) -> int:
    return site.layer * len(PROJECTIONS) + PROJECTIONS.index(site.projection)


class Packed(NamedTuple):
    """One version of an adapter: of each site the block's shape, its first tile and its tiles, expert after expert."""

    shapes: dict[Site, BlockShape]
    first: dict[Site, int]
    tiles: np.ndarray


@functools.cache
def packed(variant: int) -> Packed:
    generator = torch.Generator().manual_seed(variant)
    shapes, first, tiles = {}, {}, []

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DTYPE)

    for site in SITES:
        k, o, ranks = SPEC.in_width(site), SPEC.out_width(site), VARIANTS[variant]
        first[site], share = sum(len(part) for part in tiles), o // len(ranks)
        for _ in range(SPEC.experts):
            block = stack([Pair(noise(r, k), noise(share, r), 0.5 + i, i * share) for i, r in enumerate(ranks)])
            shapes[site] = shape_of(block, k, o)
            tiles.append(pack(block, shapes[site], DTYPE))
    return Packed(shapes, first, torch.cat(tiles).reshape(-1).numpy())


MOST_TILES = max(packed(variant).tiles.nbytes for variant in range(len(VARIANTS))) // TILE_BYTES
assert MOST_TILES <= PAGE_TILES
MAX_RANK = 32


class Body:
    """A step without its client's part of the header. entries: (index of the step's handle, expert, row), sorted.

    odd: it has rows of zeros, and of NaNs. by_entry: rows are weighted and summed per token, as at `down`.
    """

    def __init__(
        self, site: Site, entries: Sequence[tuple[int, int, int]], seed: int, step_class: int = slot.DECODE,
        window: tuple[int, int] | None = None, in_codes: bool = False, odd: bool = False,
    ) -> None:  # fmt: skip
        self.site, self.entries, self.step_class, self.in_codes = site, entries, step_class, in_codes
        self.by_entry, self.tokens = site.projection == "down", len({row for *_, row in entries})
        self.num_rows = len(entries) if self.by_entry else self.tokens
        self.num_out_rows = self.tokens if self.by_entry else len(entries)
        self.segments = list[tuple[int, int, int, int]]()  # which handle, expert, first, entries
        for (which, expert), some in itertools.groupby(enumerate(entries), lambda one: one[1][:2]):
            numbers = [i for i, _ in some]
            self.segments.append((which, expert, numbers[0], len(numbers)))
        self.windows, self.width = (window or (0, SPEC.out_width(site)),), SPEC.in_width(site)
        self.dtype = slot.E4M3 if in_codes else DTYPE_INDEX  # on the wire
        self.flags = slot.HAS_OUT_MAP if self.by_entry else slot.HAS_IN_MAP
        row_bytes = self.num_rows * self.width * slot.ELEMENT_BYTES[self.dtype]
        scales = slot.num_scales(self.num_rows, self.dtype)
        self.parts = slot.request_offsets(len(self.segments), len(entries), self.flags, row_bytes, scales)
        self.map = np.array([row for *_, row in entries], np.int32)
        self.weights = np.random.default_rng(seed).random(len(entries)).astype(np.float32)
        self.rows = torch.randn(self.num_rows, self.width, generator=torch.Generator().manual_seed(seed)).to(DTYPE)
        if odd:
            self.rows[0], self.rows[1, 3], self.rows[2, 5] = 0, math.nan, 2.0**-130

    def answered(self, payload: bytes) -> bytes:
        """Cut an answer's payload to its content: scales, if there are some, and rows."""
        width = sum(end - begin for begin, end in self.windows)
        at = slot.response_offsets(self.num_out_rows, width, self.dtype)
        assert len(payload) == at.end - slot.HEADER_BYTES
        scales = 4 * slot.num_scales(self.num_out_rows, self.dtype)
        return payload[:scales] + payload[at.rows - slot.HEADER_BYTES :]

    def deltas(self, answered: bytes) -> torch.Tensor:
        """[U, O] of them."""
        if not self.in_codes:
            return torch.frombuffer(bytearray(answered), dtype=DTYPE).view(self.num_out_rows, -1)
        at, memory = 4 * self.num_out_rows, bytearray(answered)
        codes = torch.frombuffer(memory[at:], dtype=torch.float8_e4m3fn).view(self.num_out_rows, -1)
        return e4m3.expand(codes, torch.frombuffer(memory[:at], dtype=torch.float32)).to(DTYPE)

    def header(self, client: int, epoch: int, seq: int, budget_us: int) -> RequestHeader:
        return RequestHeader(
            self.step_class, self.flags, client, epoch, seq, seq % DEPTH, self.site.layer,
            PROJECTIONS.index(self.site.projection), self.dtype, self.num_rows, len(self.entries), len(self.segments),
            self.num_out_rows, 0, self.width, self.windows, self.parts.end - slot.HEADER_BYTES, budget_us, 0,
        )  # fmt: skip

    def request(self, handles: tuple[int, ...], client: int, epoch: int, seq: int, budget_us: int) -> bytearray:
        at, memory = self.parts, bytearray(self.parts.end)
        self.header(client, epoch, seq, budget_us).pack_into(memoryview(memory))
        table = np.array([(handles[which], *rest) for which, *rest in self.segments], np.uint32)
        parts = {at.segments: table, (at.out_map if self.by_entry else at.in_map): self.map}
        if self.by_entry:
            parts[at.weights] = self.weights
        rows = self.rows
        if self.in_codes:
            rows, scales = quantised(rows)
            parts[at.scales] = scales.numpy()
        parts[at.rows] = rows.view(torch.uint8).numpy()
        for begin, array in parts.items():
            memory[begin : begin + array.nbytes] = array.tobytes()
        return memory


def bodies(in_codes: bool) -> list[Body]:
    """Make the bodies of steps that tests use; `in_codes`: rows travel as 8-bit codes."""
    up, down, upper, lower = SITES
    return [
        Body(up, ((0, 0, 0),), 1, in_codes=in_codes),
        Body(up, ((0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 0, 2)), 2, in_codes=in_codes),
        Body(up, ((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 3), (0, 1, 0)), 3, slot.PREFILL, in_codes=in_codes),
        Body(down, ((0, 0, 0), (0, 1, 0), (1, 1, 1)), 4, in_codes=in_codes),
        Body(down, ((0, 1, 0), (0, 1, 1)), 5, slot.PREFILL, in_codes=in_codes),
        Body(upper, ((0, 0, 1), (0, 1, 0), (1, 1, 1)), 6, window=(6, 22), in_codes=in_codes),
        Body(lower, ((0, 0, 0), (1, 0, 0), (1, 1, 2), (1, 1, 1)), 7, in_codes=in_codes),
    ]


BODIES, BODIES_IN_CODES = bodies(in_codes=False), bodies(in_codes=True)
BODIES_IN_CODES.append(Body(SITES[1], ((0, 0, 0), (0, 1, 1), (1, 1, 2), (1, 1, 3)), 8, in_codes=True, odd=True))


class Reference:
    """The Python loop's own checks and compute, over all versions at once. Answers are kept."""

    def __init__(self, in_codes: bool) -> None:
        self._wire: slot.Wire = "e4m3" if in_codes else "exact"
        self._memory = np.zeros(PAGE_TILES * TILE_BYTES * len(VARIANTS) + 512, np.uint8)
        self._table = BlockTable(64, "cpu")
        self._pages, self._rows = [], {}
        start = -self._memory.ctypes.data % 512
        for variant in range(len(VARIANTS)):
            at = start + variant * PAGE_TILES * TILE_BYTES
            self._memory[at : at + packed(variant).tiles.nbytes] = packed(variant).tiles
            self._pages.append(np.array([self._memory.ctypes.data + at], np.int64))
            for site in SITES:
                self._rows[variant, site] = self._table.add(self._pages[-1].ctypes.data, packed(variant).shapes[site])

        launch = functools.partial(emulated.launch, variant=VARIANT, late=False)
        self._compute = DeviceCompute(launch, self._table, SPEC, DTYPE, MAX_ROWS)
        self._answers: dict[object, bytes] = {}

    def check(
        self, memory: bytes, client: int, epoch: int, seq: int
    ) -> tuple[RequestHeader | None, requests.Request | None]:
        """Return the parts of the step that are sound: (None, None), (header, None), or (header, request)."""
        slot_memory = bytearray(LAYOUT.request_bytes)
        slot_memory[: len(memory)] = memory
        view = memoryview(slot_memory)
        try:
            header = requests.read_header(view, client, epoch, seq, MAX_ROWS)
        except LoraServerError:
            return None, None
        try:
            return header, requests.read_request(view, header, SPEC, MAX_ROWS, self._wire)
        except LoraServerError:
            return header, None

    def answer(self, body: Body, variants: tuple[int, ...]) -> bytes:
        """The rows of the answer, by the loop's compute over the emulated kernel that a host launches."""
        key = (body, variants)
        if key not in self._answers:
            memory = body.request((0,) * len(variants), 0, 1, 0, 0)
            region = Region(memoryview(bytearray(LAYOUT.nbytes)), LAYOUT)
            region.request(0)[: len(memory)] = memory
            _, request = self.check(bytes(memory), 0, 1, 0)
            table = []
            for which, expert, first, entries in body.segments:
                shape = packed(variants[which]).shapes[body.site]
                tile = packed(variants[which]).first[body.site] + expert * shape.num_tiles
                table.append((self._rows[variants[which], body.site], tile, first, entries))
            segments = PackedSegments(np.array(table, np.int32), MAX_RANK)
            self._compute.run(request, segments, SimpleNamespace(rows=SlotRows(region)))
            end = slot.response_offsets(body.num_out_rows, request.header.out_width, body.dtype).end
            self._answers[key] = body.answered(bytes(region.response(0)[slot.HEADER_BYTES : end]))
        return self._answers[key]


@functools.cache
def reference(in_codes: bool = False) -> Reference:
    return Reference(in_codes)
