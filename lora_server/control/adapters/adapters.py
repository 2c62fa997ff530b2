"""The adapters of a server: registered, loaded on every shard, held by clients, dropped when nobody needs them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import structlog

from lora_server.adapters import open_adapter, stamp_of
from lora_server.adapters.refusal import clip
from lora_server.control.adapters.held import HeldAdapters
from lora_server.control.adapters.origins import Origin, local_path, opened, uri_of
from lora_server.control.adapters.readings import kept_stamp
from lora_server.control.adapters.refusals import REMOVED, Refusal
from lora_server.control.adapters.registry import Record, check_name, version_of
from lora_server.control.members.shards import PendingCommand, wait_all
from lora_server.errors import (
    AdapterError,
    AdapterExistsError,
    AdapterSourceError,
    LoraServerError,
)
from lora_server.registry.versions import Seen
from lora_server.sources.fetch import FETCH_SECONDS
from lora_server.sources.remote import is_remote
from lora_server.wire import lora_server_pb2 as pb

log = structlog.get_logger()


class Adapters(HeldAdapters):
    """Thread-safe. What changes the list; `told` has what shards hear of it, `held` what clients do with it."""

    # -- registering

    def register(
        self, name: str, uri: str, eager: bool = False, seconds: float = FETCH_SECONDS, of_directory: bool = False
    ) -> tuple[Record, list[PendingCommand], bool]:
        """Validate and list an adapter, and tell every live shard of it; True if it is new.

        Eager: shards bring it in, and others make room; otherwise where there is room, or when a step needs it. May
        read the whole file, which is fetched within `seconds` if it is far. Shards that register later are told then.
        """
        check_name(name)
        with (
            opened(uri, self._spec, self._fetcher, seconds) as found,
            self._owned(found, name, of_directory) as origin,
            self._changing,
        ):
            self._require_settled()
            self._registry.prepare()
            with self._lock:
                existing = self._registry.existing(name, origin.version)
                if existing is None:
                    self._check_not_a_base_models(name)
                record = existing or self._record(name, origin, of_directory=of_directory)
            if existing is not None or of_directory:
                loads = self._offer(record, eager)
            else:
                loads = self._keep_and_offer(record, eager)
        for warning in record.warnings:
            log.warning("adapter", name=name, warning=warning)
        return record, loads, existing is None

    @contextlib.contextmanager
    def _owned(self, origin: Origin, name: str, of_directory: bool = False) -> Iterator[Origin]:
        """As the server's own copy, which nobody changes; a directory's stays where it is, and so does what is far."""
        served = self._registry.find(name)
        known = served is not None and served.version == origin.version
        if self._copies is None or of_directory or known or is_remote(origin.path):
            yield origin
            return
        path = self._copies.take(Path(origin.path), origin.version)
        try:
            with open_adapter(path, self._spec) as adapter:
                stamp = adapter.stamp
            yield origin._replace(path=str(path), stamp=stamp)
        finally:
            self._copies.done(origin.version)
            self._untidy = True  # if it was not listed nobody needs the copy

    def _keep_and_offer(self, record: Record, eager: bool) -> list[PendingCommand]:
        """First it is kept for good: whoever is told of it is told the truth, whatever is killed then."""
        if self._ledger is None:
            return self._offer(record, eager)
        self._ledger.list(version_of(record))
        try:
            return self._offer(record, eager)
        except AdapterExistsError:
            self._ledger.remove(record.name)
            raise

    def _offer(self, record: Record, eager: bool) -> list[PendingCommand]:
        """From now on its name means it."""
        with self._lock:  # a removal comes wholly before or after, so no shard loads what it was told to drop
            if self._registry.by_handle(record.handle) is None:
                self._check_not_a_base_models(record.name)
                self._registry.add(record)
            self._take_back_refusal(record.name)
            if not eager:
                self._unasked.offer([record.handle])
            return self._load_everywhere(record, eager)

    def _record(self, name: str, origin: Origin, found: str = "", of_directory: bool = False) -> Record:
        adapter = origin.adapter
        return Record(
            handle=self._registry.next_handle(),
            name=name,
            version=origin.version,
            path=origin.path,
            stamp=origin.stamp,
            lora_rank=adapter.lora_rank,
            nbytes=adapter.nbytes,
            sites=adapter.sites(),
            warnings=adapter.warnings,
            invocation=adapter.invocation,
            uri=origin.uri,
            found=found,
            of_directory=of_directory,
        )

    def _check_not_a_base_models(self, name: str) -> None:
        """Under the lock: a client either joined before and is seen here, or is told what it hides."""
        instance = self._leases.serving(name)
        if instance is not None:
            raise AdapterExistsError(
                f"adapter {name!r}: engine {instance} serves its base model under this name, and would answer "
                "from that; take another name, or give the engine another (vLLM: --served-model-name)"
            )

    def register_directory(self, found: dict[str, Path]) -> None:
        """The start-up adapters. One that is refused is listed with the reason, and told to who asks for it.

        Where an earlier controller of this node had registered it, nothing is listed again: what is not
        listed any more was removed, and what was refused the shards know.
        """
        if self.registered.is_set():
            return
        said, read = self._clock.now(), list[Seen]()
        seen = self._ledger.seen() if self._ledger is not None else {}
        for done, (name, path) in enumerate(found.items()):
            self.progress = done, len(found)
            if self._clock.now() - said > self._timings.progress:
                log.info("registering", done=done, total=len(found))
                said = self._clock.now()
            try:
                self._register_of_directory(name, path, seen.get(uri_of(path)), read)
            except (AdapterError, OSError) as error:
                self._refuse(name, local_path(str(path)), error)
        if self._ledger is not None:
            self._ledger.see(read)
        self.tell_refused()
        self.registered.set()

    def _register_of_directory(self, name: str, path: Path, seen: Seen | None, read: list[Seen]) -> None:
        """What was read before, and not touched since, is not read again; what is read goes to `read`."""
        stamp = kept_stamp(self._spec_digest, stamp_of(path))
        pinned = seen is not None and seen.pinned
        if seen is not None and seen.stamp == stamp:
            record = Record.decode(seen.record.encode())
            with self._changing:
                self._registry.prepare()
                existing = self._registry.existing(name, record.version)
                handle = existing.handle if existing is not None else self._registry.next_handle()
                self._offer(existing or replace(record, name=name, handle=handle, pinned=pinned), eager=False)
            return
        record, _, new = self.register(name, str(path), of_directory=True)
        if new:
            read.append(Seen(uri_of(path), stamp, pinned, record.encode().decode()))

    def add(self, name: str, uri: str, seconds: float) -> Record:
        """Register and wait until every shard has it; takes it back if one cannot load it."""
        began = self._clock.now()
        try:
            self._shards.require_up()
            self._allowed.check(uri)
            record, loads, new = self.register(name, uri, eager=True, seconds=seconds)
            try:
                left = max(0.0, round(began + seconds - self._clock.now(), 1))
                wait_all(loads, left, f"loading {name!r}")
            except LoraServerError:
                if new:
                    self.remove(name)
                raise
        except OSError as error:
            self._say_not_added(name, uri, error)
            reason = error.strerror or error
            raise AdapterSourceError(
                f"adapter source {clip(uri)}: cannot be read: {reason}; look at it there"
            ) from error
        except LoraServerError as error:
            self._say_not_added(name, uri, error)
            raise
        spent = round(self._clock.now() - began, 3)
        log.info("adapter added" if new else "adapter added again", **described(record), seconds=spent)
        return record

    def _say_not_added(self, name: str, uri: str, error: Exception) -> None:
        log.warning("adapter not added", name=clip(name), uri=clip(uri), error=str(error))

    def remove(self, name: str, drain_seconds: float | None = None) -> int:
        """Unlist at once; weights go with the last holder, or after so many seconds, whoever holds it then. Returns how
        many hold it now."""
        with self._changing:
            with self._lock:
                self._require_settled()
                served, refusal = self._registry.find(name), self._refusals.get(name)
                if served is None and (refusal is None or refusal.code == REMOVED):
                    self._registry.get(name)  # raises, and says why there is none
            self._keep_deadline(served, drain_seconds)
            self._forget(served)
            with self._lock:
                # every shard notes it, so that no later controller lists the name, or its refusal, again
                self._dismiss(name, refusal)
                notes, holders = self.tell_refused(), 0
                if served is not None:
                    holders = self._holds.count(served.handle)
                    notes += self._unlist(served)
                    self._drain(served, drain_seconds)
        self._wait_noted(notes, name)
        with self._lock:
            self._collect()
        return holders

    def _forget(self, record: Record | None) -> None:
        """Its name means nothing any more, for good."""
        if self._ledger is not None and record is not None:
            if record.of_directory:
                self._ledger.pin_seen(record.uri, False)
                self._ledger.attempts.forget(record.name)
            else:
                self._ledger.remove(record.name)

    def _keep_deadline(self, record: Record | None, seconds: float | None) -> None:
        """Before the change that makes it drain, for whoever finds it draining."""
        if self._ledger is not None and record is not None and seconds is not None:
            self._ledger.drains.cut_off(record.handle, max(0.0, seconds))

    def _drain(self, record: Record, seconds: float | None) -> None:
        if seconds is not None:
            self._until[record.handle] = self._clock.now() + max(0.0, seconds)

    def _dismiss(self, name: str, refusal: Refusal | None) -> None:
        """Content of a followed directory that is not wanted stays away, though it is there, until it changes."""
        newest = max((one for one in self._registry.records() if one.name == name), default=None, key=_by_handle)
        uri, stamp = (refusal.uri, refusal.stamp) if refusal else (newest.uri, newest.found) if newest else ("", "")
        self._refusals.pop(name)
        if stamp:
            do = f"{uri} is taken again when it changes, or by lora-server adapters add {name} {uri}"
            log.info("its directory is left alone", name=name, until=do)
            self._refusals.put(Refusal(name, uri, REMOVED, do, stamp))

    def _unlist(self, record: Record, **why: str) -> list[PendingCommand]:
        self._registry.unlist(record.name)
        self._attempts.forget(record.name)
        log.info("adapter removed", **described(record), holders=self._holds.count(record.handle), **why)
        return self._shards.broadcast(pb.ShardCommand(note=self._load(record)))

    # -- refusals

    def _refuse(self, name: str, where: Path, error: AdapterError | OSError, stamp: str = "") -> None:
        reason, code = str(error), error.code if isinstance(error, AdapterError) else "unreadable"
        with self._lock:
            served, earlier = self._registry.find(name), self._refusals.get(name)
            if served is not None:
                reason = f"{where} is refused, and version {served.version[:12]} serves on: {reason}"
            start_up = earlier.start_up if earlier is not None else not self.registered.is_set()
            self._refusals.put(Refusal(name, uri_of(where), code, reason, stamp, start_up))
        log.error("adapter refused", name=name, error=reason)

    def _take_back_refusal(self, name: str) -> None:
        """It is served now."""
        refusal = self._refusals.pop(name)
        if refusal is not None:
            if refusal.code != REMOVED:
                log.info("adapter not refused any more", name=name)
            self.tell_refused()

    def _wait_noted(self, notes: list[PendingCommand], name: str) -> None:
        """Until every shard keeps a change."""
        try:
            wait_all(notes, self._timings.note, f"noting {name!r}")
        except LoraServerError as error:  # it is going away: it is told when it registers
            log.debug("a shard has not noted a change", name=name, error=str(error))


def _by_handle(record: Record) -> int:
    return record.handle


def described(record: Record) -> dict[str, object]:
    """For a line of the log."""
    return {
        "name": record.name,
        "version": record.version[:12],
        "lora_rank": record.lora_rank,
        "bytes": record.nbytes,
    }
