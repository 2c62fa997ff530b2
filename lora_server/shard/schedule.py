"""Order of steps at a shard: fair queueing between tenants, and between the clients of each.

A step costs its rows plus STEP_ROWS. Each client has a virtual time: a step starts where the client's last one
finished, but not before the shard's time, and finishes its cost later. The least finish is served first, the oldest of
equals; the shard's time is the least start of the ready steps. So small steps pass large ones, a client that has had
less passes one that has had more, no client saves up a share, and a step waits for each other client no longer than its
own cost.

A client of an SLO class has a part of the class's TPOT for each step, which then has a deadline. Of a tenant's ready
steps, decode steps with a deadline go first, by deadline - cost: the time by which they must begin. But a client may be
ahead of its share by no more than AHEAD_ROWS; beyond, its steps wait as all others do. So a class decides the order
of a few steps, and clients' shares do not depend on it. Without classes, the class that a client gives its steps
(decode, prefill) does not count.

The same rule orders tenants, with a cost divided by the tenant's weight: its share does not depend on how many clients
it has.

A step that is computed in parts is scheduled again after each part, so small steps pass a large one that was begun.

A client's steps are served in the order it pushed them: only its oldest unanswered step is scheduled. A GPU does the
same with a warp, and finishes what it begins: device/host/poller.cuh.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from lora_server.errors import LoraServerError
from lora_server.transport.base import Connection
from lora_server.wire.slot import AHEAD_ROWS, MOST_ROWS, STEP_ROWS, RequestHeader

MOST_BEGUN = 4  # steps that are begun at a time: each keeps its buffers
_START, _ORDER, _START_BY = map(attrgetter, ("share.start", "share.order", "share.start_by_ns"))


class StepShare(NamedTuple):
    """A ready step's place in its client's share, in rows."""

    start: int
    cost: int
    finish: int
    order: tuple[int, int]  # the least is served first
    start_by_ns: int = 0  # deadline - cost; 0: it has no deadline


NOT_READY = StepShare(-1, 0, -1, (0, 0))


@dataclass(slots=True)
class StepWork:
    """A step that was begun."""

    parts: Iterator[None]  # what is left of it
    read_ns: int = 0  # spent on reading it
    spent_ns: int = 0  # spent on it so far, reading included


@dataclass(slots=True)
class PendingStep:
    """A client's oldest unanswered step. Times are time.monotonic_ns() of this host."""

    connection: Connection
    seq: int
    header: RequestHeader
    received_ns: int
    expires_ns: int
    handles: frozenset[int] = frozenset()
    pin: int | None = None  # on its weights, once all are READY and its client may use them
    refusal: LoraServerError | None = None  # the answer, when its turn comes
    share: StepShare = NOT_READY
    work: StepWork | None = None  # once it is begun

    @property
    def blocked(self) -> bool:
        """Return whether the step's weights are not READY yet."""
        return self.pin is None and self.refusal is None


def begun(pending: Iterable[PendingStep]) -> list[PendingStep]:
    """Return the steps that were begun."""
    return [step for step in pending if step.work is not None]


class FairShare:
    """The rule between the clients of a tenant; each connection keeps its virtual time."""

    def __init__(self) -> None:
        self._now = 0

    def pick(self, pending: Iterable[PendingStep]) -> PendingStep | None:
        """Return the step to serve now, or to go on with; None if none is ready."""
        ready = [step for step in pending if not step.blocked]
        picked = self.among(ready) if ready else None
        if picked is not None:
            picked.connection.finish = picked.share.finish
        return picked

    def among(self, ready: list[PendingStep], begin: bool = True) -> PendingStep | None:
        """Choose from one or more ready steps. `begin`: also one that was not begun. The caller charges the client."""
        for step in ready:
            if not step.share.cost:  # it has just become ready
                its_cost, start = cost(step.header), max(self._now, step.connection.finish)
                finish = start + its_cost
                step.share = StepShare(start, its_cost, finish, (finish, step.received_ns), step.share.start_by_ns)
        choice = ready if begin else begun(ready)
        if len(ready) == 1:  # the usual case: nothing to compare
            self._now = ready[0].share.start
            picked = choice[0] if choice else None
        else:
            self._now = min(map(_START, ready))
            latest = self._now + AHEAD_ROWS
            urgent = [step for step in choice if step.share.start_by_ns and step.share.finish <= latest]
            picked = min(urgent, key=_START_BY) if urgent else min(choice, key=_ORDER, default=None)
        return picked


@dataclass
class _Tenant:
    had: float = 0.0  # virtual time at which its next step starts
    clients: FairShare = field(default_factory=FairShare)


class TenantShare:
    """The rule between tenants, and within each."""

    def __init__(self) -> None:
        self._now = 0.0
        self._tenants: dict[str, _Tenant] = {}
        self._ready = set[str]()  # tenants at the last call
        # by client, until the step is answered: epoch, seq, tenant, cost; a step would keep its client's memory
        self._picked: dict[int, tuple[int, int, str, float]] = {}

    def pick(self, pending: Mapping[int, PendingStep]) -> PendingStep | None:
        """Return the step to serve now, or to go on with; None if none is ready. A step that was picked and is not
        pending any more was answered."""
        self._count(pending)
        ready = [step for step in pending.values() if not step.blocked]
        tenants = {step.connection.grant.tenant for step in ready}
        if tenants != self._ready:
            self._enter(tenants - self._ready)
            self._ready = tenants
        step = self._among(ready) if ready else None
        if step is None:
            return None
        connection = step.connection
        connection.finish = step.share.finish
        if connection.grant.client not in self._picked:
            its_cost = step.share.cost / connection.grant.weight
            self._picked[connection.grant.client] = connection.grant.epoch, step.seq, connection.grant.tenant, its_cost
        return step

    def _enter(self, names: set[str]) -> None:
        for name in names:
            tenant = self._tenants.setdefault(name, _Tenant())
            tenant.had = max(tenant.had, self._now)

    def _among(self, ready: list[PendingStep]) -> PendingStep | None:
        begin = len(self._picked) < MOST_BEGUN
        if len(self._ready) == 1:
            tenant = self._tenants[ready[0].connection.grant.tenant]
            self._now = tenant.had
            return tenant.clients.among(ready, begin)
        grouped: dict[str, list[PendingStep]] = {name: [] for name in self._ready}
        for step in ready:
            grouped[step.connection.grant.tenant].append(step)
        self._now = min([self._tenants[name].had for name in grouped])
        firsts = [self._tenants[name].clients.among(steps, begin) for name, steps in grouped.items()]
        return min((step for step in firsts if step is not None), key=self._order, default=None)

    def _order(self, step: PendingStep) -> tuple[float, int]:
        connection = step.connection
        return self._tenants[connection.grant.tenant].had + step.share.cost / connection.grant.weight, step.received_ns

    def _count(self, pending: Mapping[int, PendingStep]) -> None:
        for client, (epoch, seq, tenant, its_cost) in list(self._picked.items()):
            step = pending.get(client)
            if step is None or step.seq != seq or step.connection.grant.epoch != epoch:
                self._tenants[tenant].had += its_cost
                del self._picked[client]


def cost(header: RequestHeader) -> int:
    """Return the cost of a step in rows."""
    return STEP_ROWS + min(max(header.num_rows, header.num_entries, header.num_out_rows), MOST_ROWS)
