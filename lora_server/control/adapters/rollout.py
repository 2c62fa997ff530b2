"""Changes of what names mean, step by step: add, update, rollback, remove, pin.

Each step is for good before the next begins: the files are validated, the ledger has the change, shards are told, the
name means it. So a controller that is killed in between left the old meaning or the new one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import structlog

from lora_server.adapters.refusal import clip
from lora_server.clock import SYSTEM, Clock
from lora_server.control.adapters.allowed import NOWHERE, Allowed
from lora_server.control.adapters.changes import CatalogChanges, warn
from lora_server.control.adapters.files import AdapterFiles
from lora_server.control.adapters.records import Record, check_name, described, record_of, split_version
from lora_server.control.adapters.refusals import REMOVED, RefusedAdapter
from lora_server.control.members.shards import PendingCommand, wait_all
from lora_server.errors import (
    AdapterExistsError,
    AdapterSourceError,
    ConfigError,
    LoraServerError,
    UnknownAdapterError,
    rebuild,
)
from lora_server.sources.fetch import FETCH_SECONDS
from lora_server.wire import lora_server_pb2 as pb

CheckReplaced = Callable[[Record, Record], None]  # of what serves, and what is to come in its place; raises
log = structlog.get_logger()


class AdapterRollout:
    """Carries out add, update, rollback, remove and pin. Thread-safe; it has no state: `CatalogChanges` has the lock.

    A new version is loaded beside the one that serves; a name means one of them at any time, and every request ends
    with the one that it began with.
    """

    def __init__(
        self,
        changes: CatalogChanges,
        files: AdapterFiles,
        allowed: Allowed = NOWHERE,
        clock: Clock = SYSTEM,
    ) -> None:
        """`allowed`: where adapters that are added may lie."""
        self._catalog, self._sync, self._admission = changes.catalog, changes.sync, changes.admission
        self._changes, self._files, self.allowed, self._clock = changes, files, allowed, clock

    # -- add

    def register(
        self,
        name: str,
        uri: str,
        eager: bool = False,
        seconds: float = FETCH_SECONDS,
        listed: Sequence[str] = (),
        slo_class: str = "",
    ) -> tuple[Record, list[PendingCommand], bool]:
        """Validate and list an adapter, and tell every live shard of it; return True if it is new.

        Eager: shards load it, and evict others for it; otherwise they do where there is room, or when a step needs it.
        Remote files are fetched within `seconds`, with redirects below `listed`. Shards that register later are told
        then. Raises AdapterError, OSError, ServerUnavailableError.
        """
        check_name(name)
        with self._files.open(name, uri, seconds, listed) as found, self._changes.lock:
            self._catalog.start.require_settled()
            self._catalog.ledger.prepare()
            existing = self._changes.existing(name, found.version)
            if existing is None:
                self._catalog.check_free(name)
            record = existing or replace(self._changes.numbered(found), slo_class=slo_class)
            warn(record)
            if existing is None:
                self._catalog.ledger.added(record)
            try:
                return record, self._changes.offer(record, eager), existing is None
            except AdapterExistsError:
                self._catalog.ledger.removed(record)
                raise

    def add(
        self, name: str, uri: str, seconds: float, allowed: Allowed | None = None, slo_class: str | None = None
    ) -> Record:
        """Register an adapter and wait until every shard has it; take it back if one cannot load it. `allowed`: a
        caller's, where it may take less than the server may. `slo_class`: None leaves that of an adapter that is
        registered. Raises AdapterError, ConfigError, ServerUnavailableError."""
        began, allowed = self._clock.now(), allowed or self.allowed
        self._admission.classes.known.check(slo_class or "")
        with _readable(uri):
            self._sync.shards.require_up()
            allowed.check(uri)
            record, loads, new = self.register(name, uri, True, seconds, allowed.sources, slo_class or "")
        try:
            wait_all(loads, self._left(began + seconds), f"loading {name!r}")
        except LoraServerError:
            if new:
                self.remove(name)
            raise
        if slo_class not in (None, record.slo_class):
            self._set_class(record, slo_class or "")
        spent = round(self._clock.now() - began, 3)
        log.info("adapter added" if new else "adapter added again", **described(record), seconds=spent)
        return record

    def _set_class(self, record: Record, slo_class: str) -> None:
        """Give an adapter an SLO class for good; empty: none of its own. Raises ConfigError for a directory's."""
        if record.of_directory:
            raise ConfigError(
                f"adapter {record.name!r}: comes from --adapters, got SLO class {slo_class!r}; name it in the file of "
                "--classes"
            )
        self._changes.amend(record, slo_class=slo_class)
        log.info("adapter has another SLO class", **described(record), slo_class=slo_class)

    def _left(self, deadline: float) -> float:
        return max(0.0, round(deadline - self._clock.now(), 1))

    # -- update

    def update(
        self,
        name: str,
        uri: str,
        seconds: float,
        drain_seconds: float | None = None,
        check: CheckReplaced | None = None,
        allowed: Allowed | None = None,
    ) -> Record:
        """Make the name mean what lies at `uri` once every shard has it. Fails and changes nothing where one cannot
        load it, or not in time, or `check` raises. `allowed`: as of `add`."""
        deadline, allowed = self._clock.now() + seconds, allowed or self.allowed
        self._sync.shards.require_up()
        allowed.check(uri)
        served = self._updatable(name)
        with (
            self._changes.failures.of(served),
            _readable(uri),
            self._files.open(name, uri, seconds, allowed.sources) as found,
        ):
            if found.version == served.version:
                return served
            return self._bring_in(served, found, deadline, drain_seconds, check)

    def rollback(
        self,
        name: str,
        version: str,
        seconds: float,
        drain_seconds: float | None = None,
        check: CheckReplaced | None = None,
    ) -> Record:
        """Make the name mean again what it did before, or a version that it had, by the beginning of its digest."""
        deadline = self._clock.now() + seconds
        self._sync.shards.require_up()
        served = self._updatable(name)
        earlier = [one for one in self._catalog.ledger.versions(served) if not one.listed]
        found = next((one for one in earlier if one.version.startswith(version)), None)
        if version and served.version.startswith(version):
            return served
        if found is None:
            known = ", ".join(one.version[:12] for one in earlier) or "none"
            raise UnknownAdapterError(
                f"adapter {name!r}: no earlier version {version or 'is known'} (known: {known}); "
                "lora-server adapters update NAME SOURCE brings one"
            )
        with self._changes.failures.of(served):
            return self._bring_in(served, record_of(found), deadline, drain_seconds, check)

    @contextlib.contextmanager
    def reviving(self, names: Iterable[str]) -> Iterator[None]:
        """Load the earlier versions among these (NAME@DIGEST) that no shard has any more. After the block each stays as
        long as a client holds it. Raises ServerUnavailableError."""
        came = [record.handle for name in names if (record := self._revived(name)) is not None]
        try:
            yield
        finally:
            for handle in came:
                self._catalog.abandon(handle)
            if came:
                self._admission.collect()

    def _revived(self, name: str) -> Record | None:
        own, version = split_version(name)
        if not version:
            return None
        with self._changes.lock:
            served = self._catalog.find(own)
            if served is None or self._catalog.find_version(own, version) is not None:
                return None
            kept = self._catalog.ledger.versions(served)
            found = next((record_of(one) for one in kept if one.version == version), None)
            if found is None:
                return None
            record = self._changes.numbered(self._files.localized(found))
            self._changes.load_beside(record)
        log.info("earlier version loaded", **described(record), serves=served.version[:12])
        return record

    def _updatable(self, name: str) -> Record:
        self._catalog.start.require_settled()
        served = self._catalog.get(name)
        if served.found:
            raise AdapterExistsError(
                f"adapter {name!r}: comes from a directory that is followed; put the new version there: {served.uri}"
            )
        return served

    def _bring_in(
        self,
        served: Record,
        found: Record,
        deadline: float,
        drain_seconds: float | None,
        check: CheckReplaced | None,
    ) -> Record:
        with self._changes.lock:
            record = self._changes.numbered(found)
            self._changes.check_served(served)
            if check is not None:
                check(served, record)
            loads = self._changes.load_beside(record)
        warn(record)
        try:
            self._changes.replace(served, record, loads, self._left(deadline), drain_seconds)
        except LoraServerError as error:
            raise rebuild(
                error.code, f"{error}; version {served.version[:12]} of adapter {record.name!r} serves on"
            ) from error
        return record

    # -- remove

    def remove(self, name: str, drain_seconds: float | None = None) -> int:
        """Unlist an adapter at once; its weights go with the last holder, or after so many seconds, whatever holds it
        then. Return how many clients hold it now. Raises UnknownAdapterError."""
        with self._changes.lock:
            self._catalog.start.require_settled()
            served, refusal = self._catalog.find(name), self._catalog.refusals.get(name)
            if served is None and (refusal is None or refusal.code == REMOVED):
                self._catalog.get(name)  # raises, and says why there is none
            if served is not None:
                self._catalog.ledger.drains(served, drain_seconds)
                self._catalog.ledger.removed(served)
            # every shard keeps it, so that no later controller lists the name, or its refusal, again
            self._dismiss(name, refusal)
            notes, holders = self._sync.tell_refused(), 0
            if served is not None:
                holders = self._changes.holders(served)
                notes += self._changes.unlist(served)
                self._changes.cut_off(served, drain_seconds)
        self._changes.wait_noted(notes, name)
        self._admission.collect()
        return holders

    def _dismiss(self, name: str, refusal: RefusedAdapter | None) -> None:
        """Leave the content of a followed directory alone, though it is there, until it changes."""
        refusals = self._catalog.refusals
        versions = [one for one in self._catalog.records() if one.name == name]
        newest = max(versions, default=None, key=lambda record: record.handle)
        uri, stamp = (refusal.uri, refusal.stamp) if refusal else (newest.uri, newest.found) if newest else ("", "")
        refusals.pop(name)
        if stamp:
            do = f"{uri} is taken again when it changes, or by lora-server adapters add {name} {uri}"
            log.info("the removed adapter's directory is ignored", name=name, until=do)
            refusals.put(RefusedAdapter(name, uri, REMOVED, do, stamp))

    # -- pins

    def pin(self, name: str, seconds: float) -> None:
        """Load an adapter on every shard, where it is never evicted from now on, nor a new version under the name.

        Raises AdapterLoadError, and changes nothing, where all that are pinned do not fit a shard together.
        """
        self._sync.shards.require_up()
        self._catalog.start.require_settled()
        record = self._catalog.get(name)
        self._sync.require(record)
        sent = self._sync.broadcast(pb.ShardCommand(pin=record.handle))
        try:
            wait_all(sent, seconds, f"pinning {name!r}")
        except LoraServerError as error:
            self._sync.note(record.handle)
            raise rebuild(error.code, f"adapter {name!r} was not pinned: {error}") from error
        self._changes.amend(record, pinned=True)
        log.info("adapter pinned", **described(record))

    def unpin(self, name: str) -> None:
        """Let an adapter be evicted as others are."""
        self._catalog.start.require_settled()
        record = self._catalog.get(name)
        self._changes.amend(record, pinned=False)
        log.info("adapter unpinned", **described(record))


@contextlib.contextmanager
def _readable(uri: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise AdapterSourceError(f"adapter source {clip(uri)}: cannot be read: {reason}; check it on node 0") from error
