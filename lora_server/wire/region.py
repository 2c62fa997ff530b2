"""The memory that one client and one shard share: signal lines, then request and response slots.

    line 0  request signal    written by the client
    line 1  response signal   written by the shard
    line 2  client is parked  (see transport.park)
    line 3  geometry          written once by the shard: magic, version, depth, slot sizes, widest rows
    line 4  shard looks away  (see transport.bells)
    slots   depth requests, then depth responses, page aligned

Slot of a step: seq mod depth. The client pushes seq only when the response to seq - depth has been
consumed, so a slot is never overwritten while it is read.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from lora_server.errors import ProtocolError
from lora_server.spec import ModelSpec
from lora_server.wire import slot

LINE_BYTES = 128
PAGE_BYTES = 4096
GEOMETRY = struct.Struct("<IIIIQQQ")
MAGIC = 0x4752_4F4C  # "LORG"


@dataclass(frozen=True)
class RegionLayout:
    """Sizes of a region; `request_bytes` and `response_bytes` are those of one slot.

    The first `table_bytes` of a request slot hold everything but a step's rows; 0 if unknown. `widest` is the widest
    dtype of rows, as in headers, that slots have room for.
    """

    depth: int
    request_bytes: int
    response_bytes: int
    table_bytes: int = 0
    widest: int = 0

    @classmethod
    def for_model(cls, spec: ModelSpec, max_step_rows: int, depth: int, wire: slot.Wire = "exact") -> RegionLayout:
        """Return slots that hold any step of at most `max_step_rows` entries, in any dtype of the wire, at any site."""
        sites = list(spec.sites())
        widest_in = max(spec.in_width(site) for site in sites)
        widest_out = max(spec.out_width(site) for site in sites)
        flags = slot.HAS_IN_MAP | slot.HAS_OUT_MAP
        widest = slot.E4M3 if wire == "e4m3" else slot.DTYPES.index("float32")
        row_bytes, scales = widest_in * slot.ELEMENT_BYTES[widest], slot.num_scales(max_step_rows, widest)
        at = slot.request_offsets(max_step_rows, max_step_rows, flags, max_step_rows * row_bytes, scales)
        request, tables = at.end, at.rows
        response = slot.response_offsets(max_step_rows, widest_out, widest).end
        return cls(depth, slot.aligned(request, PAGE_BYTES), slot.aligned(response, PAGE_BYTES), tables, widest)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the whole region."""
        return PAGE_BYTES + self.depth * (self.request_bytes + self.response_bytes)

    def tables(self) -> list[tuple[int, int]]:
        """Return (begin, end), in whole pages, of each request slot's part without rows; the whole slot if unknown."""
        size = min(slot.aligned(self.table_bytes, PAGE_BYTES) or self.request_bytes, self.request_bytes)
        starts = [PAGE_BYTES + index * self.request_bytes for index in range(self.depth)]
        return [(start, start + size) for start in starts]

    def answers(self) -> list[tuple[int, int]]:
        """Return (begin, end) of the first page of each response slot, which has its header and a refusal's text."""
        first = PAGE_BYTES + self.depth * self.request_bytes
        starts = [first + index * self.response_bytes for index in range(self.depth)]
        return [(start, start + PAGE_BYTES) for start in starts]


class Region:
    """Typed views over a region's memory. Owns nothing but the views; `memory` keeps the mapping alive."""

    def __init__(self, memory: memoryview, layout: RegionLayout) -> None:
        if memory.nbytes < layout.nbytes:
            raise ProtocolError(f"region: got {memory.nbytes} bytes, expected {layout.nbytes} for {layout}")
        self.memory = memory
        self.layout = layout
        self.request_signal = memory[0:8].cast("Q")
        self.response_signal = memory[LINE_BYTES : LINE_BYTES + 8].cast("Q")
        self.parked = memory[2 * LINE_BYTES : 2 * LINE_BYTES + 4]
        self.unwatched = memory[4 * LINE_BYTES : 4 * LINE_BYTES + 4]
        first_response = PAGE_BYTES + layout.depth * layout.request_bytes
        self._requests = [self._slot(PAGE_BYTES, layout.request_bytes, i) for i in range(layout.depth)]
        self._responses = [self._slot(first_response, layout.response_bytes, i) for i in range(layout.depth)]

    def _slot(self, base: int, size: int, index: int) -> memoryview:
        return self.memory[base + index * size : base + (index + 1) * size]

    def request(self, seq: int) -> memoryview:
        """Return the request slot of a step."""
        return self._requests[seq % self.layout.depth]

    def response(self, seq: int) -> memoryview:
        """Return the response slot of a step."""
        return self._responses[seq % self.layout.depth]

    def write_geometry(self) -> None:
        """Write the geometry; the shard does so before the client sees the region."""
        layout = self.layout
        GEOMETRY.pack_into(
            self.memory,
            3 * LINE_BYTES,
            MAGIC,
            slot.VERSION,
            layout.depth,
            layout.table_bytes,
            layout.request_bytes,
            layout.response_bytes,
            layout.widest,
        )

    @staticmethod
    def read_geometry(memory: memoryview) -> RegionLayout:
        """Read the geometry of a mapped region, at the client; raises ProtocolError for a foreign one."""
        magic, version, depth, table_bytes, *sizes = GEOMETRY.unpack_from(memory, 3 * LINE_BYTES)
        if magic != MAGIC or version != slot.VERSION:
            raise ProtocolError(
                f"region: got magic {magic:#x} version {version}, expected {MAGIC:#x} version {slot.VERSION}"
            )
        request_bytes, response_bytes, widest = sizes
        return RegionLayout(depth, request_bytes, response_bytes, table_bytes, widest)
