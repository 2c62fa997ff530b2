"""The rows of a region's slots, again, in device memory: same offsets, so that one layout describes both.

Headers, segment tables and maps, which a host reads, stay in the region; rows and deltas, which only
GPUs touch, lie in its twin and never visit the host.
"""

from __future__ import annotations

import torch

from lora_server.errors import ProtocolError
from lora_server.wire import slot
from lora_server.wire.region import PAGE_BYTES, RegionLayout
from lora_server.wire.slot import RequestHeader

TORCH_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class DeviceTwin:
    """Views over `memory`: uint8 [layout.nbytes] on the shard's device."""

    def __init__(self, memory: torch.Tensor, layout: RegionLayout) -> None:
        """Raises ProtocolError if the memory is too small."""
        if memory.nbytes < layout.nbytes:
            raise ProtocolError(f"twin: got {memory.nbytes} bytes, expected {layout.nbytes} for {layout}")
        self.memory, self.layout = memory, layout

    def request_rows(self, header: RequestHeader) -> torch.Tensor:
        """[num_rows, in_end - in_begin], the header's dtype."""
        width = header.in_end - header.in_begin
        nbytes = header.num_rows * width * slot.ELEMENT_BYTES[header.dtype]
        at = slot.request_offsets(header.num_segments, header.num_entries, header.flags, nbytes).rows
        base = PAGE_BYTES + header.seq % self.layout.depth * self.layout.request_bytes
        return self._rows(base + at, header.num_rows, width, header.dtype)

    def response_rows(self, header: RequestHeader) -> torch.Tensor:
        """[num_out_rows, out_width], the request header's dtype."""
        layout = self.layout
        base = PAGE_BYTES + layout.depth * layout.request_bytes + header.seq % layout.depth * layout.response_bytes
        return self._rows(base + slot.HEADER_BYTES, header.num_out_rows, header.out_width, header.dtype)

    def _rows(self, begin: int, rows: int, width: int, dtype: int) -> torch.Tensor:
        nbytes = rows * width * slot.ELEMENT_BYTES[dtype]
        return self.memory[begin : begin + nbytes].view(TORCH_DTYPES[dtype]).view(rows, width)
