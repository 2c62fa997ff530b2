"""The durable half of the catalog: what names mean, written before any shard or client is told."""

from __future__ import annotations

import threading

from lora_server.control.adapters.records import FIRST_HANDLE, Record, version_of
from lora_server.registry.versions import Ledger, Version


class CatalogLedger:
    """Writes what the catalog changes to `stored`, if there is a ledger; adapters of a directory have no versions
    there, only their pins.

    Every method but `reserve` may block on the database: call it under `CatalogChanges.lock`, without any other
    lock. Raises ServerUnavailableError where the database is not reached; then nothing was changed.
    """

    def __init__(self, stored: Ledger | None) -> None:
        self.stored = stored
        self._handles, self._highest = range(0), FIRST_HANDLE - 1
        self._lock = threading.Lock()

    def next_handle(self) -> int:
        """Return a handle that was never used, by any server of the database."""
        self.prepare()
        with self._lock:
            self._highest, self._handles = self._handles[0], self._handles[1:]
            return self._highest

    def prepare(self) -> None:
        """Take the next block of handles, if there is none left."""
        with self._lock:
            highest = self._highest
            self._handles = range(max(self._handles.start, highest + 1), self._handles.stop)
            if self._handles:
                return
        own = range(highest + 1, highest + 2)
        taken = own if self.stored is None else self.stored.take_handles(highest)
        with self._lock:
            self._handles = taken

    def reserve(self, handle: int) -> None:
        """Never return handles up to this one: an earlier controller used them."""
        with self._lock:
            self._highest = max(self._highest, handle)

    def added(self, record: Record, replaced: Record | None = None) -> None:
        """Write that a name means this version, instead of `replaced` if it meant something. Raises AdapterExistsError
        where another server changed it meanwhile."""
        if self.stored is None:
            return
        if not record.of_directory:
            self.stored.list(version_of(record), None if replaced is None else version_of(replaced))
        elif replaced is not None and not replaced.of_directory:
            self.stored.remove(replaced.name)

    def removed(self, record: Record) -> None:
        """Write that a name means nothing any more."""
        if self.stored is None:
            return
        if record.of_directory:
            self.stored.pin_seen(record.uri, False)
            self.stored.attempts.forget(record.name)
        else:
            self.stored.remove(record.name)

    def updated(self, record: Record) -> None:
        """Write that a version is pinned, or not, or that its files are elsewhere."""
        if self.stored is None:
            return
        if record.of_directory:
            self.stored.pin_seen(record.uri, record.pinned)
        else:
            self.stored.rewrite(version_of(record))

    def drains(self, record: Record, seconds: float | None) -> None:
        """Write until when a version may drain, before the change that makes it drain."""
        if self.stored is not None and seconds is not None:
            self.stored.drains.cut_off(record.handle, max(0.0, seconds))

    def deadlines(self) -> dict[int, float]:
        """Return until when versions may drain, by handle, in seconds since 1970."""
        return self.stored.drains.deadlines() if self.stored is not None else {}

    def versions(self, served: Record) -> list[Version]:
        """Return what a name means, and what it meant before, the last first; nothing is kept of a directory's."""
        kept = self.stored.of(served.name) if self.stored is not None else []
        return kept if any(one.listed for one in kept) else [version_of(served), *kept]
