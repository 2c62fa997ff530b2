"""The waiting tickets of one tenant, ranked by deadline margin. Every answer takes a few binary searches.

A margin shrinks with time until it stops (`margin`). So two sorted lists give the order at any time: tickets with a
margin that still shrinks, by deadline, and all others, by margin. Equal margins: the first to come is first.

No ticket starves: once OVERTAKES others took a place since the oldest ticket's turn, the oldest is first.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Iterator
from heapq import heappop, heappush, merge
from itertools import chain
from typing import NamedTuple

from lora_server.control.admission.margin import ENDLESS, deadline, late_margin

OVERTAKES = 3  # of four places that a tenant's waiting tickets get, at least one goes to the oldest


class RankedTicket(NamedTuple):
    """A ticket's numbers: `serial` counts tickets as they come, `cost` is of its tenant's share. Nanoseconds."""

    serial: int
    cost: float
    objective: int
    since: int
    load: int

    @property
    def deadline(self) -> tuple[int, int]:
        """The place among tickets with a margin that shrinks."""
        return deadline(self.objective, self.since, self.load), self.serial

    @property
    def settled(self) -> tuple[int, int]:
        """The place among tickets with a margin that has stopped."""
        return late_margin(self.objective), self.serial

    @property
    def settles(self) -> int:
        """The time when its margin stops."""
        return 0 if self.objective == ENDLESS else self.deadline[0] - self.settled[0]


class MarginRanking:
    """Tickets by margin. Not thread-safe. Time never goes back."""

    def __init__(self) -> None:
        self._shrinking: list[tuple[int, int]] = []
        self._settled: list[tuple[int, int]] = []
        self._settling: list[tuple[int, RankedTicket]] = []  # a heap, by the time when a ticket settles
        self._now = 0

    def add(self, ticket: RankedTicket) -> None:
        """Take in a ticket."""
        if ticket.settles <= self._now:
            insort(self._settled, ticket.settled)
        else:
            insort(self._shrinking, ticket.deadline)
            heappush(self._settling, (ticket.settles, ticket))

    def remove(self, ticket: RankedTicket) -> None:
        """Remove a ticket."""
        if not _take(self._shrinking, ticket.deadline):
            _take(self._settled, ticket.settled)

    def look(self, now: int) -> None:
        """Settle the tickets with a margin that has stopped by now. Call it before the questions below."""
        self._now = now
        while self._settling and self._settling[0][0] <= now:
            _, ticket = heappop(self._settling)
            if _take(self._shrinking, ticket.deadline):  # otherwise it was removed
                insort(self._settled, ticket.settled)

    def index(self, ticket: RankedTicket) -> int:
        """Return the index of a ticket in the order."""
        place = bisect_left(self._shrinking, ticket.deadline)
        if place < len(self._shrinking) and self._shrinking[place] == ticket.deadline:
            return self._index_of_shrinking(place)
        margin, serial = ticket.settled
        before = bisect_left(self._shrinking, (margin + self._now, serial))
        return before + bisect_left(self._settled, ticket.settled)

    def at(self, index: int) -> int:
        """Return the serial of the ticket of this index."""
        shrinking = self._shrinking
        place = bisect_left(range(len(shrinking)), index, key=self._index_of_shrinking)
        if place < len(shrinking) and self._index_of_shrinking(place) == index:
            return shrinking[place][1]
        return self._settled[index - place][1]

    def order(self) -> Iterator[int]:
        """Yield all serials in order."""
        shrinking = ((deadline - self._now, serial) for deadline, serial in self._shrinking)
        return (serial for _, serial in merge(shrinking, self._settled))

    def _index_of_shrinking(self, place: int) -> int:
        deadline, serial = self._shrinking[place]
        return place + bisect_left(self._settled, (deadline - self._now, serial))


class TenantRanking:
    """Ranks one tenant's tickets. `had` is what the tenant was given: its first ticket begins there, each later one by
    the tickets' mean cost later. Not thread-safe: `AdmissionService` has the lock."""

    def __init__(self) -> None:
        self.had = 0.0
        self._tickets: OrderedDict[int, RankedTicket] = OrderedDict()  # by serial, the oldest first
        self._by_margin = MarginRanking()
        self._costs: Counter[float] = Counter()
        self._overtaken = 0

    def __len__(self) -> int:
        return len(self._tickets)

    # -- changes

    def add(self, ticket: RankedTicket) -> None:
        """Take in a ticket that begins to wait; serials come in ascending order."""
        self._tickets[ticket.serial] = ticket
        self._costs[ticket.cost] += 1
        self._by_margin.add(ticket)

    def remove(self, serial: int) -> None:
        """Remove a ticket that waits no more."""
        ticket = self._tickets.pop(serial)
        self._costs[ticket.cost] -= 1
        if not self._costs[ticket.cost]:
            del self._costs[ticket.cost]
        self._by_margin.remove(ticket)

    def expect(self, serial: int, load: int) -> None:
        """Change the load that is expected of a ticket's adapters."""
        ticket = self._tickets[serial]
        if ticket.load != load and ticket.objective != ENDLESS:
            self._by_margin.remove(ticket)
            ticket = self._tickets[serial] = ticket._replace(load=load)
            self._by_margin.add(ticket)

    def count(self, serial: int) -> None:
        """Count a place that a ticket takes, before it is removed."""
        self._overtaken = 0 if serial == self._oldest else self._overtaken + 1

    def look(self, now: int) -> None:
        """Take what time it is. Call it before the questions below."""
        self._by_margin.look(now)

    # -- questions

    @property
    def _oldest(self) -> int:
        return next(iter(self._tickets))

    def begins(self, index: int) -> float:
        """Return where the ticket of this index begins in its tenant's share."""
        return self.had + index * self._mean_cost()

    def _mean_cost(self) -> float:
        if len(self._costs) == 1:  # the usual case, and exact
            return next(iter(self._costs))
        return sum(cost * count for cost, count in self._costs.items()) / len(self)

    def index(self, serial: int) -> int:
        """Return the index of a ticket in the order."""
        found = self._by_margin.index(self._tickets[serial])
        if self._overtaken < OVERTAKES or serial == (oldest := self._oldest):
            return 0 if self._overtaken >= OVERTAKES else found
        return found + (found < self._by_margin.index(self._tickets[oldest]))

    def at(self, index: int) -> int:
        """Return the serial of the ticket of this index."""
        if self._overtaken >= OVERTAKES:
            if index == 0:
                return self._oldest
            index -= index <= self._by_margin.index(self._tickets[self._oldest])
        return self._by_margin.at(index)

    def num_before(self, begins: float, serial: int) -> int:
        """Return how many tickets begin before this, or with it and came before that serial."""
        found = bisect_left(range(len(self)), begins, key=self.begins)
        return found + (found < len(self) and self.begins(found) == begins and self.at(found) < serial)

    def order(self) -> Iterator[int]:
        """Yield all serials in order."""
        serials = self._by_margin.order()
        if self._overtaken < OVERTAKES:
            return serials
        return chain((self._oldest,), (serial for serial in serials if serial != self._oldest))


def _take(places: list[tuple[int, int]], place: tuple[int, int]) -> bool:
    """Remove a place from a sorted list; return whether it was there."""
    at = bisect_left(places, place)
    if at == len(places) or places[at] != place:
        return False
    del places[at]
    return True
