"""Which step a shard serves next: fair queueing between tenants, and between the clients of each.

A step costs its rows, and STEP_ROWS for being one. Each client has a time of its own: a step starts where the one
before it finished, but not before the shard's time, and finishes its cost later. The least finish is served first, the
oldest of equals; the shard's time is the least start of those that are ready. So small steps pass large ones, a client
with many or large ones is passed by all that had less, nobody saves up for later, and nobody waits for more than
each other client's share of what its own step costs. What a client calls its steps does not count.

Tenants are to the shard what clients are to a tenant, but that a tenant of twice the weight finishes in half the time:
so much of a shard is a tenant's, however many clients it has.

A step that is computed in parts is asked about again after each, and goes on while it is still the least: small steps
pass a large one that was begun, too.

Steps of one client are served in the order it pushed them, so a client is represented here by its oldest unanswered
step alone. A GPU does the same with a warp, and finishes what it begins: transport/gpu/poller.cuh.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter

from lora_server.errors import LoraServerError
from lora_server.transport.base import Connection
from lora_server.wire.slot import RequestHeader

STEP_ROWS = 8
MOST_ROWS = 65536  # that a step may claim; how many it may have is checked when it is served
MOST_BEGUN = 4  # steps at a time: each keeps its buffers
_START, _ORDER = attrgetter("start"), attrgetter("order")


@dataclass(slots=True)
class PendingStep:
    """A client's oldest unanswered step. Times are time.monotonic_ns() of this host, but start and finish."""

    connection: Connection
    seq: int
    header: RequestHeader
    received_ns: int
    expires_ns: int
    handles: frozenset[int] = frozenset()
    pin: int | None = None  # on its weights, from the moment on at which all are here, and its client may use them
    refusal: LoraServerError | None = None  # all that it gets, when its turn comes
    start: int = -1  # of its share, once it is ready
    cost: int = 0
    finish: int = -1
    order: tuple[int, int] = (0, 0)  # the least is served first
    work: Iterator[None] | None = None  # what is left of it, once it is begun
    read_ns: int = 0  # that reading it took
    spent_ns: int = 0  # on it so far, reading included

    @property
    def blocked(self) -> bool:
        """Its weights are not here yet."""
        return self.pin is None and self.refusal is None


def begun(pending: Iterable[PendingStep]) -> list[PendingStep]:
    """Those of which a part is done."""
    return [step for step in pending if step.work is not None]


class FairShare:
    """The rule between the clients of a tenant; what each has had is kept with its connection."""

    def __init__(self) -> None:
        self._now = 0

    def pick(self, pending: Iterable[PendingStep]) -> PendingStep | None:
        """The step to serve now, or to go on with, among those whose weights are here; None if there is none."""
        ready = [step for step in pending if not step.blocked]
        return self.among(ready) if ready else None

    def among(self, ready: list[PendingStep], begin: bool = True) -> PendingStep | None:
        """The same, of one or more that are ready. `begin`: it may be one that is not begun yet."""
        for step in ready:
            if step.start < 0:
                step.cost = cost(step.header)
                step.start = max(self._now, step.connection.finish)
                step.finish = step.start + step.cost
                step.order = step.finish, step.received_ns
        choice = ready if begin else begun(ready)
        if len(ready) == 1:  # as it mostly is: nothing to compare
            self._now = ready[0].start
            picked = choice[0] if choice else None
        else:
            self._now = min(map(_START, ready))
            picked = min(choice, key=_ORDER, default=None)
        if picked is not None:
            picked.connection.finish = picked.finish
        return picked


@dataclass
class _Tenant:
    had: float = 0.0  # of its share, up to where its next step starts
    clients: FairShare = field(default_factory=FairShare)


class TenantShare:
    """The rule between tenants, and within each: what the loop asks."""

    def __init__(self) -> None:
        self._now = 0.0
        self._tenants: dict[str, _Tenant] = {}
        self._ready = set[str]()  # tenants, when it was asked last
        # by client, until it is answered: epoch, seq, tenant, cost; not the step, which would keep its client's memory
        self._picked: dict[int, tuple[int, int, str, float]] = {}

    def pick(self, pending: Mapping[int, PendingStep]) -> PendingStep | None:
        """The step to serve now, or to go on with; None if there is none. What was picked before, and is not pending
        any more, was answered."""
        self._count(pending)
        ready = [step for step in pending.values() if not step.blocked]
        tenants = {step.connection.tenant for step in ready}
        if tenants != self._ready:
            self._enter(tenants - self._ready)
            self._ready = tenants
        step = self._among(ready) if ready else None
        if step is None:
            return None
        connection = step.connection
        if connection.client not in self._picked:
            its_cost = step.cost / connection.weight
            self._picked[connection.client] = connection.epoch, step.seq, connection.tenant, its_cost
        return step

    def _enter(self, names: set[str]) -> None:
        for name in names:
            tenant = self._tenants.setdefault(name, _Tenant())
            tenant.had = max(tenant.had, self._now)

    def _among(self, ready: list[PendingStep]) -> PendingStep | None:
        begin = len(self._picked) < MOST_BEGUN
        if len(self._ready) == 1:
            tenant = self._tenants[ready[0].connection.tenant]
            self._now = tenant.had
            return tenant.clients.among(ready, begin)
        grouped: dict[str, list[PendingStep]] = {name: [] for name in self._ready}
        for step in ready:
            grouped[step.connection.tenant].append(step)
        self._now = min([self._tenants[name].had for name in grouped])
        firsts = [self._tenants[name].clients.among(steps, begin) for name, steps in grouped.items()]
        return min((step for step in firsts if step is not None), key=self._order, default=None)

    def _order(self, step: PendingStep) -> tuple[float, int]:
        connection = step.connection
        return self._tenants[connection.tenant].had + step.cost / connection.weight, step.received_ns

    def _count(self, pending: Mapping[int, PendingStep]) -> None:
        for client, (epoch, seq, tenant, its_cost) in list(self._picked.items()):
            step = pending.get(client)
            if step is None or step.seq != seq or step.connection.epoch != epoch:
                self._tenants[tenant].had += its_cost
                del self._picked[client]


def cost(header: RequestHeader) -> int:
    """In rows."""
    return STEP_ROWS + min(max(header.num_rows, header.num_entries, header.num_out_rows), MOST_ROWS)
