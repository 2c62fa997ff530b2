"""Rows of a step: in the slots themselves, or in a *mirror* of them in device memory.

Either end of a region (transport.base: Link, Connection) asks its `rows` and gets tensors to read or to fill; which
memory they are views of is the transport's business. Headers, segments and maps, which a host reads, always
stay in the slots.

Shapes: T rows sent of K columns, U rows returned of O columns; see wire.slot.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from typing_extensions import override

from lora_server.errors import ProtocolError
from lora_server.transport import e4m3
from lora_server.wire import slot
from lora_server.wire.region import PAGE_BYTES, Region, RegionLayout
from lora_server.wire.slot import RequestHeader

TORCH_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)


class Rows(ABC):
    """The rows of one region. A caller has checked the header's counts against the slots; they are trusted here."""

    @abstractmethod
    def request(self, header: RequestHeader) -> torch.Tensor:
        """Return a request's rows [T, K] in the header's dtype; those of e4m3 without their scales."""

    @abstractmethod
    def response(self, header: RequestHeader) -> torch.Tensor:
        """Return the rows [U, O] of the response to a request, in the header's dtype."""

    def fill(self, header: RequestHeader, x_TK: torch.Tensor, rows_M: torch.Tensor) -> None:
        """Copy rows `rows_M` (int64) of x, on any device, into a request."""
        out_MK = self.request(header)
        if x_TK.device == out_MK.device:
            torch.index_select(x_TK, 0, rows_M, out=out_MK)
        else:
            out_MK.copy_(x_TK.index_select(0, rows_M.to(x_TK.device)))

    def answer(self, header: RequestHeader, delta_UO: torch.Tensor) -> None:
        """Copy deltas, on any device, into the response to a request."""
        if header.dtype == slot.E4M3:
            e4m3.quantise(delta_UO, self.response(header), self.response_scales(header))
        else:
            self.response(header).copy_(delta_UO, non_blocking=True)

    def deltas(self, header: RequestHeader, like: torch.Tensor) -> torch.Tensor:
        """Return the response's rows [U, O] with the device and dtype of `like`: a view if they have these already."""
        later = like.device.type != "cpu"  # a GPU reads behind the copy, a host at once
        if header.dtype != slot.E4M3:
            return self.response(header).to(like, non_blocking=later)
        parts = self.response(header), self.response_scales(header)
        codes_UO, scales_U = (part.to(like.device, non_blocking=later) for part in parts)
        return e4m3.expand(codes_UO, scales_U).to(like.dtype)

    def response_scales(self, header: RequestHeader) -> torch.Tensor:
        """Return the scales [U], float32, of a response of e4m3. Raises ProtocolError for rows without scales."""
        raise ProtocolError(f"{header.where}: got e4m3 rows, expected exact ones")


class SlotRows(Rows):
    """Rows in the region's slots, in host memory."""

    def __init__(self, region: Region) -> None:
        self._region = region

    def request(self, header: RequestHeader) -> torch.Tensor:
        """Return a request's rows, the last part of its slot."""
        rows, width = header.num_rows, header.in_end - header.in_begin
        nbytes = rows * width * slot.ELEMENT_BYTES[header.dtype]
        offset = slot.HEADER_BYTES + header.payload_bytes - nbytes
        return _host(self._region.request(header.seq), offset, rows, width, header.dtype)

    def response(self, header: RequestHeader) -> torch.Tensor:
        """Return a response's rows, the last part of its slot."""
        memory, rows, width = self._region.response(header.seq), header.num_out_rows, header.out_width
        return _host(memory, slot.response_offsets(rows, width, header.dtype).rows, rows, width, header.dtype)

    @override
    def fill(self, header: RequestHeader, x_TK: torch.Tensor, rows_M: torch.Tensor) -> None:
        if header.dtype != slot.E4M3:
            super().fill(header, x_TK, rows_M)
            return
        x_MK = x_TK.index_select(0, rows_M.to(x_TK.device))
        e4m3.quantise(x_MK, self.request(header), self.request_scales(header))

    def request_scales(self, header: RequestHeader) -> torch.Tensor:
        """Return the scales [T], float32, of a request of e4m3; unchecked."""
        counts, rows = (header.num_segments, header.num_entries, header.flags), header.num_rows
        return _scales(self._region.request(header.seq), slot.request_offsets(*counts, 0, rows).scales, rows)

    @override
    def response_scales(self, header: RequestHeader) -> torch.Tensor:
        return _scales(self._region.response(header.seq), slot.HEADER_BYTES, header.num_out_rows)


def _scales(memory: memoryview, offset: int, rows: int) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.float32, count=rows, offset=offset) if rows else torch.empty(0)


def _host(memory: memoryview, offset: int, rows: int, width: int, dtype: int) -> torch.Tensor:
    if rows == 0:
        return torch.empty(0, width, dtype=TORCH_DTYPES[dtype])
    flat = torch.frombuffer(memory, dtype=TORCH_DTYPES[dtype], count=rows * width, offset=offset)
    return flat.view(rows, width)


class MirrorRows(Rows):
    """Rows in a mirror, in device memory, which has an area per slot. `memory`: uint8 [mirror_bytes].

    Scales of e4m3: a response's lie before its rows, a request's are a table in the region.
    """

    def __init__(self, memory: torch.Tensor, layout: RegionLayout) -> None:
        """Raises ProtocolError if the memory is too small."""
        if memory.nbytes < mirror_bytes(layout):
            raise ProtocolError(f"mirror: got {memory.nbytes} bytes, expected {mirror_bytes(layout)} for {layout}")
        self.memory, self._depth = memory, layout.depth
        self._request_bytes, self._response_bytes = _slot_bytes(layout)

    def request(self, header: RequestHeader) -> torch.Tensor:
        """Return a request's rows; raises ProtocolError for rows of 32 bits."""
        begin = header.seq % self._depth * self._request_bytes
        return device_rows(self.memory, begin, header.num_rows, header.in_end - header.in_begin, header)

    def request_address(self, header: RequestHeader) -> int:
        """Return where a request's rows begin, even before their number is known. Raises as `request` does."""
        return self.request(header._replace(num_rows=1)).data_ptr()

    def response(self, header: RequestHeader) -> torch.Tensor:
        """Return a response's rows; raises ProtocolError for rows of 32 bits."""
        rows, width = header.num_out_rows, header.out_width
        behind = slot.response_offsets(rows, width, header.dtype).rows - slot.HEADER_BYTES
        return device_rows(self.memory, self._response_begin(header) + behind, rows, width, header)

    @override
    def response_scales(self, header: RequestHeader) -> torch.Tensor:
        begin = self._response_begin(header)
        return self.memory[begin : begin + 4 * header.num_out_rows].view(torch.float32)

    def _response_begin(self, header: RequestHeader) -> int:
        return self._depth * self._request_bytes + header.seq % self._depth * self._response_bytes


def device_rows(memory: torch.Tensor, begin: int, rows: int, width: int, header: RequestHeader) -> torch.Tensor:
    """Return rows that begin at a byte of device memory; raises ProtocolError for rows of 32 bits."""
    each = slot.ELEMENT_BYTES[header.dtype]
    if each > 2:
        raise ProtocolError(
            f"{header.where}: got {slot.DTYPES[header.dtype]} rows in GPU memory, expected bfloat16 or float16; "
            "run the engine in one of them, or attach with transport='shm'"
        )
    return memory[begin : begin + each * rows * width].view(TORCH_DTYPES[header.dtype]).view(rows, width)


def _slot_bytes(layout: RegionLayout) -> tuple[int, int]:
    """Return the bytes of a request's and of a response's area in a mirror: half of a slot's, which has room for rows
    of 32 bits, that a mirror has none of."""
    assert PAGE_BYTES % 1024 == 0  # slots are whole pages: their halves are aligned for every copy
    parts = 2 if layout.widest == slot.DTYPES.index("float32") else 1
    return layout.request_bytes // parts, layout.response_bytes // parts


def mirror_bytes(layout: RegionLayout) -> int:
    """Return the bytes of a region's mirror."""
    return layout.depth * sum(_slot_bytes(layout))
