"""Recovery of the catalog when a controller starts: from shards that outlived an earlier one, and from the ledger."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from lora_server.control.adapters.catalog import AdapterCatalog
from lora_server.control.adapters.files import AdapterFiles
from lora_server.control.adapters.records import Record, record_of, version_of
from lora_server.registry.versions import Version
from lora_server.wire import lora_server_pb2 as pb


class CatalogRecovery:
    """Rebuilds the catalog after a restart; nothing else changes it until the server is settled.

    Not thread-safe: `Arrivals` has the lock.

    The ledger is the truth for names that it has ever had; a directory's names are as the shards kept them.
    """

    def __init__(self, catalog: AdapterCatalog, files: AdapterFiles) -> None:
        """Read the deadlines of draining versions; raises ServerUnavailableError."""
        self._catalog, self._files = catalog, files
        self._listed, self._not_listed = set[int](), set[int]()  # handles, as shards keep them
        self._gone: set[int] = set()  # handles that an earlier controller dropped
        self.deadlines = catalog.ledger.deadlines()  # by handle, in seconds since 1970

    def adopt(self, kept: Iterable[pb.Load], gone: Iterable[int], last_handle: int) -> None:
        """Take what a shard keeps from an earlier controller of the same run: adapters, and handles that are over."""
        catalog = self._catalog
        catalog.ledger.reserve(last_handle)
        self._gone.update(gone)
        for load in kept:
            record = Record.decode(load.record)
            known, other = catalog.by_handle(record.handle), catalog.find(record.name)
            (self._listed if load.listed else self._not_listed).add(record.handle)
            if known is None:
                catalog.put(record)
                if load.listed and (other is None or other.handle < record.handle):  # the later one
                    catalog.publish(record)
            elif load.pinned and not known.pinned:  # the other shard was away
                catalog.put(replace(known, pinned=True))
            elif not load.listed and catalog.is_listed(known):
                catalog.unlist(known.name)
        for handle in self._gone:
            if catalog.by_handle(handle) is not None:
                catalog.remove(handle)

    def reconcile(self, listed: Iterable[Version]) -> None:
        """Make names mean what the ledger says, once every shard has said what it keeps. Names that it has not drain,
        unless they are a directory's. A ledger that was never written to, as the last went with its node, learns them.
        """
        known = {one.handle: one for one in (*listed, *self._learn())}
        for record in self._catalog.records(listed=True):
            if not record.of_directory and record.handle not in known:
                self._catalog.unlist(record.name)
                self._relist(record.name)
        for one in known.values():
            self._gone.discard(one.handle)
            self._catalog.publish(self._files.localized(record_of(one)))

    def _learn(self) -> list[Version]:
        stored = self._catalog.ledger.stored
        if stored is None or stored.changes():
            return []
        learnt = [version_of(record) for record in self._catalog.records(listed=True) if not record.of_directory]
        for one in learnt:
            stored.list(one)
        return learnt

    def _relist(self, name: str) -> None:
        """List a directory's adapter again: the ledger does not have the version that replaced it."""
        for record in self._catalog.records():
            if record.name == name and record.of_directory and record.handle in self._listed - self._not_listed:
                self._catalog.publish(record)
