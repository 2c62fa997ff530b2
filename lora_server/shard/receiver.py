"""Receive steps: read their headers, check what their clients hold, and pin their weights."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import structlog

from lora_server.errors import AdapterNotLoadedError, LoraServerError, PermissionDeniedError, UnknownAdapterError
from lora_server.memory.store import WeightStore
from lora_server.shard import request as requests
from lora_server.shard.schedule import NOT_READY, PendingStep, cost
from lora_server.timings import Timings
from lora_server.transport.base import Connection, Port
from lora_server.wire.slot import DECODE, MAX_BUDGET_US, WAITS_FOR_WEIGHTS, RequestHeader

REFUSED_AT = 0.9  # of a step's budget: the refusal reaches a client that waits for weights before its own deadline


@dataclass
class WeightsPatience:
    """Bounds the wait of a pass, one layer after the other: `seconds` for the steps of a client together, of which it
    regains what passes without a wait. A client that says that it waits may use a step's budget.
    """

    seconds: float = Timings.weights
    _waited: dict[int, tuple[int, int]] = field(default_factory=dict)  # by client: ns, and when it last waited

    def ends_ns(self, step: PendingStep) -> float:
        """Return when a blocked step is refused."""
        patience_ns = REFUSED_AT * (step.expires_ns - step.received_ns)
        if not step.header.flags & WAITS_FOR_WEIGHTS:
            patience_ns = min(patience_ns, self.seconds * 1e9 - self._used_ns(step))
        return step.received_ns + patience_ns

    def note(self, step: PendingStep, now_ns: int) -> None:
        """Account for the wait of a step that is not blocked any more."""
        used_ns, waited = self._used_ns(step), self._waited
        self._waited = {client: its for client, its in waited.items() if now_ns - its[1] < its[0]}
        self._waited[step.connection.grant.client] = used_ns + now_ns - step.received_ns, now_ns

    def _used_ns(self, step: PendingStep) -> int:
        waited_ns, at_ns = self._waited.get(step.connection.grant.client, (0, 0))
        return max(0, waited_ns - (step.received_ns - at_ns))


MEAN_OF = 64  # steps, about
UNREADABLE = RequestHeader._make([0] * len(RequestHeader._fields))._replace(budget_us=30_000_000)  # instead of a header
log = structlog.get_logger()


@dataclass
class StepReceiver:
    """The oldest unanswered step of each client. Not thread-safe: the loop's thread calls it."""

    index: int
    max_step_rows: int
    port: Port
    store: WeightStore
    foreign_seconds: float = Timings.foreign_step  # within which a shard is told of adapters, and of clients' holds
    patience: WeightsPatience = field(default_factory=WeightsPatience)
    pending: dict[int, PendingStep] = field(default_factory=dict)  # by client
    row_ns: float = 0.0  # that a step's cost of one row takes: a moving mean

    def receive(self) -> None:
        """Take each client's oldest unanswered step if it is new, and check steps with missing weights again."""
        rung = self.port.rung()
        for step in list(self.pending.values()):
            if step.connection.gone:
                self.release(step)
            elif step.blocked and self._recheck(step):
                self.patience.note(step, time.monotonic_ns())
        for connection in rung:
            client = connection.grant.client
            older = self.pending.get(client)
            if older is not None and older.connection is not connection:  # its client has just reconnected
                self.release(older)
            if connection.requested() > connection.served + connection.region.layout.depth:
                log.error("client signals steps beyond its slots: cut off", shard=self.index, client=client)
                self.port.disconnect(connection)
                connection.close()
            elif client not in self.pending:
                self._take(connection)

    def release(self, step: PendingStep) -> None:
        """Forget a step that was answered, or that lost its client."""
        del self.pending[step.connection.grant.client]
        if step.work is not None:
            self.row_ns += (step.work.spent_ns / cost(step.header) - self.row_ns) / MEAN_OF
        step.work = None
        if step.pin is None:
            self.store.forget(step.connection.grant.client)
        else:
            self.store.unpin(step.pin)

    def _take(self, connection: Connection) -> None:
        seq, now = connection.served + 1, time.monotonic_ns()
        memory, grant = connection.region.request(seq), connection.grant
        try:
            header = requests.read_header(memory, grant.client, grant.epoch, seq, self.max_step_rows)
        except LoraServerError as error:
            refusal = error.with_traceback(None)  # its frames would keep the client's memory
            header = UNREADABLE._replace(num_rows=self.max_step_rows)  # charged as the largest: floods wait for others
            self.pending[grant.client] = PendingStep(connection, seq, header, now, now, refusal=refusal)
            return
        expires = now + min(header.budget_us, MAX_BUDGET_US) * 1000
        step = PendingStep(connection, seq, header, now, expires, requests.handles(memory, header))
        if grant.step_us and header.step_class == DECODE:
            start_by_ns = now + grant.step_us * 1000 - int(cost(header) * self.row_ns)
            step.share = NOT_READY._replace(start_by_ns=start_by_ns)
        self.pending[grant.client] = step
        self._recheck(step)

    def _recheck(self, step: PendingStep) -> bool:
        """Return whether the step is not blocked any more: it is pinned, or refused."""
        client = step.connection.grant.client
        try:
            lacking = self.port.not_held(client, step.handles)
            if lacking and not self._may_use(step, lacking):
                return False
            step.pin = self.store.pin(step.handles, step.header.layer, client, step.expires_ns * 1e-9)
            if step.blocked and time.monotonic_ns() >= self.patience.ends_ns(step):
                seconds = (time.monotonic_ns() - step.received_ns) * 1e-9
                raise AdapterNotLoadedError.of(
                    self.store.missing(step.handles, step.header.layer),
                    f"shard {self.index} {step.header.where}: the weights are still loading after {seconds:.2g} s; "
                    'acquire the adapter with wait="loaded", or start the server with a larger --device-pool',
                )
        except LoraServerError as error:
            step.refusal = error.with_traceback(None)
        return not step.blocked

    def _may_use(self, step: PendingStep, lacking: frozenset[int]) -> bool:
        """Return False while a command that tells of an adapter, or of a hold, may be on its way: the controller
        answers a client first. Raises PermissionDeniedError or UnknownAdapterError once it would be here. A step that
        names what was dropped, or no handle at all, need not wait: `gather` or the checks refuse it."""
        foreign = self.store.known(lacking)
        if not foreign and (self.store.any_dropped(lacking) or min(lacking) < 0):
            return True
        if time.monotonic_ns() < min(step.received_ns + self.foreign_seconds * 1e9, step.expires_ns):
            return False
        got = f"shard {self.index} {step.header.where}: got handle"
        if foreign:
            raise PermissionDeniedError(f"{got} {min(foreign)}, which this client does not hold; acquire it first")
        raise UnknownAdapterError(f"{got} {min(lacking)}, which is unknown here; acquire its adapter first")
