"""One site of one engine step on its way to the shards and back: push, wait, check, hand out."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from client_connector.packing import Packer, read_failure
from client_connector.routing import Message
from lora_server.errors import LoraServerError, StepError
from lora_server.spec import Site
from lora_server.transport.base import Link
from lora_server.wire import slot
from lora_server.wire.slot import RequestHeader, ResponseHeader


@dataclass(frozen=True)
class StepTimes:
    """Times of one message; nanoseconds of time.monotonic_ns(), per host."""

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


class Lane:
    """A link to one shard, with the sequence numbers of the steps on it. Used by one thread at a time.

    As a context manager: an error inside means that client and shard may no longer agree on seqs, so
    the lane is broken, and with it the session.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self.shard = link.shard
        self.depth = link.region.layout.depth
        self.pushed = 0
        self.consumed = 0  # seq of the newest response that was consumed
        self.broken: LoraServerError | None = None

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self.broken is None:
            self.broken = (
                error
                if isinstance(error, StepError)
                else StepError(f"an earlier step was interrupted by {error!r}; the next request joins anew")
            )

    def drain(self, deadline: float) -> None:
        """Consume what a failed exchange left behind."""
        if self.consumed < self.pushed:
            self.link.wait(self.pushed, deadline)
            self.consumed = self.pushed


class _Flying(NamedTuple):
    lane: Lane
    message: Any
    sent: RequestHeader


class Started:
    """A site's step under way, between a pass's `start_dense` or `start_experts` and the call that ends it."""


@dataclass
class Exchange(Started):
    """The messages of one site, in the order of each lane; `deadline` is time.monotonic()."""

    lanes: Sequence[Lane]
    packer: Packer[Any]
    deadline: float
    observe: Callable[[StepTimes], None] | None = None
    _queues: dict[int, deque[Any]] = field(default_factory=dict)
    _flying: deque[_Flying] = field(default_factory=deque)

    @property
    def site(self) -> Site:
        """The site in the model."""
        return self.packer.site

    def queue(self, messages: Sequence[Any]) -> list[Lane]:
        """Queue messages for the packer; return the lanes to push on, each once per free slot.

        Consumes answers that a failed exchange left behind.
        """
        for message in messages:
            self._queues.setdefault(message.shard, deque()).append(message)
        ready = []
        for shard, waiting in self._queues.items():
            lane = self.lanes[shard]
            with lane:
                lane.drain(self.deadline)
            ready += [lane] * min(lane.depth, len(waiting))
        return ready

    def push(self, lane: Lane) -> None:
        """Push the lane's next message."""
        with lane:
            message, budget_us = self._queues[lane.shard].popleft(), round((self.deadline - time.monotonic()) * 1e6)
            sent = self.packer.write_request(lane.link, lane.pushed + 1, message, max(0, budget_us))
            lane.pushed = sent.seq  # first: whatever happens in between, a seq is never used twice
            lane.link.push(sent.seq, slot.HEADER_BYTES + sent.payload_bytes)
            self._flying.append(_Flying(lane, message, sent))

    def finish(self, add: Callable[[Message, torch.Tensor], None]) -> None:
        """Wait for every delta and pass it to `add`, which must copy what it keeps.

        Raises the error that a shard answered with, or StepError (which breaks the session).
        """
        while self._flying:
            lane, message, sent = self._flying.popleft()
            waited_ns = time.monotonic_ns()
            with lane:
                lane.link.wait(sent.seq, self.deadline)
                message, sent = self.packer.settled(lane.link, message, sent)
                header = self.packer.read_response(lane.link, sent)
            lane.consumed = sent.seq
            if header.status != slot.OK:
                raise self._failure(lane, sent.seq, header)
            if header.num_rows:
                with lane:
                    add(message, lane.link.rows.deltas(sent, self.packer.x))
            lane.link.consumed(
                slot.HEADER_BYTES + sent.payload_bytes,
                slot.HEADER_BYTES + header.payload_bytes,
                lane.consumed == lane.pushed,
            )
            self._report(message.shard, sent, header, waited_ns)
            if self._queues[lane.shard]:
                self.push(lane)

    def _failure(self, lane: Lane, seq: int, header: ResponseHeader) -> LoraServerError:
        """Read the shard's error. In leader mode unsent chunks break the lane: all shards must count the same steps."""
        error = read_failure(lane.link, seq, header)
        if self.packer.terms.coordination == "leader" and any(self._queues.values()):
            lane.broken = StepError(f"{self.site}: chunks stayed unsent ({error}); the next request joins anew")
        return error

    def _report(self, shard: int, sent: RequestHeader, header: ResponseHeader, waited_ns: int) -> None:
        if self.observe is not None:
            self.observe(
                StepTimes(
                    self.site,
                    self.packer.given.decode,
                    shard,
                    sent.num_entries,
                    sent.pushed_ns,
                    header.received_ns,
                    header.started_ns,
                    header.done_ns,
                    waited_ns,
                    time.monotonic_ns(),
                )
            )
