"""The catalog of adapters: the version that each name means, all versions that exist, and refusals.

The ledger is the truth for names that were added by name (`CatalogLedger`, lora_server/registry/versions.py), the
directory for those of --adapters. What is here follows from them; shards keep what each was told, for a controller
that is restarted.
"""

from __future__ import annotations

import threading

from lora_server.control.adapters.places import ListOrder
from lora_server.control.adapters.records import FIRST_HANDLE, Record, split_version, version_of
from lora_server.control.adapters.refusals import REMOVED, RefusedAdapters
from lora_server.control.members.leases import Leases
from lora_server.control.start import StartState
from lora_server.errors import AdapterExistsError, UnknownAdapterError
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


class VersionMarks:
    """Versions that are coming, draining or pinned, by handle. Changed under the catalog's lock, which is this one."""

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self.coming: set[int] = set()
        self.draining: set[int] = set()
        self.pinned: set[int] = set()  # of the listed ones

    def update(self, record: Record, listed: bool) -> None:
        """Mark a version anew: it drains unless it is listed or coming."""
        wanted = listed or record.handle in self.coming
        (self.draining.discard if wanted else self.draining.add)(record.handle)
        (self.pinned.add if listed and record.pinned else self.pinned.discard)(record.handle)

    def pinned_and_draining(self) -> tuple[frozenset[int], list[int]]:
        """Return the handles that are pinned, and those that drain, in order."""
        with self._lock:
            return frozenset(self.pinned), sorted(self.draining)

    def forget(self, handle: int) -> None:
        """Forget a version that is removed."""
        for marks in (self.coming, self.draining, self.pinned):
            marks.discard(handle)


class AdapterCatalog:
    """Names, versions and refusals. Thread-safe; its lock is a leaf, so it never blocks.

    A change of what a name means is written to `ledger` first, by `AdapterRollout` or a source; both hold
    `CatalogChanges.lock` meanwhile.

    A version is *listed* while its name means it, *coming* while shards load it to replace the listed one, and drains
    otherwise. Handles are never used twice, so a late step of a removed adapter meets no other's weights.
    """

    def __init__(self, start: StartState, leases: Leases, ledger: CatalogLedger) -> None:
        self.start, self.ledger, self._leases = start, ledger, leases
        self.refusals, self.order = RefusedAdapters(), ListOrder()
        self._by_name: dict[str, Record] = {}
        self._by_handle: dict[int, Record] = {}
        self._lock = threading.RLock()
        self.marks = VersionMarks(self._lock)

    # -- queries

    def get(self, name: str) -> Record:
        """Return a listed adapter. Raises UnknownAdapterError, which says why there is none."""
        with self._lock:
            record, refusal = self._by_name.get(name), self.refusals.get(name)
            if record is not None:
                return record
            if refusal is None:
                known = ", ".join(sorted({name for name, _ in self.order.after()[:8]})) or "none"
                raise UnknownAdapterError(f"adapter {name!r}: not registered here (known: {known}); add it first")
        if refusal.code == REMOVED:
            raise UnknownAdapterError(f"adapter {name!r}: was removed; {refusal.reason}")
        raise UnknownAdapterError(f"adapter {name!r}: refused: {refusal.reason}")

    def find_version(self, name: str, version: str) -> Record | None:
        """Return a version of an adapter if it exists, listed or draining."""
        listed = self.find(name)
        if listed is not None and listed.version == version:
            return listed
        handles = [handle for own, handle in self.order.after((name, 0)) if own == name]
        versions = filter(None, map(self.by_handle, handles))
        return next((one for one in versions if one.version == version), None)

    def named(self, name: str) -> Record:
        """Return a listed adapter, or by NAME@DIGEST any version that exists. Raises UnknownAdapterError."""
        own, version = split_version(name)
        if not version:
            return self.get(name)
        listed = self.get(own)
        if (found := self.find_version(own, version)) is not None:
            return found
        raise UnknownAdapterError(
            f"adapter {own!r}: version {version[:12]} is not known here, and {listed.version[:12]} serves; "
            f"lora-server adapters update {own} SOURCE brings it back"
        )

    def find(self, name: str) -> Record | None:
        """Return the listed adapter of that name, if there is one."""
        return self._by_name.get(name)

    def by_handle(self, handle: int) -> Record | None:
        """Return a version that exists, listed or not."""
        return self._by_handle.get(handle)

    def records(self, listed: bool = False) -> list[Record]:
        """Return all that exist, in the order in which they came, or all that are listed."""
        with self._lock:
            return list((self._by_name if listed else self._by_handle).values())

    def is_listed(self, record: Record) -> bool:
        """Return whether the name of this version means it."""
        listed = self._by_name.get(record.name)
        return listed is not None and listed.handle == record.handle

    def is_wanted(self, record: Record) -> bool:
        """Return whether a version is listed or coming."""
        return self.is_listed(record) or record.handle in self.marks.coming

    def check_free(self, name: str) -> None:
        """Raise AdapterExistsError where an engine serves its base model under this name."""
        instance = self._leases.serving(name)
        if instance is not None:
            raise AdapterExistsError(
                f"adapter {name!r}: engine {instance} serves its base model under this name, and would answer "
                "from that; take another name, or give the engine another (vLLM: --served-model-name)"
            )

    # -- changes

    def publish(self, record: Record, new: bool = False) -> None:
        """Make the name mean this version; another that it meant drains.

        `new`: check in the same step that no engine's base model has the name. A client either joined before, and is
        seen here, or is told which adapters it hides. Raises AdapterExistsError.
        """
        with self._lock:
            if new:
                self.check_free(record.name)
            other = self._by_name.get(record.name)
            self.ledger.reserve(record.handle)
            self._by_handle[record.handle] = self._by_name[record.name] = record
            self.order.add((record.name, record.handle))
            self.marks.coming.discard(record.handle)
            for one in (record, other or record):
                self.marks.update(one, self.is_listed(one))

    def put(self, record: Record, coming: bool = False) -> None:
        """Keep a version, or what is known of it now; what its name means does not change."""
        with self._lock:
            self.ledger.reserve(record.handle)
            self._by_handle[record.handle] = record
            self.order.add((record.name, record.handle))
            if self.is_listed(record):
                self._by_name[record.name] = record
            if coming:
                self.marks.coming.add(record.handle)
            self.marks.update(record, self.is_listed(record))

    def abandon(self, handle: int) -> None:
        """Let a version that is still coming drain: it will not be listed."""
        with self._lock:
            if handle in self.marks.coming:
                self.marks.coming.remove(handle)
                record = self._by_handle[handle]
                self.marks.update(record, self.is_listed(record))

    def unlist(self, name: str) -> Record:
        """Stop offering a name; its version drains. Raises UnknownAdapterError."""
        with self._lock:
            record = self.get(name)
            del self._by_name[name]
            self.marks.update(record, listed=False)
            return record

    def remove(self, handle: int) -> None:
        """Remove a version, listed or not."""
        with self._lock:
            record = self._by_handle.pop(handle)
            self.order.remove((record.name, handle))
            if self.is_listed(record):
                del self._by_name[record.name]
            self.marks.forget(handle)


def name_of(catalog: AdapterCatalog, handle: int) -> str | None:
    """Return the name of a version, None where it is gone."""
    record = catalog.by_handle(handle)
    return None if record is None else record.name
