"""Packs tensors into the bytes of a slot and reads responses; the shard's side is
lora_server.shard.request.

Shapes: T rows of the engine's activations, M rows of them in one message, N entries of one message,
K input columns, O output columns; see routing.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from typing_extensions import override

from client_connector.routing import Message
from lora_server.errors import LoraServerError, ProtocolError, rebuild
from lora_server.spec import PROJECTIONS, Site
from lora_server.transport.base import Link
from lora_server.wire import slot
from lora_server.wire.slot import RequestHeader, ResponseHeader
from lora_server.wire.terms import Terms

# runs (begin, end) of the whole model's columns
Columns = tuple[tuple[int, int], ...]
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class Window(NamedTuple):
    """The part of a site that a tensor-parallel engine worker has; 1 to 3 disjoint, ascending runs of output."""

    in_begin: int
    out: Columns


@dataclass(frozen=True, kw_only=True)
class Activations:
    """The input of an engine at a site, and the form of the deltas.

    x: one row per engine row [T, K]; or, with `by_pair`, one per pair (indexed by `Message.pairs_P`).
    With `weights` (float32, indexed alike) the deltas come back weighted and summed per row of the
    message, otherwise one per pair. With a `window` x has its input columns only, and deltas its
    output columns side by side. `waits`: the shard may hold the step until weights that are loading are there;
    otherwise it soon refuses a step without weights.
    """

    x: torch.Tensor
    decode: bool
    by_pair: bool = False
    weights: torch.Tensor | None = None
    window: Window | None = None
    waits: bool = True


M = TypeVar("M")


def code_of(terms: Terms, dtype: torch.dtype) -> int:
    """Return the dtype code of rows on the wire, for an engine's rows of this dtype."""
    return slot.E4M3 if terms.wire == "e4m3" else DTYPE_CODES[dtype]


class Packer(ABC, Generic[M]):
    """One site of one engine step: writes its messages into slots, reads the answers."""

    def __init__(self, terms: Terms, site: Site, given: Activations) -> None:
        self.terms, self.site, self.given = terms, site, given
        self.x = given.x.detach()
        self.window = given.window or Window(0, ((0, terms.spec.out_width(site)),))
        self.dtype = code_of(terms, self.x.dtype)

    @abstractmethod
    def write_request(self, link: Link, seq: int, message: M, budget_us: int) -> RequestHeader:
        """Write the step `seq`, but not its signal; return the header. Raises ProtocolError."""

    @abstractmethod
    def settled(self, link: Link, message: M, sent: RequestHeader) -> tuple[Message, RequestHeader]:
        """Return a message and its header as they were sent, once the answer is there."""

    def header(
        self,
        link: Link,
        seq: int,
        flags: int,
        budget_us: int,
        counts: tuple[int, int, int, int] = (0, 0, 0, 0),
        payload_bytes: int = 0,
    ) -> RequestHeader:
        """Make a message's header; `counts`: rows, entries, segments, rows out."""
        rows, entries, segments, out_rows = counts
        return RequestHeader(
            step_class=slot.DECODE if self.given.decode else slot.PREFILL,
            flags=flags | slot.WAITS_FOR_WEIGHTS * self.given.waits,
            client=self.terms.client,
            epoch=self.terms.epoch,
            seq=seq,
            slot=seq % link.region.layout.depth,
            layer=self.site.layer,
            projection=PROJECTIONS.index(self.site.projection),
            dtype=self.dtype,
            num_rows=rows,
            num_entries=entries,
            num_segments=segments,
            num_out_rows=out_rows,
            in_begin=self.window.in_begin,
            in_end=self.window.in_begin + self.x.shape[1],
            windows=self.window.out,
            payload_bytes=payload_bytes,
            budget_us=budget_us,
            pushed_ns=time.monotonic_ns(),
        )

    def read_response(self, link: Link, sent: RequestHeader) -> ResponseHeader:
        """Read the header of the answer to this request; raises ProtocolError if it answers another."""
        header = ResponseHeader.unpack_from(link.region.response(sent.seq))
        expected = (sent.client, sent.epoch, sent.seq, sent.num_out_rows, sent.out_width, sent.dtype)
        got = (header.client, header.epoch, header.seq, header.num_rows, header.width, header.dtype)
        if got[:3] != expected[:3] or (header.status == slot.OK and got != expected):
            raise ProtocolError(
                f"shard {link.shard} seq {sent.seq}: got a response for (client, epoch, seq, rows, width, dtype) "
                f"{got}, expected {expected}"
            )
        return header


class HostPacker(Packer[Message]):
    """Packs messages that were routed on the host."""

    @override
    def write_request(self, link: Link, seq: int, message: Message, budget_us: int) -> RequestHeader:
        """Write header, segments, maps and rows."""
        memory, x, given = link.region.request(seq), self.x, self.given
        sent, in_map_N = (message.pairs_P, message.pair_N) if given.by_pair else (message.rows_M, message.map_N)
        combine = given.weights is not None and message.map_N is not None
        out_rows, out_map_N = (message.rows_M, message.map_N) if combine else (message.pairs_P, message.pair_N)
        flags = slot.HAS_IN_MAP * (in_map_N is not None) | slot.HAS_OUT_MAP * (out_map_N is not None)
        rows = sent.shape[0]  # len() of a tensor is a function of Python's
        entries = (message.pairs_P if message.pair_N is None else message.pair_N).shape[0]
        row_bytes, scales = x.shape[1] * slot.ELEMENT_BYTES[self.dtype], slot.num_scales(rows, self.dtype)
        at = slot.request_offsets(len(message.segments_S4), entries, flags, rows * row_bytes, scales)
        if at.end > len(memory):
            raise ProtocolError(f"{self.site}: got a message of {at.end} bytes, expected at most {len(memory)}")
        counts = (rows, entries, len(message.segments_S4), out_rows.shape[0])
        header = self.header(link, seq, flags, budget_us, counts, at.end - slot.HEADER_BYTES)
        header.pack_into(memory)
        if entries:
            segments = message.segments_S4.reshape(-1)
            np.frombuffer(memory, np.int32, len(segments), at.segments)[:] = segments
            if in_map_N is not None:
                _view(memory, at.in_map, entries, torch.int32).copy_(in_map_N)
            if out_map_N is not None:
                _view(memory, at.out_map, entries, torch.int32).copy_(out_map_N)
                _view(memory, at.weights, entries, torch.float32).copy_(self._weights(message))
            link.put_rows(header, x, sent)
        return header

    def _weights(self, message: Message) -> torch.Tensor:
        """Return the weight of each entry: of its pair, times that of its row segment."""
        if self.given.weights is None:
            assert message.weights_N is not None
            return message.weights_N
        weights_P = self.given.weights[message.pairs_P]
        return weights_P if message.weights_N is None else weights_P[message.pair_N] * message.weights_N

    @override
    def settled(self, link: Link, message: Message, sent: RequestHeader) -> tuple[Message, RequestHeader]:
        return message, sent


def read_failure(link: Link, seq: int, header: ResponseHeader) -> LoraServerError:
    """Read the error that a shard answered with."""
    payload = link.region.response(seq)[slot.HEADER_BYTES : slot.HEADER_BYTES + header.payload_bytes]
    code, _, message = bytes(payload).decode(errors="replace").partition("\n")
    return rebuild(code, message)


def _view(memory: memoryview, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)
