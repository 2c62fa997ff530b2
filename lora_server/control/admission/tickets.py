"""Tickets: clients' requests for adapters, their SLO classes, and the loads that admitted ones wait for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from lora_server import telemetry
from lora_server.control.adapters.records import Record
from lora_server.errors import AdapterNotLoadedError, LoraServerError
from lora_server.slo import NamedSlo, SloClasses
from lora_server.spec import PROJECTIONS, ModelSpec
from lora_server.timings import Timings

TicketKey = tuple[int, int]  # client, number


class TicketClass(NamedTuple):
    """The SLO class of a ticket: its name, and the seconds to the first token that it promises."""

    name: str = ""
    objective: float = math.inf


NO_CLASS = TicketClass()


@dataclass
class Ticket:
    """A client's request to hold adapters. It is answered by the `handles` that the client now holds, or by `error`."""

    names: tuple[str, ...]
    since: float
    tenant: str = ""
    weight: float = 1.0
    pace: float | None = None  # seconds that its adapters may still load when it is answered; None: any
    slo: TicketClass = NO_CLASS
    load: float = 0.0  # seconds that loading its adapters is expected to take
    first_since: float | None = None  # when it became the first measured ticket
    waited: bool = False
    admitted: float = 0.0  # when it was given places
    handles: list[int] | None = None
    error: LoraServerError | None = None
    trace: Mapping[str, str] = field(default_factory=telemetry.headers)  # of the call that asked for it


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


class EngineClass(NamedTuple):
    """The SLO class of an engine's client; `step_us`: each step's part of its TPOT objective, 0 without a class."""

    name: str = ""
    step_us: int = 0


NO_ENGINE_CLASS = EngineClass()


class AdmissionClasses:
    """Finds classes. A class that was given by name and is not among --classes any more counts as none. Thread-safe."""

    def __init__(self, classes: SloClasses, find: Callable[[str], Record | None]) -> None:
        """`find` returns the listed adapter of a name."""
        self.known, self._find = classes, find

    def of(self, names: Iterable[str], tenants: str = "") -> TicketClass:
        """Return the strictest class of these adapters, for a tenant with a class of its own or without."""
        found = [one for one in (self.of_adapter(name, tenants) for name in names) if one is not None]
        strictest = min(found, key=lambda one: one.slo.ttft_us, default=None)
        return NO_CLASS if strictest is None else TicketClass(strictest.name, strictest.slo.ttft_us * 1e-6)

    def of_adapter(self, name: str, tenants: str = "") -> NamedSlo | None:
        """Return the class of a request for one adapter."""
        record = self._find(name)
        own = record.slo_class if record is not None else ""
        return self.known.find(own or tenants) or self.known.of_adapter(name)

    def of_engine(self, asked: str, tenants: str, spec: ModelSpec) -> EngineClass:
        """Return the class of a client that asks for one, or has its tenant's. A pass has a step at every site, which
        share its TPOT evenly. Raises ConfigError for one that is not known."""
        self.known.check(asked)
        num_sites = spec.layers * len(PROJECTIONS)
        found = self.known.find(asked or tenants)
        return NO_ENGINE_CLASS if found is None else EngineClass(found.name, int(found.slo.tpot_us / num_sites) or 1)

    def shown(self, record: Record) -> str:
        """Return the name of an adapter's class as users see it, also of one that is not known; empty: none."""
        by_name = self.known.of_adapter(record.name)
        return record.slo_class or (by_name.name if by_name is not None else "")
