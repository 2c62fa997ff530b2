"""The admission queue: a ticket is admitted when its adapters fit the shards' device pools, and waits until then.

An adapter is active while a client holds it. The active adapters fit the device pools of all shards together. A ticket
is admitted at once if its adapters are active, or fit as well.

The rule is first come, first served, with backfill; with SLO classes, the least deadline margin first (`margin.py`). A
ticket is skipped while neither its adapter nor another one of its outline is measured. A ticket that fits may overtake
earlier ones that do not. Once the first measured ticket has waited `first_seconds`, backfill stops: no other ticket
takes a new place, and adapters are drained for it (`AdmissionOrder`). Tickets for a drained adapter wait behind it;
tickets for other adapters in use are still admitted at once. So the first ticket is admitted when clients have released
the drained adapters, and no ticket starves. Tenants share by weight.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from lora_server import telemetry
from lora_server.control.admission.capacity import PoolCapacity
from lora_server.control.admission.holds import ClientHolds, HoldUpdates
from lora_server.control.admission.order import FirstTicket
from lora_server.control.admission.table import TicketTable
from lora_server.control.admission.tickets import NO_CLASS, Ticket, TicketClass, TicketKey, TicketLoads
from lora_server.control.events.log import EventLog
from lora_server.errors import AdmissionError, LoraServerError
from lora_server.histogram import Histogram
from lora_server.per_tenant import PerTenant
from lora_server.wire.events import ADMISSION, RequestAdmitted, RequestQueued

MOST_BATCHES, BATCH_SECONDS = 256, 3600.0  # that are remembered: a layout in which one does not fit is not resized to


class QueuePosition(NamedTuple):
    """A queued ticket's position, from 1 on, and the reason why it waits."""

    position: int
    reason: str


class AdapterLoading(NamedTuple):
    """An admitted ticket's handles, and the seconds until they are loaded; infinity if that is unknown."""

    handles: list[int]
    seconds: float


@dataclass
class AdmissionCounters:
    """Counts admissions and cache hits since the controller started, and publishes which requests wait."""

    events: EventLog = field(default_factory=EventLog)
    immediate: int = 0
    queued: int = 0  # admitted after they had waited
    waits: Histogram = field(default_factory=Histogram)  # seconds that queued tickets waited
    waits_by_class: dict[str, Histogram] = field(default_factory=dict)  # likewise, of all tickets with an SLO class
    waits_by_tenant: PerTenant[Histogram] = field(default_factory=lambda: PerTenant(Histogram))  # of all tickets
    loads: Histogram = field(default_factory=Histogram)  # seconds that admitted tickets waited for weights
    loads_by_tenant: PerTenant[Histogram] = field(default_factory=lambda: PerTenant(Histogram))
    hits: int = 0  # adapters that were READY in all device pools when a client got them
    misses: int = 0

    def loaded(self, ticket: Ticket, now: float) -> None:
        """Count an admitted ticket that does not wait for weights any more."""
        for loads in (self.loads, self.loads_by_tenant.of(ticket.tenant)):
            loads.add(int((now - ticket.admitted) * 1e9))

    def enqueue(self, client: int, ticket: Ticket) -> None:
        """Take that a ticket waits."""
        self.events.publish(ADMISSION, ticket.tenant, RequestQueued(ticket.names, client))

    def admit(self, client: int, ticket: Ticket, now: float) -> None:
        """Count a ticket that was admitted."""
        waited_ns = int((now - ticket.since) * 1e9)
        self.waits_by_tenant.of(ticket.tenant).add(waited_ns)
        if ticket.slo.name:
            self.waits_by_class.setdefault(ticket.slo.name, Histogram()).add(waited_ns)
        if not ticket.waited:
            self.immediate += 1
            return
        self.queued += 1
        self.waits.add(waited_ns)
        self.events.publish(ADMISSION, ticket.tenant, RequestAdmitted(ticket.names, client, now - ticket.since))
        telemetry.record("lora.admission", ticket.since, ticket.trace, adapters=", ".join(ticket.names))


@dataclass
class AdmissionQueue:
    """Admits tickets by the rule above. Not thread-safe: `AdmissionService` has the lock.

    `resolve` returns the handles of names, or raises why there are none. `updates` has the shards told which adapters
    are active, and held by a client.
    """

    resolve: Callable[[Sequence[str]], list[int]]
    capacity: PoolCapacity = field(default_factory=PoolCapacity)
    holds: ClientHolds = field(default_factory=ClientHolds)
    updates: HoldUpdates = field(default_factory=lambda: HoldUpdates(lambda command: None, nullcontext()))
    clock: Callable[[], float] = time.monotonic
    counters: AdmissionCounters = field(default_factory=AdmissionCounters)
    tickets: TicketTable = field(default_factory=TicketTable)
    loads: TicketLoads = field(default_factory=TicketLoads)
    paused: str = ""  # why no ticket is admitted, whatever capacity there is
    _batches: dict[frozenset[int], float] = field(default_factory=dict)  # that tickets wanted together last, and when
    _answered: list[tuple[TicketKey, Ticket, bool]] = field(default_factory=list)  # in this pass

    # -- clients

    def acquire(
        self,
        client: int,
        number: int,
        names: Sequence[str],
        tenant: str = "",
        weight: float = 1.0,
        pace: float | None = None,
        slo: TicketClass = NO_CLASS,
    ) -> list[int] | QueuePosition | AdapterLoading:
        """Hold all of these adapters for a client, or queue a ticket; raises why they cannot be held.

        A ticket of number 0 is refused instead of queued. `pace`: see Ticket.
        """
        if not names:  # a client that asks whether its lease is good
            return []
        key = client, number
        ticket = self.tickets.find(key) if number else None
        if ticket is None:
            self.tickets.check(client)
            ticket = Ticket(tuple(names), self.clock(), tenant, weight, pace, slo)
            self._ask(key, ticket)
        if ticket.error is not None:
            raise ticket.error
        if ticket.handles is None:
            return self._position(key, ticket)
        handles = list(ticket.handles)
        return AdapterLoading(handles, self.loads.seconds_left(ticket)) if key in self.tickets.loading else handles

    def _ask(self, key: TicketKey, ticket: Ticket) -> None:
        ticket.load = self.loads.expected(self.resolve(ticket.names))  # raises
        self.tickets.add(key, ticket)
        self.admit((key, ticket))
        ticket.waited = True
        if key[1] == 0 and key in self.tickets.waiting:
            reason = self._position(key, ticket).reason
            ticket.error = AdmissionError(f"adapters {list(ticket.names)}: no place now: {reason}")
        if key[1] == 0 or ticket.error is not None:
            self.tickets.drop(key)
        elif ticket.handles is None:
            self.counters.enqueue(key[0], ticket)

    def settle(self, client: int, numbers: Iterable[int]) -> None:
        """Forget the tickets among these that were answered: the client has their answers. Open ones stay."""
        for number in numbers:
            if not self.tickets.is_open((client, number)):
                self.tickets.drop((client, number))

    def cancel(self, client: int, numbers: Collection[int]) -> None:
        """Remove what is queued, and release what was admitted; also of a ticket that is yet to come. Raises
        AdmissionError for too many of those."""
        for ticket in self.tickets.cancelled(client, numbers, self.clock()):
            if ticket.handles is not None:
                self._release(client, ticket.handles)
            ticket.handles, ticket.error = None, AdmissionError(f"adapters {list(ticket.names)}: request cancelled")
        self.admit()

    def release(self, client: int, handles: Iterable[int]) -> None:
        """Release holds, and admit what waits for them."""
        self._release(client, handles)
        if self.update() or self._drained(self.clock()):  # else others hold all of them still
            self.admit()

    def revoke(self, handle: int, keepers: Collection[int] = ()) -> list[int]:
        """Release an adapter for all clients that hold it, except for `keepers`; return these."""
        holders = {client: times for client, times in self.holds.by_client(handle).items() if client not in keepers}
        for client, times in holders.items():
            self._release(client, [handle] * times)
        if holders:
            self.admit()
        return list(holders)

    def _release(self, client: int, handles: Iterable[int]) -> None:
        self.updates.held(client, fewer=self.holds.release(client, handles))

    def _drain_for(self, first: FirstTicket, now: float) -> frozenset[int]:
        self.tickets.waiting.first = first
        return self._drained(now)

    def _drained(self, now: float) -> frozenset[int]:
        """Return the adapters that are drained for the first ticket."""
        first, order = self.tickets.waiting.first, self.tickets.waiting
        if first is None or first.key not in order:
            return frozenset()
        return first.drained(now, order.first_seconds, self.capacity, self.holds)

    def forget_client(self, client: int) -> None:
        """Remove a client that is gone, with all that it held or waited for."""
        self.tickets.forget_client(client)
        self.holds.forget_client(client)
        self.updates.forget_client(client)
        self.admit()

    def restore(self, client: int, handles: Iterable[int]) -> None:
        """Take what a client held under an earlier controller."""
        self.holds.restore(client, handles)
        self.updates.restored(client, self.holds.of(client))
        self.admit()

    # -- the queue

    def admit(self, new: tuple[TicketKey, Ticket] | None = None) -> None:
        """Admit every queued ticket that the rule allows now. Call it whenever capacity may have become free.

        `new`: all that changed is that this ticket came. If it takes no new place, the others are as they were.
        """
        self.update()
        order, now = self.tickets.waiting, self.clock()
        if self.paused:
            order.first = None
        elif new is None or self.capacity.takes_place(set(self.resolve(new[1].names))):
            self._admit_in_order(now)
        elif order.is_behind_first(new[0], now):
            self._admit_if_allowed(*new, self._drained(now), now)
        elif lacking := self._admit_if_allowed(*new, frozenset(), now):
            self._drain_for(FirstTicket(*new, lacking), now)
        for key, ticket, took_place in self._answered:
            order.discard(key) if ticket.error is not None else order.admit(key, took_place)
        self._answered.clear()
        if not order:
            order.clear()
        self.updates.flush()

    def _admit_in_order(self, now: float) -> None:
        """Look at the tickets in order, from the first that finds no place on only at those that might."""
        order, first, drained = self.tickets.waiting, None, frozenset[int]()
        for names in order.names():
            with suppress(LoraServerError):  # the ticket's answer
                order.expect(names, self.loads.expected(self.resolve(names)))
        order.first, fitting = None, set[tuple[str, ...]]()
        for key, ticket in order.sequence(now):
            if first is not None and ticket.names not in fitting:
                if not fitting:
                    return
                continue
            had = len(self.capacity.in_use)
            lacking = self._admit_if_allowed(key, ticket, drained, now)
            if first is None and lacking:
                first = FirstTicket(key, ticket, lacking)
                drained = self._drain_for(first, now)
                fitting = self._answerable(order.names())
            elif first is not None and len(self.capacity.in_use) > had:
                fitting = self._answerable(fitting)
            elif ticket.handles is None and ticket.error is None:
                fitting.discard(ticket.names)

    def _answerable(self, wanted: Iterable[tuple[str, ...]]) -> set[tuple[str, ...]]:
        """Return those of these names whose tickets can be answered: there is a place for them, or an error. With all
        places taken an error waits until there is one, or the ticket is first."""
        single, found = dict[tuple[str, ...], int](), set[tuple[str, ...]]()
        for names in wanted:
            if len(names) > 1:
                if self._may_answer(names):
                    found.add(names)
                continue
            try:
                (single[names],) = self.resolve(names)
            except LoraServerError:
                found.add(names)
        told = self.capacity.answerable(list(single.values()))
        return found | {names for names, may in zip(single, told, strict=True) if may}

    def _may_answer(self, names: tuple[str, ...]) -> bool:
        try:
            handles = set(self.resolve(names))
            if self.capacity.is_taken:
                return handles <= self.capacity.in_use
            self.capacity.check(names, handles)
        except LoraServerError:
            return True
        return self.capacity.sizes.unmeasured(handles) is None and not self.capacity.lacking(handles)

    def answer(self, failed: Mapping[int, LoraServerError]) -> bool:
        """Answer the tickets with loaded adapters, and those with one in `failed`, which then hold nothing.

        Return whether any was answered.
        """
        now, any_answered = self.clock(), False
        for key, ticket in list(self.tickets.loading.items()):
            ticket.error = self.loads.error(ticket, failed, now)
            if ticket.error is not None:
                self._release(key[0], ticket.handles or ())
                ticket.handles = None
            elif self.loads.is_awaited(ticket):
                continue
            del self.tickets.loading[key]
            self.counters.loaded(ticket, now)
            any_answered = True
        self.updates.flush()
        return any_answered

    def _admit_if_allowed(self, key: TicketKey, ticket: Ticket, drained: Set[int], now: float) -> set[int]:
        """Admit a ticket beside the drained adapters, or end it with an error; return the handles that it wants if
        there is no place for them."""
        try:
            handles = self.resolve(ticket.names)
            self.capacity.check(ticket.names, set(handles))
        except LoraServerError as error:
            ticket.error = error
            self._answered.append((key, ticket, False))
            return set()
        wanted, capacity = set(handles), self.capacity
        if capacity.sizes.unmeasured(wanted) is not None or (drained and not wanted <= capacity.in_use - drained):
            return set()
        if capacity.lacking(wanted):
            return wanted
        self._admit(key, ticket, handles, now)
        return set()

    def _admit(self, key: TicketKey, ticket: Ticket, handles: list[int], now: float) -> None:
        self._answered.append((key, ticket, not self.capacity.in_use >= set(handles)))
        ticket.handles, ticket.admitted = handles, now
        if key[1] and self.loads.is_awaited(ticket):  # a ticket of number 0 is answered now
            self.tickets.loading[key] = ticket
        if len(handles) > 1:
            self._note_batch(frozenset(handles), now)
        hits = sum(map(self.loads.is_resident, handles))
        self.counters.hits += hits
        self.counters.misses += len(handles) - hits
        self.updates.held(key[0], more=self.holds.acquire(key[0], handles))
        self.counters.admit(key[0], ticket, now)
        self.update(ticket.trace)

    def _note_batch(self, handles: frozenset[int], now: float) -> None:
        self._batches.pop(handles, None)
        self._batches[handles] = now
        if len(self._batches) > MOST_BATCHES:
            del self._batches[next(iter(self._batches))]

    def last_batches(self) -> list[frozenset[int]]:
        """Return the handles that tickets wanted together within BATCH_SECONDS, MOST_BATCHES at most."""
        since = self.clock() - BATCH_SECONDS
        return [handles for handles, at in self._batches.items() if at >= since]

    def update(self, trace: Mapping[str, str] = telemetry.NOTHING) -> bool:
        """Note which adapters became active or inactive, and return whether any went out of use. `trace` is that of the
        request that caused it."""
        in_use, moved = self.holds.in_use()
        self.updates.active(*self.capacity.set_in_use(in_use, moved), trace)
        return not moved <= in_use

    def _position(self, key: TicketKey, ticket: Ticket) -> QueuePosition:
        position = self.tickets.waiting.position(key, self.clock())
        if self.paused:
            return QueuePosition(position, self.paused)
        handles = self.resolve(ticket.names)
        shard = self.capacity.sizes.unmeasured(handles)
        if shard is not None:
            return QueuePosition(position, f"shard {shard} has not looked at its files yet")
        return QueuePosition(position, self.capacity.lacking(set(handles)) or "earlier requests go first")
