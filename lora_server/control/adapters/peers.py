"""Follow changes that other servers of the same database make, as the ledger records them."""

from __future__ import annotations

from dataclasses import replace

import structlog

from lora_server.control.adapters.changes import CatalogChanges
from lora_server.control.adapters.files import AdapterFiles
from lora_server.control.adapters.records import Record, record_of
from lora_server.errors import LoraServerError
from lora_server.registry.versions import Version
from lora_server.timings import DEFAULTS, Timings

log = structlog.get_logger()


class PeerSource:
    """Applies the ledger's changes to this server's catalog. One thread calls `refresh` periodically."""

    def __init__(
        self,
        changes: CatalogChanges,
        files: AdapterFiles,
        timings: Timings = DEFAULTS,
    ) -> None:
        self._catalog, self._sync, self._admission = changes.catalog, changes.sync, changes.admission
        self._changes, self._files, self._seconds = changes, files, timings.replace_other
        self._seen = -1  # the ledger's count of changes

    def refresh(self) -> None:
        """Follow the ledger, if it changed. Raises ServerUnavailableError."""
        stored = self._catalog.ledger.stored
        if stored is None or (seen := stored.changes()) == self._seen:
            return
        for one in stored.listed():  # before another change has to wait for it
            if self._catalog.by_handle(one.handle) is None:
                self._files.copy(record_of(one))
        with self._changes.lock:
            listed = stored.listed()
            replaced = [one for one in listed if not self._follow(one)]
            self._unlist_others({one.name for one in listed})
        failed = [one.name for one in replaced if not self._replace(record_of(one))]
        self._admission.cut_off_at(self._catalog.ledger.deadlines())
        self._seen = self._seen if failed else seen

    def _follow(self, one: Version) -> bool:
        """Return False where it replaces another version."""
        served, known = self._catalog.find(one.name), self._catalog.by_handle(one.handle)
        if served is None:
            self._changes.offer(self._files.localized(record_of(one)), eager=False)
            log.info("adapter added by another server", name=one.name, version=one.version[:12])
        elif (
            known is not None and self._catalog.is_listed(known) and _marks(known) != (marks := _marks(record_of(one)))
        ):
            self._catalog.put(replace(known, pinned=marks[0], slo_class=marks[1]))
            self._sync.note(known.handle)
            self._admission.collect()
        return served is None or served.handle == one.handle or served.of_directory

    def _unlist_others(self, names: set[str]) -> None:
        for record in self._catalog.records(listed=True):
            if not record.of_directory and record.name not in names:
                self._changes.unlist(record, why="another server removed it")
        self._admission.collect()

    def _replace(self, record: Record) -> bool:
        """Load and list another server's version; one that an update of ours is loading is left alone."""
        with self._changes.lock:
            served = self._catalog.find(record.name)
            if served is None or self._catalog.by_handle(record.handle) is not None:
                return True
            loads = self._changes.load_beside(record := self._files.localized(record))
        try:
            self._changes.replace(served, record, loads, self._seconds, keep=False)
        except LoraServerError as error:
            log.error("another server's version is not served", name=record.name, error=str(error))
            return False
        return True


def _marks(record: Record) -> tuple[bool, str]:
    return record.pinned, record.slo_class
