"""The loop of one shard: receive -> shrink -> expand -> send.

It serves a step for `turn_seconds` at a time, and then receives again: what is less work may pass what is more.
Clients write into their slots while earlier steps compute (receive overlaps compute); the kernel
writes into the client's response slot, so sending is a signal (shared memory) or another thread's
work (TCP, where they are large). One thread runs the loop; listeners and the weight loader wake it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import structlog

from lora_server.errors import LoraServerError, PermissionDeniedError, ProtocolError, StepTimeoutError
from lora_server.logs import Repeats
from lora_server.memory.store import WeightStore
from lora_server.shard import request as requests
from lora_server.shard.compute import Compute, DeviceLostError
from lora_server.shard.coordination import Coordinator
from lora_server.shard.phases import Phases
from lora_server.shard.schedule import PendingStep
from lora_server.spec import ModelSpec
from lora_server.timings import Timings
from lora_server.transport.base import Connection, Port
from lora_server.wire import slot
from lora_server.wire.slot import RequestHeader

IDLE_SECONDS = 0.1
MAX_BUDGET_US = 3_600_000_000
UNREADABLE = RequestHeader._make([0] * len(RequestHeader._fields))._replace(budget_us=30_000_000)  # instead of a header
log = structlog.get_logger()


@dataclass
class Counters:
    """What a shard has done since it started; times in nanoseconds."""

    steps: int = 0
    failed: int = 0
    entries: int = 0
    request_bytes: int = 0
    response_bytes: int = 0
    wait_ns: int = 0  # from receiving a step to starting it
    compute_ns: int = 0


@dataclass
class Shard:
    """One shard's loop over what the daemon gave it. Not thread-safe: one thread calls it.

    `foreign_seconds`: within which a shard hears what its clients hold, also of a controller that was away.
    `turn_seconds`: that a step is served before others are looked at; no part of it is cut short.
    """

    index: int
    spec: ModelSpec
    max_step_rows: int
    port: Port
    store: WeightStore
    coordinator: Coordinator
    compute: Compute
    wire: slot.Wire = "exact"
    foreign_seconds: float = Timings.foreign_step
    turn_seconds: float = Timings.turn
    counters: Counters = field(default_factory=Counters)
    phases: Phases = field(default_factory=Phases)
    _pending: dict[int, PendingStep] = field(default_factory=dict)
    _complain: Repeats = field(default_factory=lambda: Repeats(log.warning))

    def run(self, stopped: Callable[[], bool]) -> None:
        """Serve until `stopped()`; it is looked at least every IDLE_SECONDS."""
        while not stopped():
            if not self.serve_once():
                self._complain.flush()
                self.port.wait(IDLE_SECONDS)

    def serve_once(self) -> bool:
        """Serve at most one step, for a turn; whether there was one."""
        self._receive()
        step = self.coordinator.next(self._pending)
        if step is None:
            return False
        if self._serve(step):
            self._let_go(step)
        return True

    def _receive(self) -> None:
        """Take each client's oldest unanswered step, if it is new, and look again at those that wait."""
        rung = self.port.rung()
        for step in list(self._pending.values()):
            if step.connection.gone:
                self._let_go(step)
            elif step.blocked:
                self._recheck(step)
        for connection in rung:
            older = self._pending.get(connection.client)
            if older is not None and older.connection is not connection:  # it has just connected anew
                self._let_go(older)
            if connection.requested() > connection.served + connection.region.layout.depth:
                log.error("client signals steps beyond its slots: cut off", shard=self.index, client=connection.client)
                self.port.disconnect(connection)
                connection.close()
            elif connection.client not in self._pending:
                self._take(connection)

    def _take(self, connection: Connection) -> None:
        seq, now = connection.served + 1, time.monotonic_ns()
        memory, client, epoch = connection.region.request(seq), connection.client, connection.epoch
        try:
            header = requests.read_header(memory, client, epoch, seq, self.max_step_rows)
        except LoraServerError as error:
            refusal = error.with_traceback(None)  # whose frames would keep the client's memory
            header = UNREADABLE._replace(num_rows=self.max_step_rows)  # charged as the largest: floods wait for others
            self._pending[client] = PendingStep(connection, seq, header, now, now, refusal=refusal)
            return
        expires = now + min(header.budget_us, MAX_BUDGET_US) * 1000
        step = PendingStep(connection, seq, header, now, expires, requests.handles(memory, header))
        self._pending[client] = step
        self._recheck(step)

    def _recheck(self, step: PendingStep) -> None:
        try:
            lacking = self.port.not_held(step.connection.client, step.handles)
            if lacking and not self._may_use(step, lacking):
                return
            step.pin = self.store.pin(step.handles, step.header.layer, step.connection.client, step.expires_ns * 1e-9)
            if step.blocked and time.monotonic_ns() >= step.expires_ns:
                raise StepTimeoutError(
                    f"shard {self.index} {step.header.where}: the weights of handle {self._missing(step)} were not "
                    "loaded before the client's deadline; wait longer, prefetch, or start the server with a larger "
                    "--device-pool"
                )
        except LoraServerError as error:
            step.refusal = error.with_traceback(None)

    def _may_use(self, step: PendingStep, lacking: frozenset[int]) -> bool:
        """Whether its client holds what it names, as far as is known yet, but for what is no adapter, which `gather`
        refuses; raises PermissionDeniedError."""
        foreign = self.store.known(lacking)
        if foreign and time.monotonic_ns() >= min(step.received_ns + self.foreign_seconds * 1e9, step.expires_ns):
            raise PermissionDeniedError(
                f"shard {self.index} {step.header.where}: got handle {min(foreign)}, which this client does not hold; "
                "acquire it first"
            )
        return not foreign

    def _missing(self, step: PendingStep) -> int | None:
        return self.store.missing(step.handles, step.header.layer)

    def _let_go(self, step: PendingStep) -> None:
        """It was answered, or nobody waits for an answer."""
        del self._pending[step.connection.client]
        step.work = None
        if step.pin is None:
            self.store.forget(step.connection.client)
        else:
            self.store.unpin(step.pin)

    def _serve(self, step: PendingStep) -> bool:
        """Go on with it for a turn; whether it was answered."""
        began, turn_ns = time.monotonic_ns(), self.turn_seconds * 1e9
        if step.refusal is not None:
            self._fail(step.connection, step.seq, step.refusal)
            return True
        try:
            if step.work is None:
                step.work = self._work(step)
            for _ in step.work:
                if time.monotonic_ns() - began >= turn_ns:
                    step.spent_ns += time.monotonic_ns() - began
                    return False
        except LoraServerError as error:
            self._fail(step.connection, step.seq, error)
            return True
        except DeviceLostError:
            raise
        except Exception as error:  # tables changed after they were checked, say: never the end of the loop
            key, where = (step.connection.client, "unexpected"), step.header.where
            self._complain(key, "step failed unexpectedly", shard=self.index, step=where, exc_info=error)
            self._fail(step.connection, step.seq, ProtocolError(f"{step.header.where}: {error!r}"))
            return True
        done = time.monotonic_ns()
        step.spent_ns += done - began
        self._answer(step, done)
        return True

    def _work(self, step: PendingStep) -> Iterator[None]:
        """All that is between a step's turn and its answer; raises LoraServerError."""
        began, memory = time.monotonic_ns(), step.connection.region.request(step.seq)
        request = requests.read_request(memory, step.header, self.spec, self.max_step_rows, self.wire)
        if not request.handles <= step.handles:
            raise ProtocolError(f"{request.header.where}: its segments changed after it was pushed")
        segments = self.store.gather(request.site, request.segments_S4, request.header.where)
        step.read_ns = time.monotonic_ns() - began
        if request.header.num_out_rows:
            yield from self.compute.parts(request, segments, step.connection)

    def _answer(self, step: PendingStep, done: int) -> None:
        """For the client, all that was not spent on its step is a wait before it."""
        memory, started = step.connection.region.response(step.seq), done - step.spent_ns
        nbytes = requests.write_response(memory, step.header, (step.received_ns, started, done))
        self._count(step, nbytes, started, done)
        self.port.respond(step.connection, step.seq, nbytes)
        sent = time.monotonic_ns() - done
        self.phases.add(started - step.received_ns, step.read_ns, step.spent_ns - step.read_ns, sent)

    def _fail(self, connection: Connection, seq: int, error: LoraServerError) -> None:
        client = connection.client
        self._complain((client, error.code), "step failed", shard=self.index, client=client, seq=seq, error=str(error))
        self.counters.failed += 1
        memory = connection.region.response(seq)
        self.port.respond(
            connection, seq, requests.write_failure(memory, connection.client, connection.epoch, seq, error)
        )

    def _count(self, step: PendingStep, nbytes: int, started: int, done: int) -> None:
        counters = self.counters
        counters.steps += 1
        counters.entries += step.header.num_entries
        counters.request_bytes += slot.HEADER_BYTES + step.header.payload_bytes
        counters.response_bytes += nbytes
        counters.wait_ns += started - step.received_ns
        counters.compute_ns += done - started
