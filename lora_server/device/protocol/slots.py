"""The memory of a link: a signal and `depth` slots at each end, in the memory of the GPU that reads them.

Slots are those of wire.slot; rows have at most 16 bits, so they take about half of what a region's of 32 bits do.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from typing_extensions import override

from kernels_cuda.launch import DTYPE_NAMES
from lora_server.device.protocol.gpu import Memory
from lora_server.device.protocol.layout import HERE
from lora_server.errors import ProtocolError
from lora_server.transport.rows import Rows, device_rows
from lora_server.wire import slot
from lora_server.wire.region import PAGE_BYTES, RegionLayout
from lora_server.wire.slot import RequestHeader

SIGNAL_BYTES = 8


class SlotSizes(NamedTuple):
    """Sizes of one link. The signal is at the start of each end's memory; slots begin a page behind it."""

    depth: int
    request: int
    response: int

    @classmethod
    def of(cls, layout: RegionLayout) -> SlotSizes:
        """Return slots for every step that the region's hold, in elements half as large if they are of 32 bits."""
        if layout.widest != slot.DTYPES.index("float32"):
            return cls(layout.depth, layout.request_bytes, layout.response_bytes)
        tables = slot.aligned(layout.table_bytes or slot.HEADER_BYTES)
        request = tables + (layout.request_bytes - tables) // 2 + slot.ALIGN
        response = slot.HEADER_BYTES + (layout.response_bytes - slot.HEADER_BYTES) // 2 + slot.ALIGN
        return cls(layout.depth, slot.aligned(request, PAGE_BYTES), slot.aligned(response, PAGE_BYTES))

    @property
    def requests(self) -> int:
        """Bytes of the shard's end."""
        return PAGE_BYTES + self.depth * self.request

    @property
    def responses(self) -> int:
        """Bytes of the client's end."""
        return PAGE_BYTES + self.depth * self.response

    def request_at(self, seq: int) -> int:
        """Return the offset of a step's request in the shard's end."""
        return PAGE_BYTES + seq % self.depth * self.request

    def response_at(self, seq: int) -> int:
        """Return the offset of a step's response in the client's end."""
        return PAGE_BYTES + seq % self.depth * self.response

    def words(self, epoch: int, client: int, requests: int, responses: int, pe: int = HERE) -> dict[str, int]:
        """Return the words of layout.LINK and CLIENT that name the client and both ends' memory."""
        return {
            "epoch": epoch,
            "client": client,
            "depth": self.depth,
            "request_signal": requests,
            "request_slots": requests + PAGE_BYTES,
            "request_bytes": self.request,
            "response_signal": responses,
            "response_slots": responses + PAGE_BYTES,
            "response_bytes": self.response,
            "pe": pe,
        }


class LinkMemory(NamedTuple):
    """The memory of both ends of a link, as one process's GPU sees it."""

    sizes: SlotSizes
    requests: Memory
    responses: Memory

    def request_at(self, seq: int) -> int:
        """Return the address of a step's request."""
        return self.requests.address + self.sizes.request_at(seq)

    def response_at(self, seq: int) -> int:
        """Return the address of a step's response."""
        return self.responses.address + self.sizes.response_at(seq)


class GpuRows(Rows):
    """Rows in a link's slots; see Rows. `requests`, `responses`: uint8, an end's memory each."""

    def __init__(self, requests: torch.Tensor, responses: torch.Tensor, sizes: SlotSizes) -> None:
        self._requests, self._responses, self._sizes = requests, responses, sizes

    @override
    def request(self, header: RequestHeader) -> torch.Tensor:
        """Raises ProtocolError for rows of 32 bits."""
        rows, width = header.num_rows, header.in_end - header.in_begin
        end = self._sizes.request_at(header.seq) + slot.HEADER_BYTES + header.payload_bytes
        return device_rows(self._requests, end - rows * width * slot.ELEMENT_BYTES[header.dtype], rows, width, header)

    @override
    def response(self, header: RequestHeader) -> torch.Tensor:
        """Raises as `request` does."""
        rows, width = header.num_out_rows, header.out_width
        begin = self._sizes.response_at(header.seq) + slot.response_offsets(rows, width, header.dtype).rows
        return device_rows(self._responses, begin, rows, width, header)

    @override
    def response_scales(self, header: RequestHeader) -> torch.Tensor:
        begin = self._sizes.response_at(header.seq) + slot.HEADER_BYTES
        return self._responses[begin : begin + 4 * header.num_out_rows].view(torch.float32)


def check_activations(header: RequestHeader, x_TK: torch.Tensor) -> None:
    """Raises ProtocolError for what no kernel puts: rows of 32 bits, also where they would travel in 8."""
    if x_TK.dtype not in DTYPE_NAMES:
        dtype = str(x_TK.dtype).removeprefix("torch.")
        raise ProtocolError(
            f"{header.where}: got {dtype} rows for a GPU, expected bfloat16 or float16; run the engine in one of them, "
            "or attach with transport='shm'"
        )
