"""One site of one engine step on its way to the shards and back: push, wait, check, hand out."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from client_connector.lanes import Lane, ShardLanes
from client_connector.packing import Packer, read_failure
from client_connector.routing import Message
from lora_server.errors import (
    AdapterNotLoadedError,
    LoraServerError,
    ShardUnavailableError,
    StepError,
    StepTimeoutError,
)
from lora_server.spec import Site
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


class _Flying(NamedTuple):
    lane: Lane
    message: Any
    sent: RequestHeader


class Started:
    """A site's step under way, between a pass's `start_dense` or `start_experts` and the call that ends it."""


@dataclass
class Exchange(Started):
    """The messages of one site, in the order of each lane; `deadline` is time.monotonic().

    A step is pure, and its rows stay as they are until it ends: so if its shard fails, or is silent, it is written once
    more, for the shard's twin. Deltas are handed out in the same order as without that.
    """

    lanes: ShardLanes
    packer: Packer[Any]
    deadline: float
    observe: Callable[[StepTimes], None] | None = None
    _queues: dict[int, deque[Any]] = field(default_factory=dict)
    _flying: deque[_Flying] = field(default_factory=deque)
    _began: float = field(default_factory=time.monotonic)  # to push, then to wait
    _asked_twin: bool = False  # whether it has weights that the shard lacks

    @property
    def site(self) -> Site:
        """The site in the model."""
        return self.packer.site

    def queue(self, messages: Sequence[Any]) -> list[int]:
        """Queue messages for the packer; return the shards to push to, each once per free slot.

        Consumes answers that a failed exchange left behind.
        """
        for message in messages:
            self._queues.setdefault(message.shard, deque()).append(message)
        ready = []
        for shard, waiting in self._queues.items():
            if (lane := self.lanes[shard]).consumed < lane.pushed:
                self._on_lane(shard, Lane.drain)
            ready += [shard] * min(self.lanes[shard].depth, len(waiting))
        return ready

    def push(self, shard: int) -> None:
        """Push a shard's next message."""
        message = self._queues[shard].popleft()
        while True:
            lane, budget_us = self.lanes[shard], round((self.deadline - time.monotonic()) * 1e6)
            try:
                with lane:
                    sent = self.packer.write_request(lane.link, lane.pushed + 1, message, max(0, budget_us))
                    lane.pushed = sent.seq  # first: whatever happens in between, a seq is never used twice
                    lane.link.push(sent.seq, slot.HEADER_BYTES + sent.payload_bytes)
                self._flying.append(_Flying(lane, message, sent))
                return
            except ShardUnavailableError as error:
                self._fail_over(lane, error)

    def _on_lane(self, shard: int, act: Callable[[Lane, float], None]) -> None:
        """Act on a shard's lane until a deadline; if the shard fails, or is silent, on the lane of its twin."""
        while True:
            lane = self.lanes[shard]
            try:
                with lane:
                    return act(lane, self._patience(lane))
            except (ShardUnavailableError, StepTimeoutError) as error:
                self._fail_over(lane, error)

    def _patience(self, lane: Lane) -> float:
        """Return until when (time.monotonic()) a lane may be silent before its twin is asked. Shards that fell silent
        together are not waited for one after the other."""
        if not self.lanes.has_twin(lane):
            return self.deadline
        if self.lanes.is_given_up(lane):
            return time.monotonic()
        failover = self.lanes.failover
        return min(self.deadline, max(self._began + failover, time.monotonic() + failover / 4))

    def _fail_over(self, lane: Lane, error: LoraServerError) -> None:
        """Send what is in flight on a lane to a twin's; raises `error` without time, or a lane that may answer."""
        if time.monotonic() >= self.deadline:
            raise error
        if (spare := self.lanes.replace(lane, error)) is lane:
            return
        with spare:
            spare.drain(self.deadline)
        flying, self._flying = self._flying, deque()
        for one in flying:
            if one.lane is lane:
                self._queues[one.message.shard].appendleft(one.message)
                self.push(one.message.shard)
            else:
                self._flying.append(one)

    def finish(self, add: Callable[[Message, torch.Tensor], None]) -> None:
        """Wait for every delta and pass it to `add`, which must copy what it keeps.

        Raises the error that a shard answered with, or StepError (which breaks the session).
        """
        self._began = time.monotonic()
        while self._flying:
            waited_ns = time.monotonic_ns()
            shard = self._flying[0].message.shard
            self._on_lane(shard, self._wait)
            flying = self._flying.popleft()
            lane, message, sent = flying
            with lane:
                message, sent = self.packer.settled(lane.link, message, sent)
                header = self.packer.read_response(lane.link, sent)
            lane.consumed = sent.seq
            if header.status != slot.OK:
                self._refused(flying, self._failure(lane, sent.seq, header))
                continue
            if header.num_rows:
                with lane:
                    add(message, lane.link.rows.deltas(sent, self.packer.x))
            lane.link.consumed(
                slot.HEADER_BYTES + sent.payload_bytes,
                slot.HEADER_BYTES + header.payload_bytes,
                lane.consumed == lane.pushed,
            )
            self._report(lane.shard, sent, header, waited_ns)
            if self._queues[shard]:
                self.push(shard)

    def _refused(self, flying: _Flying, error: LoraServerError) -> None:
        """Send a step again, once, to a twin that may have the weights that the shard still loads; raises any other
        error."""
        if self._asked_twin or not isinstance(error, AdapterNotLoadedError) or not self.lanes.has_twin(flying.lane):
            raise error
        self._asked_twin = True
        self._flying.appendleft(flying)
        self._fail_over(flying.lane, error)

    def _wait(self, lane: Lane, deadline: float) -> None:
        lane.link.wait(self._flying[0].sent.seq, deadline)

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
