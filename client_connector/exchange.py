"""One site of one engine step on its way to the shards and back: fill slots, push, wait, check, hand out."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from client_connector.routing import Message
from lora_server.errors import LoraServerError, ProtocolError, StepError, rebuild
from lora_server.spec import PROJECTIONS, Site
from lora_server.transport.base import DeviceLink, Link
from lora_server.wire import slot
from lora_server.wire.slot import RequestHeader, ResponseHeader

if TYPE_CHECKING:
    from client_connector.client import Client

# runs (begin, end) of the whole model's columns
Columns = tuple[tuple[int, int], ...]


class Window(NamedTuple):
    """The part of a site that a tensor-parallel engine worker has; 1 to 3 disjoint, ascending runs of output."""

    in_begin: int
    out: Columns


DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@dataclass(frozen=True)
class StepTimes:
    """When things happened to one message; nanoseconds of time.monotonic_ns(), per host."""

    site: Site
    decode: bool
    shard: int
    entries: int
    pushed_ns: int
    received_ns: int  # by the shard
    started_ns: int
    done_ns: int
    waited_ns: int  # the client began to wait
    arrived_ns: int  # the client saw the response


@dataclass(frozen=True)
class GemmTimes:
    """The engine's own GEMM beside an exchange; nanoseconds of time.monotonic_ns()."""

    site: Site
    decode: bool
    began_ns: int
    ended_ns: int


class Exchange:
    """One site of one engine step, on its way."""

    def __init__(
        self,
        client: Client,
        site: Site,
        messages: Sequence[Message],
        x: torch.Tensor,
        decode: bool,
        by_entry: bool,
        weights: torch.Tensor | None,
        window: Window | None = None,
    ) -> None:
        self._window = window or Window(0, ((0, client.terms.spec.out_width(site)),))
        self._width = sum(end - begin for begin, end in self._window.out)
        self._client, self.site, self._x = client, site, x
        self._by_entry, self._weights, self._decode = by_entry, weights, decode
        self._queues: dict[int, deque[Message]] = {}
        for message in messages:
            self._queues.setdefault(message.shard, deque()).append(message)
        self._flying: deque[tuple[int, int, Message, int]] = deque()  # shard, seq, message, pushed_ns
        self._deadline = time.monotonic() + client.timeout_seconds

    def begin(self) -> None:
        """Consume what a failed exchange left behind, then push up to the depth of each shard's slots."""
        with _breaks(self._client):
            for shard in self._queues:
                self._drain(shard)
            for shard, queue in self._queues.items():
                depth = self._client.session.links[shard].region.layout.depth
                for _ in range(min(depth, len(queue))):
                    self._push(shard, queue.popleft())

    def _drain(self, shard: int) -> None:
        client = self._client
        if client.consumed[shard] < client.pushed[shard]:
            client.session.links[shard].wait(client.pushed[shard], self._deadline)
            client.consumed[shard] = client.pushed[shard]

    def finish(self, add: Callable[[Message, torch.Tensor], None]) -> None:
        """Wait for every delta and hand it to `add`, which must copy what it keeps.

        Raises the error that a shard answered with, or StepError (which breaks the session).
        """
        while self._flying:
            shard, seq, message, pushed_ns = self._flying.popleft()
            link, waited_ns = self._client.session.links[shard], time.monotonic_ns()
            with _breaks(self._client):
                link.wait(seq, self._deadline)
                header = self._check(link, seq, message)
            self._client.consumed[shard] = seq
            if header.status != slot.OK:
                raise self._failure(link, seq, header)
            if len(message.rows_M):
                with _breaks(self._client):
                    add(message, self._delta(link, seq, header))
            self._report(message, header, pushed_ns, waited_ns)
            if self._queues[shard]:
                with _breaks(self._client):
                    self._push(shard, self._queues[shard].popleft())

    def probe(self, handle: int) -> None:
        """One row of zeros through one adapter at this site, on every shard that has a part of it; raises its error."""
        placement, layer = self._client.placement, self.site.layer
        experts = {shard: placement.experts(self.site, shard) for shard in placement.layout.stage_shards(layer)}
        row = torch.zeros(1, dtype=torch.int64)
        messages = [
            Message(shard, [(handle, own[0], 0, 1)], row, None, row) for shard, own in experts.items() if len(own)
        ]
        x = torch.zeros_like(self._x[:1])
        probe = self._client.start(self.site, messages, x, decode=True, window=self._window)
        probe.finish(lambda message, delta: None)

    def _failure(self, link: Link, seq: int, header: ResponseHeader) -> LoraServerError:
        """What the shard answered. If chunks stay unsent, a leader's stage no longer counts alike: join anew."""
        payload = link.region.response(seq)[slot.HEADER_BYTES : slot.HEADER_BYTES + header.payload_bytes]
        code, _, message = bytes(payload).decode(errors="replace").partition("\n")
        error = rebuild(code, message)
        if self._client.terms.coordination == "leader" and any(self._queues.values()):
            self._client.broken = error
        return error

    def _push(self, shard: int, message: Message) -> None:
        client, link = self._client, self._client.session.links[shard]
        seq = client.pushed[shard] + 1
        pushed_ns = time.monotonic_ns()
        nbytes = self._fill(link, seq, message, pushed_ns)
        client.pushed[shard] = seq  # first: whatever happens in between, a seq is never used twice
        link.push(seq, nbytes)
        self._flying.append((shard, seq, message, pushed_ns))

    def _fill(self, link: Link, seq: int, message: Message, pushed_ns: int) -> int:
        memory, terms = link.region.request(seq), self._client.terms
        combine = self._weights is not None and message.map_N is not None
        shared = not self._by_entry and message.map_N is not None
        flags = slot.HAS_IN_MAP * shared | slot.HAS_OUT_MAP * combine
        sent = message.entries_N if self._by_entry else message.rows_M
        entries, width = len(message.entries_N), self._x.shape[1]
        at = slot.request_offsets(len(message.segments), entries, flags, len(sent) * width * self._x.element_size())
        if at.end > len(memory):
            raise ProtocolError(f"{self.site}: got a message of {at.end} bytes, expected at most {len(memory)}")
        header = RequestHeader(
            step_class=slot.DECODE if self._decode else slot.PREFILL,
            flags=flags,
            client=terms.client,
            epoch=terms.epoch,
            seq=seq,
            slot=seq % link.region.layout.depth,
            layer=self.site.layer,
            projection=PROJECTIONS.index(self.site.projection),
            dtype=DTYPE_CODES[self._x.dtype],
            num_rows=len(sent),
            num_entries=entries,
            num_segments=len(message.segments),
            num_out_rows=len(message.rows_M) if combine else entries,
            in_begin=self._window.in_begin,
            in_end=self._window.in_begin + width,
            windows=self._window.out,
            payload_bytes=at.end - slot.HEADER_BYTES,
            budget_us=max(0, round((self._deadline - time.monotonic()) * 1e6)),
            pushed_ns=pushed_ns,
        )
        header.pack_into(memory)
        if entries:
            _view(memory, at.segments, len(message.segments) * 4, torch.int32).copy_(
                torch.tensor(message.segments, dtype=torch.int32).view(-1)
            )
            self._fill_maps(memory, at, flags, message)
            if isinstance(link, DeviceLink):
                link.put_rows(header, self._x, sent)
            else:
                rows = _view(memory, at.rows, len(sent) * width, self._x.dtype).view(len(sent), width)
                _gather(self._x, sent, rows)
        return at.end

    def _fill_maps(self, memory: memoryview, at: slot.RequestOffsets, flags: int, message: Message) -> None:
        if message.map_N is None:
            return
        entries = len(message.entries_N)
        if flags & slot.HAS_IN_MAP:
            _view(memory, at.in_map, entries, torch.int32).copy_(message.map_N)
        if flags & slot.HAS_OUT_MAP and self._weights is not None:
            _view(memory, at.out_map, entries, torch.int32).copy_(message.map_N)
            _view(memory, at.weights, entries, torch.float32).copy_(self._weights[message.entries_N])

    def _check(self, link: Link, seq: int, message: Message) -> ResponseHeader:
        header = ResponseHeader.unpack_from(link.region.response(seq))
        terms = self._client.terms
        rows = len(message.rows_M) if self._weights is not None else len(message.entries_N)
        shape = (rows, self._width, DTYPE_CODES[self._x.dtype])
        expected = (terms.client, terms.epoch, seq, *shape)
        got = (header.client, header.epoch, header.seq, header.num_rows, header.width, header.dtype)
        if got[:3] != expected[:3] or (header.status == slot.OK and got != expected):
            raise ProtocolError(
                f"shard {link.shard} seq {seq}: got a response for (client, epoch, seq, rows, width, dtype) {got}, "
                f"expected {expected}"
            )
        return header

    def _delta(self, link: Link, seq: int, header: ResponseHeader) -> torch.Tensor:
        if link.region.twin is not None:
            sent = RequestHeader.unpack_from(link.region.request(seq))
            return link.region.twin.response_rows(sent).to(self._x.device)
        count = header.num_rows * header.width
        rows = _view(link.region.response(seq), slot.HEADER_BYTES, count, self._x.dtype)
        return rows.view(header.num_rows, header.width).to(self._x.device)

    def _report(self, message: Message, header: ResponseHeader, pushed_ns: int, waited_ns: int) -> None:
        if self._client.observe is not None:
            self._client.observe(
                StepTimes(
                    self.site,
                    self._decode,
                    message.shard,
                    len(message.entries_N),
                    pushed_ns,
                    header.received_ns,
                    header.started_ns,
                    header.done_ns,
                    waited_ns,
                    time.monotonic_ns(),
                )
            )


class _breaks:  # noqa: N801  (reads as a statement)
    """Any error inside means that client and shards may no longer agree on seqs: the session is over."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, StepError):
            self._client.broken = error
        elif error is not None:
            self._client.broken = StepError(
                f"an earlier step was interrupted by {error!r}; the next request joins anew"
            )


def _gather(x_TK: torch.Tensor, rows_M: torch.Tensor, out_MK: torch.Tensor) -> None:
    if x_TK.device == out_MK.device:
        torch.index_select(x_TK, 0, rows_M, out=out_MK)
    else:
        out_MK.copy_(x_TK.index_select(0, rows_M.to(x_TK.device)))


def _view(memory: memoryview, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)
