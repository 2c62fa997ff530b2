"""The adapters of --adapters: registered at the start, and with --watch kept in step with the directory.

One scanner does both. It polls, which works on every volume. At the start every adapter is registered as it is. With
--watch an adapter is loaded once its files are unchanged for `settle_seconds`, and removed once its directory is gone
for as long, so that copies and replacements can finish. If the directory cannot be listed, or is suddenly empty and
another one (a mount went away), nothing is changed: all adapters are served on.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import structlog

from lora_server import __version__
from lora_server.adapters import stamp_of, validate_adapter
from lora_server.clock import SYSTEM, Clock
from lora_server.control.adapters.changes import CatalogChanges, warn
from lora_server.control.adapters.files import local_path, real_path, uri_of
from lora_server.control.adapters.records import Record, check_name, described, draft
from lora_server.control.adapters.refusals import RefusedAdapter
from lora_server.errors import AdapterError, AdapterExistsError, ServerUnavailableError
from lora_server.registry.versions import Ledger, Seen
from lora_server.spec import ModelSpec
from lora_server.timings import DEFAULTS, Timings

log = structlog.get_logger()


class StampStore:
    """Stamps of a directory's files, for the next server. Not thread-safe."""

    def __init__(self, ledger: Ledger | None, spec: ModelSpec) -> None:
        self._ledger, self._reader = ledger, f"{__version__}/{hashlib.sha256(spec.to_json().encode()).hexdigest()[:16]}"
        self._before: dict[str, Seen] | None = None  # by uri
        self._new: dict[str, tuple[Record, str]] = {}  # likewise, with the stamp; not in the ledger yet
        self._pinned: set[str] | None = None  # what was read in `pinned_once`
        self._is_read_once = False

    def before(self, name: str, where: Path, stamp: str) -> Record | None:
        """Return the record that an earlier server made of this place if its files still have this stamp, else None.

        A second call for the same place returns None.

        Raises ServerUnavailableError, AdapterSourceError.
        """
        if self._before is None:
            self._before = self._ledger.seen() if self._ledger is not None else {}
        seen = self._before.pop(uri_of(where), None)
        if seen is None or seen.stamp != self._stamp(stamp):
            return None
        return replace(Record.decode(seen.record.encode()), name=name, path=str(real_path(where)), pinned=seen.pinned)

    def _stamp(self, stamp: str) -> str:
        """Return the files' stamp, prefixed with this release and model: another reader does not match it."""
        return f"{self._reader}/{stamp}"

    def note(self, record: Record, stamp: str) -> None:
        """Queue a record that was read just now for the next `keep`."""
        self._new[record.uri] = record, stamp

    def keep(self) -> None:
        """Write the queued records to the ledger; if it is unreachable, log it and retry on the next call."""
        if self._ledger is None or not self._new:
            return
        try:
            pinned = self._ledger.pinned_places()
            self._ledger.see(
                Seen(uri, self._stamp(stamp), uri in pinned, one.encode().decode())
                for uri, (one, stamp) in self._new.items()
            )
        except ServerUnavailableError as error:
            log.warning("records of the followed directory cannot be stored yet; trying again", reason=str(error))
        else:
            self._new = {}

    def pinned(self) -> set[str]:
        """Return the URIs of pinned adapters. Raises ServerUnavailableError."""
        if self._ledger is None:
            return set()
        if self._pinned is None or not self._is_read_once:
            self._pinned = self._ledger.pinned_places()
        return self._pinned

    @contextlib.contextmanager
    def pinned_once(self) -> Iterator[None]:
        """Read what is pinned at most once for all adapters of the block: an adapter that comes is pinned by name
        only once it is there."""
        self._pinned, self._is_read_once = None, True
        try:
            yield
        finally:
            self._is_read_once = False


class DirectorySource:
    """Produces changes of the catalog from a directory's adapters. One thread calls it.

    A name belongs to the directory if its record's `uri` lies there; adapters that were added by name are not touched.
    """

    def __init__(
        self,
        changes: CatalogChanges,
        spec: ModelSpec,
        timings: Timings = DEFAULTS,
        clock: Clock = SYSTEM,
    ) -> None:
        self._catalog, self._sync, self._admission = changes.catalog, changes.sync, changes.admission
        self._changes, self._spec, self._timings, self._clock = changes, spec, timings, clock
        self._stamps = StampStore(changes.catalog.ledger.stored, spec)

    def register(self, found: Mapping[str, Path]) -> None:
        """Register the start-up adapters, unless an earlier controller of this server did. Refused ones are listed with
        the reason."""
        start, said = self._catalog.start, self._clock.now()
        if start.registered.is_set():
            return
        with self.together():
            for done, (name, path) in enumerate(found.items()):
                start.progress = done, len(found)
                if self._clock.now() - said > self._timings.progress:
                    log.info("registering", done=done, total=len(found))
                    said = self._clock.now()
                self.take(name, path)
        self.keep()
        start.registered.set()

    def together(self) -> AbstractContextManager[None]:
        """Return a block in which adapters are taken with one look at what is pinned."""
        return self._stamps.pinned_once()

    def keep(self) -> None:
        """Store the refusals on the shards, for the next controller, and the records in the ledger, for the next
        server."""
        self._sync.tell_refused()
        with self._changes.lock:  # no adapter is pinned meanwhile
            self._stamps.keep()

    def judged(self, directory: Path) -> dict[str, str]:
        """Return, by name, the stamp of the content of a directory that was last served, refused or removed; an empty
        stamp if the directory was not followed then."""
        here = uri_of(directory)
        of = {one.name: one.found for one in self._catalog.records(listed=True) if one.uri == f"{here}/{one.name}"}
        return of | {one.name: one.stamp for one in self._catalog.refusals.all() if one.uri == f"{here}/{one.name}"}

    def take(self, name: str, where: Path, followed: str = "") -> None:
        """Validate and serve the adapter in a directory; an invalid one is refused, and listed with the reason. Earlier
        content is served until every shard has the new.

        `followed`: the stamp that a scan found, if the directory is followed. Then files that are being changed are
        left for a later scan, and the caller retries after ServerUnavailableError or ShardUnavailableError.
        """
        if followed:
            self._sync.shards.require_up()
        try:
            check_name(name)
            stamp = followed or stamp_of(where)
            if followed:
                self._by_directory(name, where)
            found = self._stamps.before(name, where, stamp) or self._read(name, where, stamp)
            if not followed or _is_unchanged(where, stamp):
                self._place(replace(found, found=followed), where, stamp)
        except (AdapterError, OSError) as error:
            if not followed or _is_unchanged(where, followed):
                self._refuse(name, local_path(str(where)), error, followed)

    def _read(self, name: str, where: Path, stamp: str) -> Record:
        adapter, version = validate_adapter(real_path(where), self._spec)
        with adapter:
            return replace(
                draft(name, adapter, version, uri_of(where), str(adapter.path), adapter.stamp), of_directory=True
            )

    def _by_directory(self, name: str, where: Path) -> Record | None:
        """Return the adapter that the name means. Raises AdapterExistsError if it does not belong to this directory."""
        served = self._catalog.find(name)
        if served is not None and served.uri != uri_of(where):
            raise AdapterExistsError(
                f"adapter {name!r}: the name was given to {served.uri} by hand; for the directory's remove it, "
                f"then lora-server adapters add {name} {where}"
            )
        return served

    def _place(self, found: Record, where: Path, stamp: str) -> None:
        """Make the name mean the record that was read. If the directory is followed, earlier content is served until
        every shard has the new."""
        name, followed = found.name, bool(found.found)
        with self._changes.lock:
            self._catalog.start.require_settled()
            self._catalog.ledger.prepare()
            served = self._by_directory(name, where) if followed else self._changes.existing(name, found.version)
            if served is not None and served.version == found.version:
                if followed:
                    self._touched(served, found, stamp)
                else:
                    self._changes.offer(served, eager=False)
                return
            record = self._changes.numbered(found)
            if served is None:
                self._catalog.check_free(name)
                record = replace(record, pinned=record.pinned or record.uri in self._stamps.pinned())
                self._changes.offer(record, eager=False)
            else:
                loads = self._changes.load_beside(record)
            self._stamps.note(record, stamp)
        warn(record)
        if served is not None:
            with contextlib.suppress(AdapterExistsError):  # it was removed meanwhile
                self._changes.replace(served, record, loads, self._timings.replace)
        elif followed:
            log.info("adapter registered", **described(record))

    def _touched(self, served: Record, found: Record, stamp: str) -> None:
        """Update the files of an adapter with unchanged content: they were rewritten, or moved."""
        record = replace(served, path=found.path, stamp=found.stamp, warnings=found.warnings, found=found.found)
        if record.of_directory:
            self._stamps.note(record, stamp)
        else:
            self._catalog.ledger.updated(record)
        self._catalog.put(record)
        self._changes.accept(record.name)
        self._sync.note(record.handle)

    def _refuse(self, name: str, where: Path, error: AdapterError | OSError, stamp: str) -> None:
        reason, code = str(error), error.code if isinstance(error, AdapterError) else "unreadable"
        served, earlier = self._catalog.find(name), self._catalog.refusals.get(name)
        if served is not None:
            reason = f"{where} is refused, and version {served.version[:12]} serves on: {reason}"
        start_up = earlier.start_up if earlier is not None else not self._catalog.start.registered.is_set()
        self._changes.refuse(RefusedAdapter(name, uri_of(where), code, reason, stamp, start_up))
        log.error("adapter refused", name=name, error=reason)

    def forget(self, directory: Path, names: Iterable[str]) -> None:
        """Remove the adapters, and refusals, of names that are gone from a followed directory."""
        with self._changes.lock:
            for name in names:
                served = self._catalog.find(name)
                if served is not None and served.uri == uri_of(directory / name):
                    self._catalog.ledger.removed(served)
                    self._changes.unlist(served, why=f"{served.uri} is gone")
                self._catalog.refusals.pop(name)
            self._admission.collect()


def _is_unchanged(where: Path, stamp: str) -> bool:
    try:
        return stamp_of(where) == stamp
    except OSError:  # the next scan reports it
        return False
