"""Adapters whose names come to mean other content, or stay in memory: updated, gone back to, pinned."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import structlog

from lora_server.control.adapters.adapters import Adapters, described
from lora_server.control.adapters.origins import opened
from lora_server.control.adapters.registry import Record, record_of, version_of
from lora_server.control.members.shards import PendingCommand, wait_all
from lora_server.errors import (
    AdapterExistsError,
    AdapterSourceError,
    LoraServerError,
    UnknownAdapterError,
    rebuild,
)
from lora_server.registry.versions import Version
from lora_server.wire import lora_server_pb2 as pb

CheckReplaced = Callable[[Record, Record], None]  # of what serves, and what is to come in its place; raises
log = structlog.get_logger()


class UpdatedAdapters(Adapters):
    """A new version is loaded beside the one that serves; a name means one of them at any time, and every request ends
    with the one that it began with."""

    def update(
        self,
        name: str,
        uri: str,
        seconds: float,
        drain_seconds: float | None = None,
        check: CheckReplaced | None = None,
    ) -> Record:
        """The name means what lies at `uri` once every shard has it. Fails and changes nothing where one cannot load
        it, or not in time, or `check` raises."""
        deadline = self._clock.now() + seconds
        self._shards.require_up()
        self._allowed.check(uri)
        served = self._updatable(name)
        with (
            self._attempts.of(served),
            _readable(uri),
            opened(uri, self._spec, self._fetcher, seconds) as found,
            self._owned(found, name) as origin,
        ):
            if origin.version == served.version:
                return served
            with self._changing:
                record = self._record(name, origin)
            return self._bring_in(served, record, deadline, drain_seconds, check)

    def rollback(
        self,
        name: str,
        version: str,
        seconds: float,
        drain_seconds: float | None = None,
        check: CheckReplaced | None = None,
    ) -> Record:
        """The name means again what it did before, or a version that it had, by the beginning of its digest."""
        deadline = self._clock.now() + seconds
        self._shards.require_up()
        served = self._updatable(name)
        earlier = [one for one in self.versions(name) if not one.listed]
        found = next((one for one in earlier if one.version.startswith(version)), None)
        if version and served.version.startswith(version):
            return served
        if found is None:
            known = ", ".join(one.version[:12] for one in earlier) or "none"
            raise UnknownAdapterError(
                f"adapter {name!r}: no earlier version {version or 'is known'} (known: {known}); "
                "lora-server adapters update NAME SOURCE brings one"
            )
        with self._attempts.of(served):
            with self._changing:
                record = replace(record_of(found), handle=self._registry.next_handle())
            return self._bring_in(served, record, deadline, drain_seconds, check)

    def versions(self, name: str) -> list[Version]:
        """What the name means, and what it meant before, the last first; of a directory's nothing is kept."""
        with self._lock:
            self._require_settled()
            served = self._registry.get(name)
        kept = self._ledger.of(name) if self._ledger is not None else []
        return kept if any(one.listed for one in kept) else [version_of(served), *kept]

    def _updatable(self, name: str) -> Record:
        with self._lock:
            self._require_settled()
            served = self._registry.get(name)
        if served.found:
            raise AdapterExistsError(
                f"adapter {name!r}: comes from a directory that is followed; put the new version there: {served.uri}"
            )
        return served

    def _bring_in(
        self,
        served: Record,
        record: Record,
        deadline: float,
        drain_seconds: float | None,
        check: CheckReplaced | None,
    ) -> Record:
        with self._changing, self._lock:
            self._check_served(served)
            if check is not None:
                check(served, record)
            loads = self._load_beside(record)
        for warning in record.warnings:
            log.warning("adapter", name=record.name, warning=warning)
        try:
            self._replace(served, record, loads, max(0.0, round(deadline - self._clock.now(), 1)), drain_seconds)
        except LoraServerError as error:
            log.warning("adapter not replaced", name=record.name, version=record.version[:12], error=str(error))
            raise rebuild(
                error.code, f"{error}; version {served.version[:12]} of adapter {record.name!r} serves on"
            ) from error
        return record

    def _check_served(self, served: Record) -> None:
        if not self._registry.is_listed(served):
            raise AdapterExistsError(f"adapter {served.name!r}: was removed or replaced meanwhile; try again")

    def _load_beside(self, record: Record) -> list[PendingCommand]:
        """Under the lock; nobody can ask for it yet."""
        self._coming.add(record.handle)
        self._registry.add(record, listed=False)
        return self._load_everywhere(record, eager=True)

    def _replace(
        self,
        served: Record,
        record: Record,
        loads: Sequence[PendingCommand],
        seconds: float,
        drain_seconds: float | None = None,
        keep: bool = True,
    ) -> None:
        """Once every shard has it the name means `record`. First it does so for good, then for who asks;
        `keep`: unless the ledger says so already."""
        try:
            wait_all(list(loads), seconds, f"loading {record.name!r}")
            with self._changing:
                with self._lock:
                    self._check_served(served)
                    pinned = self._registry.get(record.name).pinned if keep else record.pinned
                    record = replace(record, pinned=pinned)
                self._keep_deadline(served, drain_seconds)
                if keep:
                    self._keep_replaced(served, record)
                with self._lock:
                    self._registry.make_listed(record)
                    self._attempts.forget(record.name)
                    self._take_back_refusal(record.name)
                    self._drain(served, drain_seconds)
                    for one in (served, record):  # first the old one makes room
                        self._shards.broadcast(pb.ShardCommand(note=self._load(one)))
                    was = {"replaced": served.version[:12], "holders": self._holds.count(served.handle)}
                    log.info("adapter replaced", **described(record), **was)
        finally:
            with self._lock:
                self._coming.discard(record.handle)
                self._collect()

    def _keep_replaced(self, served: Record, record: Record) -> None:
        if self._ledger is None:
            return
        if not record.of_directory:
            self._ledger.list(version_of(record), version_of(served))
        elif not served.of_directory:
            self._ledger.remove(served.name)

    # -- pins

    def pin(self, name: str, seconds: float) -> None:
        """Bring it in on every shard, where it makes room for nobody from now on; a new version under the name neither.

        Raises AdapterLoadError, and changes nothing, where all that are pinned do not fit a shard together.
        """
        self._shards.require_up()
        with self._lock:
            self._require_settled()
            record = self._registry.get(name)
            sent = self._shards.broadcast(pb.ShardCommand(pin=record.handle))
        try:
            wait_all(sent, seconds, f"pinning {name!r}")
        except LoraServerError as error:
            self._note(record)
            log.warning("adapter not pinned", name=name, error=str(error))
            raise rebuild(error.code, f"adapter {name!r} was not pinned: {error}") from error
        self._set_pinned(record, True)

    def unpin(self, name: str) -> None:
        """It makes room as others do."""
        with self._lock:
            self._require_settled()
            record = self._registry.get(name)
        self._set_pinned(record, False)

    def _set_pinned(self, record: Record, pinned: bool) -> None:
        """The ledger keeps it, and shards do, for themselves and for the next controller."""
        with self._changing:
            with self._lock:
                self._check_served(record)
                record = replace(self._registry.get(record.name), pinned=pinned)
            if self._ledger is not None:
                if record.of_directory:
                    self._ledger.pin_seen(record.uri, pinned)
                else:
                    self._ledger.rewrite(version_of(record))
            with self._lock:
                self._registry.update(record)
                notes = self._note(record)
                self._collect()
        log.info("adapter pinned" if pinned else "adapter unpinned", **described(record))
        self._wait_noted(notes, record.name)


@contextlib.contextmanager
def _readable(uri: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise AdapterSourceError(f"adapter source {uri}: cannot be read: {error.strerror or error}") from error
