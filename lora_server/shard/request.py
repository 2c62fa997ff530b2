"""Read a request from a slot, and write its response. All that a client wrote is checked before it is used.

A client may change its memory at any time: header and tables are copied first, then checked. Rows may change while the
kernel reads them, which harms only that client's own result.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lora_server.errors import LoraServerError, ProtocolError
from lora_server.spec import PROJECTIONS, ModelSpec, Site
from lora_server.wire import slot
from lora_server.wire.slot import RequestHeader, ResponseHeader

FEW_SEGMENTS = 48  # up to so many, a loop is faster than a dozen NumPy calls


@dataclass(frozen=True)
class Request:
    """One checked step but its rows (transport.rows); all tables are copies.

    A segment is (handle, expert, first entry, entries).
    """

    header: RequestHeader
    site: Site
    segments_S4: npt.NDArray[np.int32]
    in_map_N: npt.NDArray[np.int32] | None
    out_map_N: npt.NDArray[np.int32] | None
    weights_N: npt.NDArray[np.float32] | None

    @property
    def handles(self) -> frozenset[int]:
        """Return the handles of the adapters that the step names."""
        return _distinct(self.segments_S4[:, 0])


def read_header(memory: memoryview, client: int, epoch: int, seq: int, max_step_rows: int) -> RequestHeader:
    """Return the header of an expected step, fit for the scheduler; raises ProtocolError for any other step's."""
    header = RequestHeader.unpack_from(memory)
    if (header.client, header.epoch, header.seq) != (client, epoch, seq):
        raise ProtocolError(
            f"{header.where} epoch {header.epoch}: expected client {client} epoch {epoch} seq {seq} in this slot"
        )
    if header.step_class not in (slot.DECODE, slot.PREFILL):
        raise ProtocolError(f"{header.where}: got class {header.step_class}, expected {slot.DECODE} or {slot.PREFILL}")
    if header.num_segments > max_step_rows:  # before they are read
        raise ProtocolError(f"{header.where}: got {header.num_segments} segments, expected at most {max_step_rows}")
    return header


def handles(memory: memoryview, header: RequestHeader) -> frozenset[int]:
    """Return the handles that a step names; none if its tables do not fit the slot, which `read_request` refuses."""
    count = header.num_segments
    if slot.HEADER_BYTES + count * slot.SEGMENT_BYTES > len(memory):
        return frozenset()
    return _distinct(_segments(memory, slot.HEADER_BYTES, count)[:, 0])


def _distinct(handles_S: npt.NDArray[np.int32]) -> frozenset[int]:
    if len(handles_S) > FEW_SEGMENTS:  # clients sort by handle: one of each run will do
        return frozenset([*handles_S[np.flatnonzero(handles_S[1:] != handles_S[:-1])].tolist(), int(handles_S[-1])])
    return frozenset(handles_S.tolist())


def read_request(
    memory: memoryview, header: RequestHeader, spec: ModelSpec, max_step_rows: int, wire: slot.Wire = "exact"
) -> Request:
    """Return the rest of a step; raises ProtocolError naming what is out of range. Scales of rows become weights."""
    site = _site(header, spec)
    _check_dtype(header, wire)
    _check_counts(header, site, spec, max_step_rows)
    width = header.in_end - header.in_begin
    row_bytes = header.num_rows * width * slot.ELEMENT_BYTES[header.dtype]
    scales = slot.num_scales(header.num_rows, header.dtype)
    at = slot.request_offsets(header.num_segments, header.num_entries, header.flags, row_bytes, scales)
    if at.end > len(memory) or header.payload_bytes != at.end - slot.HEADER_BYTES:
        raise ProtocolError(
            f"{header.where}: got {header.payload_bytes} payload bytes, expected {at.end - slot.HEADER_BYTES} "
            f"in a slot of {len(memory)}"
        )
    segments_S4 = _segments(memory, at.segments, header.num_segments).copy()
    _check_segments(segments_S4, header, spec.experts_at(site))
    entries = header.num_entries
    in_map = out_map = weights = None
    if header.flags & slot.HAS_IN_MAP:
        in_map = _map(memory, at.in_map, entries, header.num_rows, header, "in_map")
    if header.flags & slot.HAS_OUT_MAP:
        out_map = _map(memory, at.out_map, entries, header.num_out_rows, header, "out_map")
        weights = np.frombuffer(memory, np.float32, entries, at.weights).copy()
    if scales:
        scale_N = _scales(memory, at.scales, header)[slice(None) if in_map is None else in_map]
        weights = scale_N if weights is None else weights * scale_N
    return Request(header, site, segments_S4, in_map, out_map, weights)


def _site(header: RequestHeader, spec: ModelSpec) -> Site:
    if header.layer >= spec.layers or header.projection >= len(PROJECTIONS):
        raise ProtocolError(f"{header.where}: expected a layer below {spec.layers} and one of {PROJECTIONS}")
    return Site(header.layer, PROJECTIONS[header.projection])


def _check_dtype(header: RequestHeader, wire: slot.Wire) -> None:
    if header.dtype >= len(slot.DTYPES):
        raise ProtocolError(f"{header.where}: got dtype {header.dtype}, expected one of {slot.DTYPES} by index")
    if (header.dtype == slot.E4M3) != (wire == "e4m3"):
        raise ProtocolError(
            f"{header.where}: got {slot.DTYPES[header.dtype]} rows, but this server's --wire is {wire}: both ends must "
            "be of a version that knows it; join again"
        )


def _check_counts(header: RequestHeader, site: Site, spec: ModelSpec, max_step_rows: int) -> None:
    if max(header.num_entries, header.num_rows, header.num_out_rows) > max_step_rows:
        raise ProtocolError(
            f"{header.where}: got {header.num_entries} entries, {header.num_rows} rows in, {header.num_out_rows} out, "
            f"expected at most {max_step_rows} (--max-step-rows); send smaller chunks"
        )
    if header.num_segments > header.num_entries or (header.num_entries and not header.num_segments):
        raise ProtocolError(f"{header.where}: got {header.num_segments} segments for {header.num_entries} entries")
    if not header.in_begin < header.in_end <= spec.in_width(site):
        raise ProtocolError(
            f"{header.where}: got input window [{header.in_begin}, {header.in_end}), "
            f"expected it within {spec.in_width(site)}"
        )
    previous = 0
    for begin, end in header.windows:  # in order and disjoint: together they fit the response slot
        if not previous <= begin < end <= spec.out_width(site):
            raise ProtocolError(
                f"{header.where}: got output window [{begin}, {end}), "
                f"expected it within [{previous}, {spec.out_width(site)})"
            )
        previous = end
    if not header.flags & slot.HAS_IN_MAP and header.num_rows != header.num_entries:
        raise ProtocolError(f"{header.where}: got {header.num_rows} rows, expected {header.num_entries} (no in_map)")
    if not header.flags & slot.HAS_OUT_MAP and header.num_out_rows != header.num_entries:
        raise ProtocolError(f"{header.where}: got {header.num_out_rows} rows out, expected {header.num_entries}")


def _check_segments(
    segments_S4: npt.NDArray[np.int32], header: RequestHeader, experts: int, few: int = FEW_SEGMENTS
) -> None:
    """The loop defines a valid segment, and names the first invalid one; many are first checked together."""
    if len(segments_S4) > few and _all_sound(segments_S4, header.num_entries, experts):
        return
    expected = 0
    for handle, expert, first, num_entries in segments_S4.tolist():
        if first != expected or num_entries < 1 or handle < 0 or not 0 <= expert < experts:
            raise ProtocolError(
                f"{header.where}: got segment (handle {handle}, expert {expert}, first {first}, "
                f"{num_entries} entries), expected it to start at {expected}, hold at least one entry "
                f"and name one of {experts} experts"
            )
        expected = first + num_entries
    if expected != header.num_entries:
        raise ProtocolError(f"{header.where}: segments hold {expected} entries, expected {header.num_entries}")


def _all_sound(segments_S4: npt.NDArray[np.int32], num_entries: int, experts: int) -> bool:
    expert_S, first_S, entries_S = segments_S4[:, 1], segments_S4[:, 2], segments_S4[:, 3]
    end_S = first_S + entries_S  # of two that are not negative: if it wraps it is, and nothing starts or ends there
    return bool(
        segments_S4.min() >= 0
        and entries_S.min() >= 1
        and expert_S.max() < experts
        and first_S[0] == 0
        and (first_S[1:] == end_S[:-1]).all()
        and end_S[-1] == num_entries
    )


def _segments(memory: memoryview, offset: int, count: int) -> npt.NDArray[np.int32]:
    """Return [S, 4] in the client's memory."""
    return np.frombuffer(memory, np.int32, 4 * count, offset).reshape(count, 4)


def _map(
    memory: memoryview, offset: int, entries: int, rows: int, header: RequestHeader, name: str
) -> npt.NDArray[np.int32]:
    mapped = np.frombuffer(memory, np.int32, entries, offset).copy()
    if entries and not (mapped.min() >= 0 and mapped.max() < rows):
        raise ProtocolError(f"{header.where}: {name} points outside [0, {rows})")
    return mapped


def _scales(memory: memoryview, offset: int, header: RequestHeader) -> npt.NDArray[np.float32]:
    scale_T = np.frombuffer(memory, np.float32, header.num_rows, offset).copy()
    bad = np.flatnonzero(~((scale_T >= 0.0) & (scale_T < np.inf)))  # neither is true of a NaN
    if len(bad):
        raise ProtocolError(
            f"{header.where}: got scale {scale_T[bad[0]]} of row {bad[0]}, expected it finite and from 0 on"
        )
    return scale_T


def write_response(memory: memoryview, header: RequestHeader, times_ns: tuple[int, int, int]) -> int:
    """Write the header of a response, after its rows were written; return the number of bytes to push."""
    end = slot.response_offsets(header.num_out_rows, header.out_width, header.dtype).end
    ResponseHeader(
        slot.OK,
        header.client,
        header.epoch,
        header.seq,
        header.slot,
        header.dtype,
        header.num_out_rows,
        header.out_width,
        end - slot.HEADER_BYTES,
        *times_ns,
    ).pack_into(memory)
    return end


def write_failure(memory: memoryview, client: int, epoch: int, seq: int, error: LoraServerError) -> int:
    """Write a typed error as the response; returns the bytes to push."""
    text = f"{error.code}\n{error}".encode()[: len(memory) - slot.HEADER_BYTES]
    ResponseHeader(slot.FAILED, client, epoch, seq, 0, 0, 0, 0, len(text), 0, 0, 0).pack_into(memory)
    memory[slot.HEADER_BYTES : slot.HEADER_BYTES + len(text)] = text
    return slot.HEADER_BYTES + len(text)
