"""The SLO class of a ticket: that of its adapters, else its tenant's, else what --classes says of their names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from lora_server.control.adapters.records import Record
from lora_server.control.admission.tickets import NO_CLASS, TicketClass
from lora_server.slo import NamedSlo, SloClasses
from lora_server.spec import PROJECTIONS, ModelSpec


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
