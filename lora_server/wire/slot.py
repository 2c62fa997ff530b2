"""The slot: one step's request, or its response, as plain fixed-size data.

One put carries a whole request, contiguous, 16-byte aligned parts in this order:

    header | segments | in_map? | out_map?, weights? | row_scale? | rows

`slot.h` mirrors this file for kernels that will poll and fill the same slots; a test compares the
two. Little-endian throughout.

Shapes: N entries (one per (row, expert) pair), T rows sent, U rows returned, K input width, O output
width. Entries are grouped in segments: consecutive entries of one (adapter handle, expert).

    entry i reads   rows[in_map[i]]                 (row i without an in_map)
    and adds        weights[i] * delta   to   out[out_map[i]]   (sets out[i] without an out_map)

Rows of dtype e4m3 have a float32 scale each, before them, in a request and in its response; a scale is finite and
not negative, and what it is of is the row's codes times it.
"""

from __future__ import annotations

import struct
from typing import Literal, NamedTuple

from lora_server.errors import ProtocolError
from lora_server.spec import PROJECTIONS

REQUEST_MAGIC = 0x5152_4F4C  # "LORQ"
RESPONSE_MAGIC = 0x5052_4F4C  # "LORP"
VERSION = 1
HEADER_BYTES = 128
SEGMENT_BYTES = 16
ALIGN = 64

DECODE, PREFILL = 0, 1
HAS_IN_MAP, HAS_OUT_MAP = 1, 2
WAITS_FOR_WEIGHTS = 4  # the client waits for weights that are loading; otherwise such a step is soon refused
DTYPES = ("float32", "bfloat16", "float16", "e4m3")
ELEMENT_BYTES = (4, 2, 2, 1)
E4M3 = DTYPES.index("e4m3")
Wire = Literal["exact", "e4m3"]
OK, FAILED = 0, 1
MAX_WINDOWS = 3
MAX_BUDGET_US = 3_600_000_000  # a longer budget counts as this one
STEP_ROWS, MOST_ROWS = 8, 65536  # of a client's share: a step costs its rows, so many at most, and STEP_ROWS
AHEAD_ROWS = 1024  # that a client with an SLO class may be ahead of its share

# name, struct code, count: the order is the layout
REQUEST_FIELDS = (
    ("magic", "I", 1),
    ("version", "H", 1),
    ("step_class", "B", 1),
    ("flags", "B", 1),
    ("client", "I", 1),
    ("epoch", "I", 1),
    ("seq", "Q", 1),
    ("slot", "I", 1),
    ("layer", "I", 1),
    ("projection", "I", 1),
    ("dtype", "I", 1),
    ("num_rows", "I", 1),
    ("num_entries", "I", 1),
    ("num_segments", "I", 1),
    ("num_out_rows", "I", 1),
    ("in_begin", "I", 1),
    ("in_end", "I", 1),
    ("num_windows", "I", 1),
    ("out_windows", "I", 2 * MAX_WINDOWS),
    ("reserved", "I", 1),
    ("payload_bytes", "Q", 1),
    ("budget_us", "Q", 1),
    ("pushed_ns", "Q", 1),
)
RESPONSE_FIELDS = (
    ("magic", "I", 1),
    ("version", "H", 1),
    ("status", "H", 1),
    ("client", "I", 1),
    ("epoch", "I", 1),
    ("seq", "Q", 1),
    ("slot", "I", 1),
    ("dtype", "I", 1),
    ("num_rows", "I", 1),
    ("width", "I", 1),
    ("payload_bytes", "Q", 1),
    ("received_ns", "Q", 1),
    ("started_ns", "Q", 1),
    ("done_ns", "Q", 1),
)
SEGMENT_FIELDS = (("handle", "I", 1), ("expert", "I", 1), ("first", "I", 1), ("num_entries", "I", 1))


def _packer(fields: tuple[tuple[str, str, int], ...]) -> struct.Struct:
    return struct.Struct("<" + "".join(f"{count}{code}" for _, code, count in fields))


_REQUEST = _packer(REQUEST_FIELDS)
_RESPONSE = _packer(RESPONSE_FIELDS)
_PAYLOAD_AT = _REQUEST.size - 24  # before budget and time


class RequestHeader(NamedTuple):
    """One step of one client at one site, as pushed to one shard."""

    step_class: int
    flags: int
    client: int
    epoch: int
    seq: int
    slot: int
    layer: int
    projection: int
    dtype: int
    num_rows: int
    num_entries: int
    num_segments: int
    num_out_rows: int
    in_begin: int
    in_end: int
    windows: tuple[tuple[int, int], ...]
    payload_bytes: int
    budget_us: int
    pushed_ns: int

    def pack_into(self, slot: memoryview) -> None:
        """Write the header at the start of a slot."""
        flat = [bound for window in self.windows for bound in window]
        flat += [0] * (2 * MAX_WINDOWS - len(flat))
        _REQUEST.pack_into(slot, 0, REQUEST_MAGIC, VERSION, *self[:15], len(self.windows), *flat, 0, *self[16:])

    @classmethod
    def unpack_from(cls, slot: memoryview) -> RequestHeader:
        """Read and check a header; raises ProtocolError for one that is not ours."""
        magic, version, *rest = _REQUEST.unpack_from(slot, 0)
        if magic != REQUEST_MAGIC or version != VERSION:
            raise ProtocolError(
                f"request header: got magic {magic:#x} version {version}, expected {REQUEST_MAGIC:#x} version {VERSION}"
            )
        num_windows, flat = rest[15], rest[16:22]
        if not 1 <= num_windows <= MAX_WINDOWS:
            raise ProtocolError(f"request header: got {num_windows} output windows, expected 1 to {MAX_WINDOWS}")
        windows = tuple((flat[2 * i], flat[2 * i + 1]) for i in range(num_windows))
        return cls._make([*rest[:15], windows, *rest[23:]])

    @property
    def out_width(self) -> int:
        """Return the columns of the response: all windows side by side."""
        width = 0
        for begin, end in self.windows:  # at every step, several times: a generator costs more
            width += end - begin
        return width

    @property
    def where(self) -> str:
        """Return the step in words, for errors and logs."""
        name = PROJECTIONS[self.projection] if self.projection < len(PROJECTIONS) else f"projection {self.projection}"
        return f"client {self.client} slot {self.slot} seq {self.seq} (layer {self.layer} {name})"


def payload_bytes(request: memoryview) -> int:
    """Return a request's payload size as its header says, unchecked."""
    return int.from_bytes(request[_PAYLOAD_AT : _PAYLOAD_AT + 8], "little")


class ResponseHeader(NamedTuple):
    """The answer to one request; with status FAILED the payload is `code\\nmessage` in UTF-8."""

    status: int
    client: int
    epoch: int
    seq: int
    slot: int
    dtype: int
    num_rows: int
    width: int
    payload_bytes: int
    received_ns: int
    started_ns: int
    done_ns: int

    def pack_into(self, slot: memoryview) -> None:
        """Write the header at the start of a slot."""
        _RESPONSE.pack_into(slot, 0, RESPONSE_MAGIC, VERSION, *self)

    @classmethod
    def unpack_from(cls, slot: memoryview) -> ResponseHeader:
        """Read and check a header; raises ProtocolError for one that is not ours."""
        magic, version, *rest = _RESPONSE.unpack_from(slot, 0)
        if magic != RESPONSE_MAGIC or version != VERSION:
            raise ProtocolError(
                f"response header: got magic {magic:#x} version {version}, "
                f"expected {RESPONSE_MAGIC:#x} version {VERSION}"
            )
        return cls(*rest)


def aligned(offset: int, to: int = ALIGN) -> int:
    """Return the first multiple of `to` at or after offset."""
    return -(-offset // to) * to


class RequestOffsets(NamedTuple):
    """Byte offsets of the parts of a request from the start of its slot; `end` is its size."""

    segments: int
    in_map: int
    out_map: int
    weights: int
    scales: int
    rows: int
    end: int


def request_offsets(
    num_segments: int, num_entries: int, flags: int, row_bytes: int, num_scales: int = 0
) -> RequestOffsets:
    """Return where each part of a request lies; absent parts take no space."""
    segments = HEADER_BYTES
    in_map = segments + num_segments * SEGMENT_BYTES
    out_map = aligned(in_map + 4 * num_entries * bool(flags & HAS_IN_MAP), 16)
    weights = aligned(out_map + 4 * num_entries * bool(flags & HAS_OUT_MAP), 16)
    scales = aligned(weights + 4 * num_entries * bool(flags & HAS_OUT_MAP), 16)
    rows = aligned(scales + 4 * num_scales)
    return RequestOffsets(segments, in_map, out_map, weights, scales, rows, rows + row_bytes)


def num_scales(num_rows: int, dtype: int) -> int:
    """Return the number of scales of so many rows of this dtype: one per row of E4M3, otherwise none."""
    return num_rows if dtype == E4M3 else 0


class ResponseOffsets(NamedTuple):
    """Byte offsets of the parts of a response from the start of its slot; `end` is its size."""

    scales: int
    rows: int
    end: int


def response_offsets(num_rows: int, width: int, dtype: int) -> ResponseOffsets:
    """Return where each part of a response lies."""
    rows = aligned(HEADER_BYTES + 4 * num_scales(num_rows, dtype))
    return ResponseOffsets(HEADER_BYTES, rows, rows + num_rows * width * ELEMENT_BYTES[dtype])


def signal(epoch: int, seq: int) -> int:
    """Return the 64-bit signal word of a step."""
    return (epoch & 0xFFFF) << 48 | seq


def signalled_seq(word: int, epoch: int) -> int:
    """Return the seq in a signal word, or 0 if the word belongs to another epoch."""
    return word & 0xFFFF_FFFF_FFFF if word >> 48 == epoch & 0xFFFF else 0
