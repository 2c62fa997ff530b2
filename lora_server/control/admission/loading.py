"""The load of admitted tickets' adapters: how long it still takes, and how it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from lora_server.control.admission.tickets import Ticket
from lora_server.errors import AdapterNotLoadedError, LoraServerError
from lora_server.timings import Timings


class TicketLoads:
    """Judges which admitted tickets are answered, and which wait since their adapters load for longer than their pace.

    `seconds_left` returns how long an adapter still loads on the slowest shard: 0 once it is loaded, infinity if that
    is unknown. A ticket fails with AdapterNotLoadedError after `limit_seconds`.
    """

    def __init__(
        self, seconds_left: Callable[[int], float] = lambda handle: 0.0, limit_seconds: float = Timings.loading
    ) -> None:
        self._seconds_left, self._limit_seconds = seconds_left, limit_seconds

    def is_resident(self, handle: int) -> bool:
        """Return whether all of an adapter is loaded."""
        return not self._seconds_left(handle)

    def seconds_left(self, ticket: Ticket) -> float:
        """Return how long a ticket's adapters still load."""
        return self.expected(ticket.handles or ())

    def expected(self, handles: Iterable[int]) -> float:
        """Return how long these are expected to load; infinity if that is unknown."""
        return max(map(self._seconds_left, handles), default=0.0)

    def is_awaited(self, ticket: Ticket) -> bool:
        """Return whether an admitted ticket waits for its adapters."""
        return ticket.pace is not None and self.seconds_left(ticket) > ticket.pace

    def error(self, ticket: Ticket, failed: Mapping[int, LoraServerError], now: float) -> LoraServerError | None:
        """Return why a ticket's load is over; `failed`: errors of loads that have just failed, by handle."""
        for name, handle in zip(ticket.names, ticket.handles or (), strict=True):
            if (error := failed.get(handle)) is not None:
                return type(error)(f"adapter {name!r}: {error}")
        if now < ticket.admitted + self._limit_seconds:
            return None
        return AdapterNotLoadedError(
            f"adapters {list(ticket.names)}: still loading {self._limit_seconds:g} s after they were admitted; "
            "see the logs of the shards, and `lora-server adapters show`"
        )
