"""The loop of one shard: receive -> shrink -> expand -> send.

A step is served for `turn_seconds` at a time, and then the loop receives again: a smaller step may pass a larger one.
Clients write into their slots while earlier steps compute, so receiving overlaps computing. The kernel writes into the
client's response slot, so sending is a signal (shared memory), or another thread's work for a large TCP response. One
thread runs the loop; listeners and the weight loader wake it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import structlog

from lora_server.errors import LoraServerError, ProtocolError
from lora_server.histogram import Histogram
from lora_server.logs import Repeats
from lora_server.memory.store import WeightStore
from lora_server.per_tenant import PerTenant
from lora_server.shard import request as requests
from lora_server.shard.compute import Compute, DeviceLostError
from lora_server.shard.coordination import Coordinator
from lora_server.shard.receiver import StepReceiver, WeightsPatience
from lora_server.shard.schedule import PendingStep, StepWork
from lora_server.spec import ModelSpec
from lora_server.timings import Timings
from lora_server.transport.base import Connection, Port
from lora_server.wire import slot
from lora_server.wire.slot import RequestHeader

PHASES = ("wait", "receive", "compute", "send")


class Phases:
    """Written by the shard's loop, read by other threads."""

    def __init__(self) -> None:
        self._each = tuple(Histogram() for _ in PHASES)

    def add(self, *nanoseconds: int) -> None:
        """Add one step's durations, in the order of PHASES."""
        for histogram, duration in zip(self._each, nanoseconds, strict=True):
            histogram.add(duration)

    def __iter__(self) -> Iterator[tuple[str, Histogram]]:
        return zip(PHASES, self._each, strict=True)


IDLE_SECONDS = 0.1
log = structlog.get_logger()


@dataclass
class StepCounters:
    """Counters of a shard since its start; times in nanoseconds."""

    steps: int = 0
    failed: int = 0
    entries: int = 0
    request_bytes: int = 0
    response_bytes: int = 0
    wait_ns: int = 0  # from receiving a step to starting it
    compute_ns: int = 0


@dataclass
class StepServer:
    """Computes steps and answers them. Not thread-safe: the loop's thread calls it."""

    index: int
    read: Callable[[memoryview, RequestHeader], requests.Request]
    port: Port
    store: WeightStore
    compute: Compute
    turn_ns: float
    counters: StepCounters = field(default_factory=StepCounters)
    by_tenant: PerTenant[StepCounters] = field(default_factory=lambda: PerTenant(StepCounters))
    phases: Phases = field(default_factory=Phases)
    complain: Repeats = field(default_factory=lambda: Repeats(log.warning))

    def serve(self, step: PendingStep) -> bool:
        """Go on with a step for a turn; return whether it was answered. Raises DeviceLostError."""
        began = time.monotonic_ns()
        if step.refusal is not None:
            self._fail(step.connection, step.seq, step.refusal)
            return True
        try:
            work = step.work
            if work is None:
                work = step.work = StepWork(self._parts(step))
            for _ in work.parts:
                if time.monotonic_ns() - began >= self.turn_ns:
                    work.spent_ns += time.monotonic_ns() - began
                    return False
        except LoraServerError as error:
            self._fail(step.connection, step.seq, error)
            return True
        except DeviceLostError:
            raise
        except Exception as error:  # tables changed after they were checked, say: never the end of the loop
            key, where = (step.connection.grant.client, "unexpected"), step.header.where
            self.complain(key, "step failed unexpectedly", shard=self.index, step=where, exc_info=error)
            self._fail(step.connection, step.seq, ProtocolError(f"{step.header.where}: {error!r}"))
            return True
        done = time.monotonic_ns()
        work.spent_ns += done - began
        self._answer(step, work, done)
        return True

    def _parts(self, step: PendingStep) -> Iterator[None]:
        """Read, gather and compute a step, and yield between parts; raises LoraServerError."""
        began, memory = time.monotonic_ns(), step.connection.region.request(step.seq)
        request = self.read(memory, step.header)
        if not request.handles <= step.handles:
            raise ProtocolError(f"{request.header.where}: its segments changed after it was pushed")
        segments = self.store.gather(request.site, request.segments_S4, request.header.where)
        assert step.work is not None
        step.work.read_ns = time.monotonic_ns() - began
        if request.header.num_out_rows:
            yield from self.compute.parts(request, segments, step.connection)

    def _answer(self, step: PendingStep, work: StepWork, done: int) -> None:
        """Send the response. All time that was not spent on the step counts as its wait."""
        memory, started = step.connection.region.response(step.seq), done - work.spent_ns
        nbytes = requests.write_response(memory, step.header, (step.received_ns, started, done))
        self._count(step, nbytes, started, done)
        self.port.respond(step.connection, step.seq, nbytes)
        sent = time.monotonic_ns() - done
        self.phases.add(started - step.received_ns, work.read_ns, work.spent_ns - work.read_ns, sent)

    def _fail(self, connection: Connection, seq: int, error: LoraServerError) -> None:
        client = connection.grant.client
        self.complain((client, error.code), "step failed", shard=self.index, client=client, seq=seq, error=str(error))
        for counters in (self.counters, self.by_tenant.of(connection.grant.tenant)):
            counters.failed += 1
        nbytes = requests.write_failure(connection.region.response(seq), client, connection.grant.epoch, seq, error)
        self.port.respond(connection, seq, nbytes)

    def _count(self, step: PendingStep, nbytes: int, started: int, done: int) -> None:
        for counters in (self.counters, self.by_tenant.of(step.connection.grant.tenant)):
            counters.steps += 1
            counters.entries += step.header.num_entries
            counters.request_bytes += slot.HEADER_BYTES + step.header.payload_bytes
            counters.response_bytes += nbytes
            counters.wait_ns += started - step.received_ns
            counters.compute_ns += done - started


class Shard:
    """One shard's loop over what the daemon gave it. Not thread-safe: one thread calls it.

    `foreign_seconds`: a client's hold reaches the shard within this time, also from a controller that was away.
    `weights_seconds`: a step is refused when weights are still loading after this time, unless its client waits.
    `turn_seconds`: a step is served for so long before the loop looks at others; parts are never cut short.
    """

    def __init__(
        self,
        index: int,
        spec: ModelSpec,
        max_step_rows: int,
        port: Port,
        store: WeightStore,
        coordinator: Coordinator,
        compute: Compute,
        wire: slot.Wire = "exact",
        foreign_seconds: float = Timings.foreign_step,
        weights_seconds: float = Timings.weights,
        turn_seconds: float = Timings.turn,
    ) -> None:
        self.index, self.port, self.store, self.coordinator = index, port, store, coordinator
        self.receiver = StepReceiver(
            index, max_step_rows, port, store, foreign_seconds, WeightsPatience(weights_seconds)
        )
        read = partial(requests.read_request, spec=spec, max_step_rows=max_step_rows, wire=wire)
        self.server = StepServer(index, read, port, store, compute, turn_seconds * 1e9)
        self.counters, self.by_tenant, self.phases = self.server.counters, self.server.by_tenant, self.server.phases

    def run(self, stopped: Callable[[], bool]) -> None:
        """Serve until `stopped()`, which is called at least every IDLE_SECONDS."""
        while not stopped():
            if not self.serve_once():
                self.server.complain.flush()
                self.port.wait(IDLE_SECONDS)

    def serve_once(self) -> bool:
        """Serve at most one step, for a turn; return whether there was one."""
        self.receiver.receive()
        step = self.coordinator.next(self.receiver.pending)
        if step is None:
            return False
        if self.server.serve(step):
            self.receiver.release(step)
        return True
