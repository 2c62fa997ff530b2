"""A tiny model's adapters as tiles, and steps of them; what the Python loop's checks and compute answer to each."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import torch

from kernels_cuda.layout import PAGE_TILES, TILE_BYTES, BlockShape, pack, shape_of
from kernels_cuda.ops import Pair, stack
from kernels_cuda.tables import BlockTable, PackedSegments
from lora_server.errors import LoraServerError, ProtocolError
from lora_server.shard import request as requests
from lora_server.shard.compute import DeviceCompute
from lora_server.spec import PROJECTIONS, ModelSpec, Site
from lora_server.transport import e4m3
from lora_server.transport.base import End
from lora_server.wire import slot
from lora_server.wire.region import Region, RegionLayout
from lora_server.wire.slot import RequestHeader
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


@dataclass(frozen=True)
class Packed:
    """One version of an adapter: of each site the block's shape, its first tile and its tiles, expert after expert."""

    shapes: dict[Site, BlockShape]
    first: dict[Site, int]
    tiles: np.ndarray

    @property
    def nbytes(self) -> int:
        return self.tiles.nbytes


@functools.cache
def packed(variant: int) -> Packed:
    generator = torch.Generator().manual_seed(variant)
    shapes, first, tiles = {}, {}, []
    for site in SITES:
        k, o, ranks = SPEC.in_width(site), SPEC.out_width(site), VARIANTS[variant]
        first[site] = sum(len(part) for part in tiles)
        for _ in range(SPEC.experts):
            share = o // len(ranks)
            pairs = [
                Pair(
                    torch.randn(rank, k, generator=generator).to(DTYPE),
                    torch.randn(share, rank, generator=generator).to(DTYPE),
                    0.5 + i,
                    i * share,
                )
                for i, rank in enumerate(ranks)
            ]
            block = stack(pairs)
            shapes[site] = shape_of(block, k, o)
            tiles.append(pack(block, shapes[site], DTYPE))
    return Packed(shapes, first, torch.cat(tiles).reshape(-1).numpy())


MOST_TILES = max(packed(variant).nbytes for variant in range(len(VARIANTS))) // TILE_BYTES
assert MOST_TILES <= PAGE_TILES
MAX_RANK = 32


@dataclass(frozen=True)
class Body:
    """A step but for who sends it. entries: (which of the step's handles, expert, row), sorted."""

    site: Site
    entries: tuple[tuple[int, int, int], ...]
    seed: int
    step_class: int = slot.DECODE
    window: tuple[int, int] | None = None
    in_codes: bool = False  # how its rows travel
    odd: bool = False  # rows of zeros, and of what is no number

    @property
    def by_entry(self) -> bool:
        """Weighted, summed per token: how `down` travels."""
        return self.site.projection == "down"

    @property
    def tokens(self) -> int:
        return len({row for *_, row in self.entries})

    @property
    def segments(self) -> list[tuple[int, int, int, int]]:
        """Which handle, expert, first, entries."""
        found: list[list[int]] = []
        for i, (which, expert, _) in enumerate(self.entries):
            if not found or (found[-1][0], found[-1][1]) != (which, expert):
                found.append([which, expert, i, 0])
            found[-1][3] += 1
        return [tuple(one) for one in found]

    @property
    def num_rows(self) -> int:
        return len(self.entries) if self.by_entry else self.tokens

    @property
    def num_out_rows(self) -> int:
        return self.tokens if self.by_entry else len(self.entries)

    @property
    def windows(self) -> tuple[tuple[int, int], ...]:
        return (self.window or (0, SPEC.out_width(self.site)),)

    @property
    def width(self) -> int:
        return SPEC.in_width(self.site)

    @functools.cached_property
    def rows(self) -> torch.Tensor:
        rows = torch.randn(self.num_rows, self.width, generator=torch.Generator().manual_seed(self.seed)).to(DTYPE)
        if self.odd:
            rows[0], rows[1, 3], rows[2, 5] = 0, math.nan, 2.0**-130
        return rows

    @property
    def dtype(self) -> int:
        """On the wire."""
        return slot.E4M3 if self.in_codes else DTYPE_INDEX

    @property
    def parts(self) -> slot.RequestOffsets:
        """Where they lie in a request."""
        flags = slot.HAS_OUT_MAP if self.by_entry else slot.HAS_IN_MAP
        row_bytes = self.num_rows * self.width * slot.ELEMENT_BYTES[self.dtype]
        scales = slot.num_scales(self.num_rows, self.dtype)
        return slot.request_offsets(len(self.segments), len(self.entries), flags, row_bytes, scales)

    def answered(self, payload: bytes) -> bytes:
        """Of an answer, what it says: scales, if there are some, and rows."""
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

    @property
    def map(self) -> np.ndarray:
        return np.array([row for *_, row in self.entries], np.int32)

    @property
    def weights(self) -> np.ndarray:
        return np.random.default_rng(self.seed).random(len(self.entries)).astype(np.float32)

    def header(self, client: int, epoch: int, seq: int, budget_us: int) -> RequestHeader:
        flags = slot.HAS_OUT_MAP if self.by_entry else slot.HAS_IN_MAP
        n, segments, end = len(self.entries), len(self.segments), self.parts.end
        return RequestHeader(
            self.step_class, flags, client, epoch, seq, seq % DEPTH, self.site.layer,
            PROJECTIONS.index(self.site.projection), self.dtype, self.num_rows, n, segments, self.num_out_rows,
            0, self.width, self.windows, end - slot.HEADER_BYTES, budget_us, 0,
        )  # fmt: skip

    def request(self, handles: tuple[int, ...], client: int, epoch: int, seq: int, budget_us: int) -> bytearray:
        header = self.header(client, epoch, seq, budget_us)
        memory = bytearray(slot.HEADER_BYTES + header.payload_bytes)
        header.pack_into(memoryview(memory))
        at = self.parts
        table = np.array([(handles[which], *rest) for which, *rest in self.segments], np.uint32)
        memory[at.segments : at.segments + table.nbytes] = table.tobytes()
        map_at = at.out_map if self.by_entry else at.in_map
        memory[map_at : map_at + 4 * header.num_entries] = self.map.tobytes()
        if self.by_entry:
            memory[at.weights : at.weights + 4 * header.num_entries] = self.weights.tobytes()
        rows = self.rows
        if self.in_codes:
            rows, scales = torch.empty(rows.shape, dtype=torch.float8_e4m3fn), torch.empty(len(rows))
            e4m3.quantise(self.rows, rows, scales)
            memory[at.scales : at.scales + scales.nbytes] = scales.numpy().tobytes()
        memory[at.rows :] = rows.view(torch.uint8).numpy().tobytes()
        return memory


BODIES = (
    Body(SITES[0], ((0, 0, 0),), 1),
    Body(SITES[0], ((0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 0, 2)), 2),
    Body(SITES[0], ((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 3), (0, 1, 0)), 3, slot.PREFILL),
    Body(SITES[1], ((0, 0, 0), (0, 1, 0), (1, 1, 1)), 4),
    Body(SITES[1], ((0, 1, 0), (0, 1, 1)), 5, slot.PREFILL),
    Body(SITES[2], ((0, 0, 1), (0, 1, 0), (1, 1, 1)), 6, window=(6, 22)),
    Body(SITES[3], ((0, 0, 0), (1, 0, 0), (1, 1, 2), (1, 1, 1)), 7),
)
BODIES_IN_CODES = (
    *(replace(body, in_codes=True) for body in BODIES),
    Body(SITES[1], ((0, 0, 0), (0, 1, 1), (1, 1, 2), (1, 1, 3)), 8, in_codes=True, odd=True),
)


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
            self._memory[at : at + packed(variant).nbytes] = packed(variant).tiles
            self._pages.append(np.array([self._memory.ctypes.data + at], np.int64))
            for site in SITES:
                self._rows[variant, site] = self._table.add(self._pages[-1].ctypes.data, packed(variant).shapes[site])

        def launch(step, out, workspace):
            emulated.launch(step, out, workspace, VARIANT, late=False)

        self._compute = DeviceCompute(launch, self._table, SPEC, DTYPE, MAX_ROWS)
        self._answers: dict[object, bytes] = {}

    def check(
        self, memory: bytes, client: int, epoch: int, seq: int
    ) -> tuple[RequestHeader | None, requests.Request | None]:
        """What of the step is sound: nothing, the header, all of it."""
        slot_memory = bytearray(LAYOUT.request_bytes)
        slot_memory[: len(memory)] = memory
        view = memoryview(slot_memory)
        try:
            header = requests.read_header(view, client, epoch, seq, MAX_ROWS)
        except (LoraServerError, ProtocolError):
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
            region_bytes = bytearray(LAYOUT.nbytes)
            region = Region(memoryview(region_bytes), LAYOUT)
            region.request(0)[: len(memory)] = memory
            _, request = self.check(bytes(memory), 0, 1, 0)
            table = []
            for which, expert, first, entries in body.segments:
                shape = packed(variants[which]).shapes[body.site]
                tile = packed(variants[which]).first[body.site] + expert * shape.num_tiles
                table.append((self._rows[variants[which], body.site], tile, first, entries))
            ends = End()
            ends.region = region
            segments = PackedSegments(np.array(table, np.int32), MAX_RANK)
            self._compute.run(request, segments, SimpleNamespace(rows=ends.rows))
            end = slot.response_offsets(body.num_out_rows, request.header.out_width, body.dtype).end
            self._answers[key] = body.answered(bytes(region.response(0)[slot.HEADER_BYTES : end]))
        return self._answers[key]


@functools.cache
def reference(in_codes: bool = False) -> Reference:
    return Reference(in_codes)
