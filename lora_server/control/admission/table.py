"""The table of open tickets."""

from __future__ import annotations

from collections.abc import Iterable

from lora_server import telemetry
from lora_server.control.admission.order import AdmissionOrder
from lora_server.control.admission.tickets import Ticket, TicketKey
from lora_server.errors import AdmissionError

MAX_TICKETS = 16_384  # of one client that are not settled


class TicketTable:
    """Open tickets, by client and number. Not thread-safe: `AdmissionService` has the lock.

    A client that repeats a number gets the same ticket until it settles it. Tickets of number 0 are not kept.
    """

    def __init__(self, waiting: AdmissionOrder | None = None) -> None:
        self.waiting = AdmissionOrder() if waiting is None else waiting  # for a place
        self.loading: dict[TicketKey, Ticket] = {}  # admitted, and not answered yet
        self._by_client: dict[int, dict[int, Ticket]] = {}

    def find(self, key: TicketKey) -> Ticket | None:
        """Return a ticket that is not settled."""
        return self._by_client.get(key[0], {}).get(key[1])

    @property
    def any_open(self) -> bool:
        """Whether any ticket has no answer yet."""
        return bool(self.waiting or self.loading)

    def is_open(self, key: TicketKey) -> bool:
        """Return whether a ticket has no answer yet; one that is unknown is not open."""
        return key in self.waiting or key in self.loading

    def check(self, client: int, more: int = 1, most: int = MAX_TICKETS) -> None:
        """Raise AdmissionError where a client would have more than `most` tickets."""
        if (tickets := len(self._by_client.get(client, ()))) + more > most:
            raise AdmissionError(f"client {client}: {tickets} open requests, as many as a client may have; end some")

    def add(self, key: TicketKey, ticket: Ticket) -> None:
        """Append a ticket to those that wait."""
        self.waiting.add(key, ticket)
        if key[1]:
            self._by_client.setdefault(key[0], {})[key[1]] = ticket

    def cancelled(self, client: int, numbers: Iterable[int], now: float) -> list[Ticket]:
        """Return these tickets, which are not open any more; one that is yet to come is there already, cancelled.

        Raises AdmissionError for too many of those.
        """
        unknown = {*numbers} - self._by_client.get(client, {}).keys()
        self.check(client, len(unknown), 2 * MAX_TICKETS)  # as many as it has, and as many that come late
        tickets = self._by_client.setdefault(client, {})
        tickets |= {number: Ticket((), now, trace=telemetry.NOTHING) for number in unknown}
        for number in {*numbers}:
            self._close((client, number))
        return [tickets[number] for number in {*numbers}]

    def drop(self, key: TicketKey) -> None:
        """Remove a ticket, waiting or not."""
        client, number = key
        self._close(key)
        tickets = self._by_client.get(client, {})
        tickets.pop(number, None)
        if not tickets:
            self._by_client.pop(client, None)

    def forget_client(self, client: int) -> None:
        """Remove all of a client's."""
        for number in self._by_client.pop(client, {}):
            self._close((client, number))

    def _close(self, key: TicketKey) -> None:
        self.waiting.discard(key)
        self.loading.pop(key, None)

    def __len__(self) -> int:
        return sum(map(len, self._by_client.values()))
