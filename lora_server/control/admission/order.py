"""The order of the admission queue, fair between tenants, and the adapters that are drained for its first ticket."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Set
from heapq import merge
from itertools import count
from typing import NamedTuple

from lora_server.control.admission.capacity import PoolCapacity
from lora_server.control.admission.holds import ClientHolds
from lora_server.control.admission.margin import LATE, nanoseconds
from lora_server.control.admission.names import TenantNames
from lora_server.control.admission.ranking import RankedTicket, TenantRanking
from lora_server.control.admission.tickets import Ticket, TicketKey
from lora_server.timings import Timings


class _Waiting(NamedTuple):
    key: TicketKey
    ticket: Ticket
    serial: int


class FirstTicket(NamedTuple):
    """The first ticket in the order that is measured and found no place at the last look; `wanted` are handles."""

    key: TicketKey
    ticket: Ticket
    wanted: Set[int]

    def drained(self, now: float, first_seconds: float, capacity: PoolCapacity, holds: ClientHolds) -> frozenset[int]:
        """Return the adapters in use that take no new holds, so that this ticket gets a place: those with the fewest
        holds, as many as it needs, once it has been first for `first_seconds`, or for a part of its objective if that
        is less; and one more every `first_seconds`."""
        if self.ticket.first_since is None:
            self.ticket.first_since = now
        patience = min(first_seconds, self.ticket.slo.objective / LATE)
        if (over := now - self.ticket.first_since - patience) < 0:
            return frozenset()
        fewest = sorted(capacity.in_use - self.wanted, key=lambda handle: (holds.by_client(handle).total(), handle))
        needed = 0
        while capacity.lacking(self.wanted, frozenset(fewest[:needed])) and needed < len(fewest):
            needed += 1
        return frozenset(fewest[: needed + int(over / first_seconds)])


class AdmissionOrder:
    """The tickets that wait, and their order. Not thread-safe: `AdmissionService` has the lock.

    Within a tenant the order is that of `TenantRanking`; without SLO classes, the first to come is first. Between
    tenants each ticket begins where what its tenant has been given, and asked for earlier, ends: an adapter counts for
    one, divided by the tenant's weight. A tenant that begins to wait begins where the others are, so no tenant saves up
    for later, and others pass a long queue of one tenant's.
    """

    def __init__(self, first_seconds: float = Timings.first_in_queue) -> None:
        self.first_seconds = first_seconds
        self._waiting: dict[TicketKey, _Waiting] = {}  # in the order in which they came
        self._by_serial: dict[int, _Waiting] = {}
        self._serials = count(1)
        self._tenants: dict[str, TenantRanking] = {}  # those that waited since a ticket has been waiting
        self.first: FirstTicket | None = None
        self.by_class: Counter[str] = Counter()  # how many wait
        self.wanted = TenantNames()
        self._by_names: dict[tuple[str, ...], dict[TicketKey, None]] = {}  # they find a place, or not, alike
        self._now = 0.0  # where the ticket that was admitted last began

    def __contains__(self, key: TicketKey) -> bool:
        return key in self._waiting

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[TicketKey]:
        return iter(self._waiting)

    # -- changes

    def add(self, key: TicketKey, ticket: Ticket) -> None:
        """Append a ticket. Its tenant begins to wait if it has no other ticket."""
        tenant = self._tenants.setdefault(ticket.tenant, TenantRanking())
        if not tenant:
            tenant.had = max(tenant.had, self._now)
        one = self._waiting[key] = _Waiting(key, ticket, next(self._serials))
        self._by_serial[one.serial] = one
        self.by_class[ticket.slo.name] += 1
        for name in ticket.names:
            self.wanted.count(name, 1)
        self._by_names.setdefault(ticket.names, {})[key] = None
        times = (nanoseconds(ticket.slo.objective), nanoseconds(ticket.since), nanoseconds(ticket.load))
        tenant.add(RankedTicket(one.serial, _cost(ticket), *times))
        self.expect(ticket.names, ticket.load)

    def expect(self, names: tuple[str, ...], load: float) -> None:
        """Change the seconds that loading these adapters is expected to take, in all tickets that want them."""
        for one in map(self._waiting.__getitem__, self._by_names[names]):
            if one.ticket.load == load:
                return  # so it is in all of them: `add` brings them to one
            one.ticket.load = load
            self._tenants[one.ticket.tenant].expect(one.serial, nanoseconds(load))

    def discard(self, key: TicketKey) -> None:
        """Remove a ticket, if it waits."""
        if (one := self._waiting.pop(key, None)) is not None:
            del self._by_serial[one.serial]
            self.by_class[one.ticket.slo.name] -= 1
            for name in one.ticket.names:
                self.wanted.count(name, -1)
            alike = self._by_names[one.ticket.names]
            del alike[key]
            if not alike:
                del self._by_names[one.ticket.names]
            self._tenants[one.ticket.tenant].remove(one.serial)

    def admit(self, key: TicketKey, takes_place: bool) -> None:
        """Remove a ticket that is admitted, and count what it was given. `takes_place`: of adapters that were not in
        use, so it overtook the tickets that came before it."""
        one = self._waiting[key]
        tenant = self._tenants[one.ticket.tenant]
        self._now = max(self._now, tenant.had)
        tenant.had += _cost(one.ticket)
        if takes_place:
            tenant.count(one.serial)
        self.discard(key)

    def clear(self) -> None:
        """Forget all shares: no ticket waits any more."""
        self._tenants.clear()
        self._now = 0.0

    # -- questions

    def sequence(self, now: float) -> Iterator[tuple[TicketKey, Ticket]]:
        """Yield the tickets in the order in which they are to be served; ends with the next change of the order."""
        for _, serial in merge(*(_begins(tenant) for tenant in self._look(now))):
            one = self._by_serial[serial]
            yield one.key, one.ticket

    def names(self) -> list[tuple[str, ...]]:
        """Return the names that tickets want, each once."""
        return list(self._by_names)

    def position(self, key: TicketKey, now: float) -> int:
        """Return a ticket's position in that order, from 1 on, without making it."""
        one = self._waiting[key]
        tenants, own = self._look(now), self._tenants[one.ticket.tenant]
        ahead = own.index(one.serial)
        begins = own.begins(ahead)
        return 1 + ahead + sum(tenant.num_before(begins, one.serial) for tenant in tenants if tenant is not own)

    def _look(self, now: float) -> list[TenantRanking]:
        tenants = [tenant for tenant in self._tenants.values() if tenant]
        for tenant in tenants:
            tenant.look(nanoseconds(now))
        return tenants

    def is_behind_first(self, key: TicketKey, now: float) -> bool:
        """Return whether a ticket comes after the first, if that still waits."""
        first = self.first
        if first is None or first.key not in self:
            return False
        self._look(now)
        return self._begins(first.key) < self._begins(key)

    def _begins(self, key: TicketKey) -> tuple[float, int]:
        """Return the place of a ticket in the order."""
        one = self._waiting[key]
        tenant = self._tenants[one.ticket.tenant]
        return tenant.begins(tenant.index(one.serial)), one.serial


def _cost(ticket: Ticket) -> float:
    return len(ticket.names) / ticket.weight


def _begins(tenant: TenantRanking) -> Iterator[tuple[float, int]]:
    return ((tenant.begins(index), serial) for index, serial in enumerate(tenant.order()))
