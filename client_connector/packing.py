"""From tensors to the bytes of a slot, and from a response's bytes to tensors; the shard's side is
lora_server.shard.request.

Shapes: T rows of the engine's activations, M rows of them in one message, N entries of one message,
K input columns, O output columns; see routing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from client_connector.routing import Message
from lora_server.errors import LoraServerError, ProtocolError, rebuild
from lora_server.spec import PROJECTIONS, Site
from lora_server.transport.base import DeviceLink, Link
from lora_server.transport.session import Terms
from lora_server.wire import slot
from lora_server.wire.slot import RequestHeader, ResponseHeader

# runs (begin, end) of the whole model's columns
Columns = tuple[tuple[int, int], ...]
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class Window(NamedTuple):
    """The part of a site that a tensor-parallel engine worker has; 1 to 3 disjoint, ascending runs of output."""

    in_begin: int
    out: Columns


@dataclass(frozen=True, kw_only=True)
class Activations:
    """What an engine gives at a site, and what it wants back.

    x: one row per engine row [T, K]; or, with `by_entry`, one per entry (indexed by `Message.entries_N`).
    With `weights` (float32, indexed alike) the deltas come back weighted and summed per row of the
    message, otherwise one per entry. With a `window` x has its input columns only, and deltas its
    output columns side by side.
    """

    x: torch.Tensor
    decode: bool
    by_entry: bool = False
    weights: torch.Tensor | None = None
    window: Window | None = None


class Packer:
    """One site of one engine step: writes its messages into slots, reads the answers."""

    def __init__(self, terms: Terms, site: Site, given: Activations) -> None:
        self.terms, self.site, self.given = terms, site, given
        self.x = given.x.detach()
        self.window = given.window or Window(0, ((0, terms.spec.out_width(site)),))
        self.width = sum(end - begin for begin, end in self.window.out)

    # -- requests

    def write_request(self, link: Link, seq: int, message: Message, budget_us: int) -> int:
        """Header, segments, maps and rows in the slot of `seq`; returns the bytes to push. Raises ProtocolError."""
        memory, x = link.region.request(seq), self.x
        combine = self.given.weights is not None and message.map_N is not None
        shared = not self.given.by_entry and message.map_N is not None
        flags = slot.HAS_IN_MAP * shared | slot.HAS_OUT_MAP * combine
        sent = message.entries_N if self.given.by_entry else message.rows_M
        entries, width = len(message.entries_N), x.shape[1]
        at = slot.request_offsets(len(message.segments_S4), entries, flags, len(sent) * width * x.element_size())
        if at.end > len(memory):
            raise ProtocolError(f"{self.site}: got a message of {at.end} bytes, expected at most {len(memory)}")
        header = RequestHeader(
            step_class=slot.DECODE if self.given.decode else slot.PREFILL,
            flags=flags,
            client=self.terms.client,
            epoch=self.terms.epoch,
            seq=seq,
            slot=seq % link.region.layout.depth,
            layer=self.site.layer,
            projection=PROJECTIONS.index(self.site.projection),
            dtype=DTYPE_CODES[x.dtype],
            num_rows=len(sent),
            num_entries=entries,
            num_segments=len(message.segments_S4),
            num_out_rows=len(message.rows_M) if combine else entries,
            in_begin=self.window.in_begin,
            in_end=self.window.in_begin + width,
            windows=self.window.out,
            payload_bytes=at.end - slot.HEADER_BYTES,
            budget_us=budget_us,
            pushed_ns=time.monotonic_ns(),
        )
        header.pack_into(memory)
        if entries:
            segments = message.segments_S4.reshape(-1)
            np.frombuffer(memory, np.int32, len(segments), at.segments)[:] = segments
            self._write_maps(memory, at, flags, message)
            if isinstance(link, DeviceLink):
                link.put_rows(header, x, sent)
            else:
                rows = _view(memory, at.rows, len(sent) * width, x.dtype).view(len(sent), width)
                _gather(x, sent, rows)
        return at.end

    def _write_maps(self, memory: memoryview, at: slot.RequestOffsets, flags: int, message: Message) -> None:
        if message.map_N is None:
            return
        entries = len(message.entries_N)
        if flags & slot.HAS_IN_MAP:
            _view(memory, at.in_map, entries, torch.int32).copy_(message.map_N)
        if flags & slot.HAS_OUT_MAP and self.given.weights is not None:
            _view(memory, at.out_map, entries, torch.int32).copy_(message.map_N)
            _view(memory, at.weights, entries, torch.float32).copy_(self.given.weights[message.entries_N])

    # -- responses

    def read_response(self, link: Link, seq: int, message: Message) -> ResponseHeader:
        """The header of an answer, which must be the one to this message; raises ProtocolError."""
        header = ResponseHeader.unpack_from(link.region.response(seq))
        rows = len(message.rows_M) if self.given.weights is not None else len(message.entries_N)
        shape = (rows, self.width, DTYPE_CODES[self.x.dtype])
        expected = (self.terms.client, self.terms.epoch, seq, *shape)
        got = (header.client, header.epoch, header.seq, header.num_rows, header.width, header.dtype)
        if got[:3] != expected[:3] or (header.status == slot.OK and got != expected):
            raise ProtocolError(
                f"shard {link.shard} seq {seq}: got a response for (client, epoch, seq, rows, width, dtype) {got}, "
                f"expected {expected}"
            )
        return header

    def response_rows(self, link: Link, seq: int, header: ResponseHeader) -> torch.Tensor:
        """[rows or entries, O] where the activations are; host memory of the slot itself, which is used again."""
        if link.region.twin is not None:
            sent = RequestHeader.unpack_from(link.region.request(seq))
            return link.region.twin.response_rows(sent).to(self.x.device)
        count = header.num_rows * header.width
        rows = _view(link.region.response(seq), slot.HEADER_BYTES, count, self.x.dtype)
        return rows.view(header.num_rows, header.width).to(self.x.device)


def read_failure(link: Link, seq: int, header: ResponseHeader) -> LoraServerError:
    """What a shard answered instead of rows."""
    payload = link.region.response(seq)[slot.HEADER_BYTES : slot.HEADER_BYTES + header.payload_bytes]
    code, _, message = bytes(payload).decode(errors="replace").partition("\n")
    return rebuild(code, message)


def _gather(x_TK: torch.Tensor, rows_M: torch.Tensor, out_MK: torch.Tensor) -> None:
    if x_TK.device == out_MK.device:
        torch.index_select(x_TK, 0, rows_M, out=out_MK)
    else:
        out_MK.copy_(x_TK.index_select(0, rows_M.to(x_TK.device)))


def _view(memory: memoryview, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)
