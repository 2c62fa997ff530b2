"""The objects that know a server's adapters, put together: each is handed what stands below it, and calls it."""

from __future__ import annotations

from typing import NamedTuple

from lora_server.clock import SYSTEM, Clock
from lora_server.control.adapters.allowed import NOWHERE, Allowed
from lora_server.control.adapters.catalog import AdapterCatalog, CatalogLedger
from lora_server.control.adapters.changes import CatalogChanges
from lora_server.control.adapters.directory import DirectorySource
from lora_server.control.adapters.files import AdapterFiles
from lora_server.control.adapters.listings import AdapterListings
from lora_server.control.adapters.peers import PeerSource
from lora_server.control.adapters.refusals import UpdateFailures
from lora_server.control.adapters.restart import CatalogRecovery
from lora_server.control.adapters.rollout import AdapterRollout
from lora_server.control.admission.service import AdmissionService
from lora_server.control.events.log import EventLog
from lora_server.control.members.agreement import Agreement
from lora_server.control.members.leases import Leases
from lora_server.control.members.shards import ShardTable
from lora_server.control.start import StartState
from lora_server.control.sync.shard_sync import ShardSync
from lora_server.registry.versions import Ledger
from lora_server.slo import NO_CLASSES, SloClasses
from lora_server.sources.copies import Copies
from lora_server.sources.fetch import Fetcher
from lora_server.timings import DEFAULTS, Timings


class ServerAdapters(NamedTuple):
    """The objects that make up a server's adapters, each listed before those that call it.

    `CatalogChanges` documents the order in which their locks are taken.
    """

    catalog: AdapterCatalog
    sync: ShardSync
    admission: AdmissionService
    files: AdapterFiles
    listings: AdapterListings
    changes: CatalogChanges
    rollout: AdapterRollout
    directory: DirectorySource
    peers: PeerSource
    recovery: CatalogRecovery
    events: EventLog

    @classmethod
    def of(
        cls,
        agreement: Agreement,
        shards: ShardTable,
        start: StartState,
        leases: Leases,
        most_active: int = 0,
        fetcher: Fetcher | None = None,
        allowed: Allowed = NOWHERE,
        ledger: Ledger | None = None,
        copies: Copies | None = None,
        timings: Timings = DEFAULTS,
        clock: Clock = SYSTEM,
        classes: SloClasses = NO_CLASSES,
        events: EventLog | None = None,
    ) -> ServerAdapters:
        """`most_active`: see PoolCapacity; `fetcher` fetches remote adapters; `allowed`: where those that are added may
        lie; `ledger` has for good what is added by name, `copies` its files. Raises ServerUnavailableError."""
        spec, events = agreement.spec, events or EventLog(clock)
        catalog = AdapterCatalog(start, leases, CatalogLedger(ledger))
        sync = ShardSync(shards, catalog, start, agreement.placement, events)
        admission = AdmissionService(catalog, sync, most_active, timings, clock, classes, events, leases.merged_in)
        files = AdapterFiles(spec, catalog, fetcher, copies)
        failures = UpdateFailures(ledger.attempts if ledger is not None else None)
        changes = CatalogChanges(catalog, sync, admission, failures, timings, clock, events)
        return cls(
            catalog,
            sync,
            admission,
            files,
            AdapterListings(catalog, sync, admission, failures, spec.layers),
            changes,
            AdapterRollout(changes, files, allowed, clock),
            DirectorySource(changes, spec, timings, clock),
            PeerSource(changes, files, timings),
            CatalogRecovery(catalog, files),
            events,
        )
