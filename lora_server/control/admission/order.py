"""The order of the admission queue, fair between tenants, and the adapters that are drained for its first ticket."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from lora_server.control.admission.capacity import PoolCapacity
from lora_server.control.admission.holds import ClientHolds
from lora_server.control.admission.tickets import Ticket, TicketKey
from lora_server.timings import Timings


class AdmissionOrder:
    """Tenants' shares while tickets wait. Not thread-safe: `AdmissionService` has the lock.

    Within a tenant the first to come is first. Between tenants each ticket begins where what its tenant has been
    given, and asked for earlier, ends: an adapter counts for one, divided by the tenant's weight. A tenant that begins
    to wait begins where the others are, so no tenant saves up for later, and others pass a long queue of one tenant's.
    """

    def __init__(self, first_seconds: float = Timings.first_in_queue) -> None:
        self._first_seconds = first_seconds
        self._had: dict[str, float] = {}  # by tenant, since a ticket has been waiting
        self._now = 0.0  # where the ticket that was admitted last began

    def join(self, ticket: Ticket, waiting: Iterable[Ticket]) -> None:
        """Take in a ticket's tenant, which begins to wait if it has no other ticket among `waiting`."""
        if all(one.tenant != ticket.tenant for one in waiting):
            self._had[ticket.tenant] = max(self._had.get(ticket.tenant, 0.0), self._now)

    def sort(self, waiting: Mapping[TicketKey, Ticket]) -> list[tuple[TicketKey, Ticket]]:
        """Return the tickets in the order in which they are to be served."""
        ends, begins = dict(self._had), dict[TicketKey, float]()
        for key, ticket in waiting.items():
            begins[key] = ends[ticket.tenant]
            ends[ticket.tenant] += len(ticket.names) / ticket.weight
        return sorted(waiting.items(), key=lambda one: begins[one[0]])  # of equals, the first to come

    def admitted(self, ticket: Ticket) -> None:
        """Count what a ticket was given."""
        self._now = max(self._now, self._had[ticket.tenant])
        self._had[ticket.tenant] += len(ticket.names) / ticket.weight

    def clear(self) -> None:
        """Forget all shares: no ticket waits any more."""
        self._had.clear()
        self._now = 0.0

    def drained_for(
        self, first: Ticket, wanted: Set[int], now: float, capacity: PoolCapacity, holds: ClientHolds
    ) -> frozenset[int]:
        """Return the adapters in use that take no new holds, so that the first ticket gets a place: those with the
        fewest holds, as many as it needs, and one more every `first_seconds`."""
        if first.first_since is None:
            first.first_since = now
        turns = int((now - first.first_since) / self._first_seconds)
        if not turns:
            return frozenset()
        fewest = sorted(capacity.in_use - wanted, key=lambda handle: (holds.by_client(handle).total(), handle))
        needed = 0
        while capacity.lacking(wanted, frozenset(fewest[:needed])) and needed < len(fewest):
            needed += 1
        return frozenset(fewest[: needed + turns - 1])
