"""The steps by which names change: the ledger has each before shards are told, and shards before clients."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import structlog

from lora_server.clock import SYSTEM, Clock
from lora_server.control.adapters.catalog import AdapterCatalog
from lora_server.control.adapters.records import Record, described
from lora_server.control.adapters.refusals import RefusedAdapter, UpdateFailures
from lora_server.control.admission.service import AdmissionService
from lora_server.control.events.log import EventLog
from lora_server.control.members.shards import PendingCommand, wait_all
from lora_server.control.sync.shard_sync import ShardSync
from lora_server.errors import AdapterExistsError, LoraServerError
from lora_server.timings import DEFAULTS, Timings
from lora_server.wire.events import ADAPTER, AdapterAdded, AdapterRefused, AdapterRemoved, AdapterUpdated

log = structlog.get_logger()


class CatalogChanges:
    """One change of the catalog at a time, whether an operator, a directory or another server asks for it.

    `lock` is held while a name changes. It may wait for the database, and is taken before every other lock, never
    after one; it is free while shards load. The order of the controller's locks: this, `AdmissionService`,
    `ShardSync.lock`, then the leaves (catalog, refusals, holds, residency, sizes, leases, shard table), which call
    nothing while they are held; but holds count in `Tally`, which asks the catalog for a name, and the catalog asks
    refusals and leases.
    """

    def __init__(
        self,
        catalog: AdapterCatalog,
        sync: ShardSync,
        admission: AdmissionService,
        failures: UpdateFailures,
        timings: Timings = DEFAULTS,
        clock: Clock = SYSTEM,
        events: EventLog | None = None,
    ) -> None:
        self.catalog, self.sync, self.admission, self.failures = catalog, sync, admission, failures
        self._timings, self._clock, self._events = timings, clock, events or EventLog(clock)
        self.lock = threading.RLock()

    def existing(self, name: str, version: str) -> Record | None:
        """Return the listed adapter of that name. Raises AdapterExistsError if its content is another."""
        record = self.catalog.find(name)
        if record is not None and record.version != version:
            raise AdapterExistsError(
                f"adapter {name!r}: version {record.version[:12]} is served under this name, got {version[:12]}; "
                f"lora-server adapters update {name} SOURCE puts another in its place"
            )
        return record

    def numbered(self, found: Record) -> Record:
        """Give a record a handle."""
        return replace(found, handle=self.catalog.ledger.next_handle())

    def offer(self, record: Record, eager: bool) -> list[PendingCommand]:
        """List a version under a name that is free or already means it, and tell every live shard. Call with `lock`
        held. Raises AdapterExistsError if an engine's base model has the name."""
        if eager:
            self.admission.tell_ended()  # otherwise shards may find no memory for it, and put it off
        with self.sync.lock:  # shards are told of it before they are told which client holds it
            if self.catalog.by_handle(record.handle) is None:
                self.catalog.publish(record, new=True)
                self._publish(AdapterAdded(*_listed(record)))
            self.accept(record.name)
            return self.sync.load(record, eager=True) if eager else self.sync.register(record)

    def accept(self, name: str) -> None:
        """Take back the refusal of a name that is served now."""
        if self.catalog.refusals.accept(name):
            self.sync.tell_refused()

    def refuse(self, refusal: RefusedAdapter) -> None:
        """Set the refusal of a name."""
        self.catalog.refusals.put(refusal)
        self._publish(AdapterRefused(refusal.name, refusal.code, refusal.reason))

    def _publish(self, event: AdapterAdded | AdapterRemoved | AdapterRefused) -> None:
        self._events.publish(ADAPTER, event.name, event)

    def load_beside(self, record: Record) -> list[PendingCommand]:
        """Have every shard load a version that no client can ask for yet; under `lock`. `replace` follows."""
        self.admission.tell_ended()
        with self.sync.lock:
            self.catalog.put(record, coming=True)
            return self.sync.load(record, eager=True)

    def check_served(self, served: Record) -> None:
        """Raise AdapterExistsError where a name does not mean this version any more."""
        if not self.catalog.is_listed(served):
            raise AdapterExistsError(f"adapter {served.name!r}: was removed or replaced meanwhile; try again")

    def replace(
        self,
        served: Record,
        record: Record,
        loads: Sequence[PendingCommand],
        seconds: float,
        drain_seconds: float | None = None,
        keep: bool = True,
    ) -> None:
        """Make the name mean `record` once every shard has it: first in the ledger, unless it says so already (`keep`),
        then for clients. Raises AdapterLoadError, AdapterExistsError, ServerUnavailableError; nothing is changed."""
        try:
            wait_all(list(loads), seconds, f"loading {record.name!r}")
            with self.lock:
                self.check_served(served)
                if keep:
                    now = self.catalog.get(record.name)
                    record = replace(record, pinned=now.pinned, slo_class=now.slo_class)
                self.catalog.ledger.drains(served, drain_seconds)
                if keep:
                    self.catalog.ledger.added(record, served)
                self.catalog.publish(record)
                self._publish(AdapterUpdated(*_listed(record)))
                self.failures.forget(record.name)
                self.accept(record.name)
                self.cut_off(served, drain_seconds)
                for one in (served, record):  # the old one may be evicted first
                    self.sync.note(one.handle)
                was = {"replaced": served.version[:12], "holders": self.holders(served)}
                log.info("adapter replaced", **described(record), **was)
        finally:
            self.catalog.abandon(record.handle)
            self.admission.collect()

    def holders(self, record: Record) -> int:
        """Return how many clients hold a version."""
        return len(self.admission.holds.by_client(record.handle))

    def cut_off(self, record: Record, seconds: float | None) -> None:
        """Take a version that drains from its clients in so long; None: never."""
        if seconds is not None:
            self.admission.cut_off_at({record.handle: self._clock.time() + max(0.0, seconds)})

    def unlist(self, record: Record, **why: str) -> list[PendingCommand]:
        """Stop offering a name that the ledger has not any more, and have shards keep that; under `lock`."""
        self.catalog.unlist(record.name)
        self._publish(AdapterRemoved(record.name, record.version))
        self.failures.forget(record.name)
        log.info("adapter removed", **described(record), holders=self.holders(record), **why)
        return self.sync.note(record.handle)

    def amend(self, record: Record, **fields: Any) -> None:
        """Write fields of a listed adapter to the ledger, and have shards keep them, for the next controller."""
        with self.lock:
            self.check_served(record)
            record = replace(self.catalog.get(record.name), **fields)
            self.catalog.ledger.updated(record)
            self.catalog.put(record)
            notes = self.sync.note(record.handle)
            self.admission.collect()
        self.wait_noted(notes, record.name)

    def wait_noted(self, notes: list[PendingCommand], name: str) -> None:
        """Wait until every shard keeps a change."""
        try:
            wait_all(notes, self._timings.note, f"noting {name!r}")
        except LoraServerError as error:  # it is going away: it is told when it registers
            log.debug("a shard has not noted a change", name=name, error=str(error))


def _listed(record: Record) -> tuple[str, str, int, int, int]:
    return record.name, record.version, record.handle, record.lora_rank, record.nbytes


def warn(record: Record) -> None:
    """Log what is odd about a version's files."""
    for warning in record.warnings:
        log.warning("adapter", name=record.name, warning=warning)
