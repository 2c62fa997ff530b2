"""The adapters of a server: registered, loaded on every shard, held by clients, dropped when nobody needs them."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import structlog

from lora_server.control.admission import Admission, Queued
from lora_server.control.agreement import Agreement
from lora_server.control.leases import Leases
from lora_server.control.origins import Origin, local_path, opened, uri_of
from lora_server.control.refusals import REMOVED, Refusal
from lora_server.control.registry import Record, Registry, check_name
from lora_server.control.residency import Residency
from lora_server.control.room import Room
from lora_server.control.shards import PendingCommand, ShardHandle, ShardTable, wait_all
from lora_server.errors import (
    AdapterError,
    AdapterExistsError,
    AdapterLoadError,
    LoraServerError,
    ServerUnavailableError,
    ShardUnavailableError,
    UnknownAdapterError,
    rebuild,
)
from lora_server.placement import Placement
from lora_server.sources.fetch import FETCH_SECONDS, Fetcher
from lora_server.wire import lora_server_pb2 as pb

NOTE_SECONDS = 5.0
PROGRESS_SECONDS = 5.0  # between two lines about registering
RESTARTED = "the controller has just started and waits for its shards to register; try again"
log = structlog.get_logger()


class Listing(NamedTuple):
    """An adapter as users see it."""

    record: Record
    state: str  # remote, disk, host, loading, ready, failed, draining
    resident_layers: int
    layers: int  # of the model
    error: str
    holders: int
    warnings: tuple[str, ...]


class Adapters:
    """Thread-safe. `registered` is set once the start-up directory is listed."""

    def __init__(
        self,
        agreement: Agreement,
        shards: ShardTable,
        settled: threading.Event,
        leases: Leases,
        most_active: int = 0,
        fetcher: Fetcher | None = None,
    ) -> None:
        """`settled`: all shards have said what they keep, so that an unknown name is none; `most_active`: see Room;
        `fetcher` brings adapters from far."""
        self._fetcher = fetcher
        self._spec, self._shards, self._settled, self._leases = agreement.spec, shards, settled, leases
        self._registry = Registry()
        self._room = Room(most_active)
        self.admission = Admission(self._resolve, self._room, changed=self._tell_active, told=self._tell_holds)
        self._holds = self.admission.holds
        self._refusals = self._registry.refusals
        self._gone: set[int] = set()  # handles that an earlier controller dropped
        self._coming: set[int] = set()  # handles that are loaded to replace another under its name
        self._residency = Residency(Placement(agreement.spec, agreement.layout))
        self._lock = threading.RLock()  # outcomes of commands may come while it is held
        self._admitted = threading.Condition(self._lock)
        self.registered = threading.Event()
        self.progress = 0, 0  # of registering the start-up directory: done, all

    # -- registering

    def register(
        self, name: str, uri: str, eager: bool = False, seconds: float = FETCH_SECONDS
    ) -> tuple[Record, list[PendingCommand], bool]:
        """Validate and list an adapter, and tell every live shard of it; True if it is new.

        Eager: shards bring it in, and others make room; otherwise where there is room, or when a step needs it. May
        read the whole file, which is fetched within `seconds` if it is far. Shards that register later are told then.
        """
        check_name(name)
        with opened(uri, self._spec, self._fetcher, seconds) as origin, self._lock:
            self._require_settled()
            existing = self._registry.existing(name, origin.version)
            if existing is None:
                self._check_not_a_base_models(name)
            record = existing or self._record(name, origin)
            if existing is None:
                self._registry.add(record)
            self._take_back_refusal(name)
            # under the lock: a removal comes wholly before or after, so no shard loads what it was told to drop
            loads = self._load_everywhere(record, eager)
        for warning in record.warnings:
            log.warning("adapter", name=name, warning=warning)
        return record, loads, existing is None

    def _record(self, name: str, origin: Origin, found: str = "") -> Record:
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
        said = time.monotonic()
        for done, (name, path) in enumerate(found.items()):
            self.progress = done, len(found)
            if time.monotonic() - said > PROGRESS_SECONDS:
                log.info("registering", done=done, total=len(found))
                said = time.monotonic()
            try:
                self.register(name, str(path))
            except (AdapterError, OSError) as error:
                self._refuse(name, local_path(str(path)), error)
        self.tell_refused()
        self.registered.set()

    def add(self, name: str, uri: str, seconds: float) -> Record:
        """Register and wait until every shard has it; takes it back if one cannot load it."""
        began = time.monotonic()
        try:
            self._shards.require_up()
            record, loads, new = self.register(name, uri, eager=True, seconds=seconds)
            try:
                left = max(0.0, round(began + seconds - time.monotonic(), 1))
                wait_all(loads, left, f"loading {name!r}")
            except LoraServerError:
                if new:
                    self.remove(name)
                raise
        except (LoraServerError, OSError) as error:
            log.warning("adapter not added", name=name, uri=uri, error=str(error))
            raise
        spent = round(time.monotonic() - began, 3)
        log.info("adapter added" if new else "adapter added again", **described(record), seconds=spent)
        return record

    def remove(self, name: str) -> int:
        """Unlist at once; weights go with the last holder. Returns how many hold it now."""
        with self._lock:
            self._require_settled()
            served, refusal = self._registry.find(name), self._refusals.get(name)
            if served is None and (refusal is None or refusal.code == REMOVED):
                self._registry.get(name)  # raises, and says why there is none
            # every shard notes it, so that no later controller lists the name, or its refusal, again
            self._dismiss(name, refusal)
            notes, holders = self.tell_refused(), 0
            if served is not None:
                holders = self._holds.count(served.handle)
                notes += self._unlist(served)
        _wait_noted(notes, name)
        with self._lock:
            self._collect()
        return holders

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
        log.info("adapter removed", **described(record), holders=self._holds.count(record.handle), **why)
        return self._shards.broadcast(pb.ShardCommand(note=self._load(record)))

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
        """Shards keep it, for themselves and for the next controller."""
        with self._lock:
            if not self._registry.is_listed(record):
                raise UnknownAdapterError(f"adapter {record.name!r}: was removed or replaced meanwhile; try again")
            self._registry.update(replace(self._registry.get(record.name), pinned=pinned))
            notes = self._note(record)
            self._collect()
        log.info("adapter pinned" if pinned else "adapter unpinned", **described(record))
        _wait_noted(notes, record.name)

    def _note(self, record: Record) -> list[PendingCommand]:
        """Every shard keeps what is known of it now."""
        with self._lock:
            known = self._registry.by_handle(record.handle)
            return self._shards.broadcast(pb.ShardCommand(note=self._load(known))) if known is not None else []

    # -- refusals

    def refused(self) -> list[Refusal]:
        """Adapters of --adapters that were refused, by name; some serve on with earlier content."""
        with self._lock:
            return self._refusals.listed()

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

    def tell_refused(self) -> list[PendingCommand]:
        """Every shard keeps them, for the next controller."""
        with self._lock:
            return self._shards.broadcast(pb.ShardCommand(refused=self._refusals.tell()))

    # -- shards

    def _load_on(self, handle: ShardHandle, record: Record, eager: bool = False) -> PendingCommand:
        def loaded(error: LoraServerError | None) -> None:
            with self._lock:
                resident = self._residency.of(record.handle)
                if error is None:
                    resident.known.add(handle.shard)
                    resident.errors.pop(handle.shard, None)
                elif self._registry.is_listed(record) and not isinstance(error, ShardUnavailableError):
                    resident.errors[handle.shard] = str(error)  # not after a death: its successor loads it again
                    log.error("adapter failed to load", name=record.name, shard=handle.shard, error=str(error))
                    self._admit()

        load = self._load(record)
        load.eager = eager
        return handle.send(pb.ShardCommand(load=load), loaded)

    def _load_everywhere(self, record: Record, eager: bool) -> list[PendingCommand]:
        return [self._load_on(handle, record, eager) for handle in self._shards.live().values()]

    def _load(self, record: Record) -> pb.Load:
        return pb.Load(
            handle=record.handle,
            path=record.path,
            version=record.version,
            stamp=record.stamp,
            record=record.encode(),
            listed=self._is_wanted(record),
            pinned=record.pinned and self._registry.is_listed(record),
        )

    def adopt_refused(self, told: pb.Refusals) -> None:
        """What an earlier controller of this node told a shard, once it had registered the start-up directory."""
        with self._lock:
            self._refusals.adopt(told)

    def adopt(self, kept: Iterable[pb.Load], gone: Iterable[int], last_handle: int) -> None:
        """What a shard knows from an earlier controller of the same run: adapters, and handles that are over."""
        with self._lock:
            self._registry.reserve(last_handle)
            self._gone.update(gone)
            for load in kept:
                record = Record.decode(load.record)
                known = self._registry.by_handle(record.handle)
                if known is None:
                    self._registry.add(record, load.listed)
                elif load.pinned and not known.pinned:  # the other shard was away
                    self._registry.update(replace(known, pinned=True))
                elif not load.listed and self._registry.is_listed(known):
                    self._registry.unlist(known.name)
            for handle in self._gone:
                if self._registry.by_handle(handle) is not None:
                    self._registry.remove(handle)

    def introduce(self, handle: ShardHandle, kept: Iterable[pb.Kept]) -> None:
        """A shard that arrived has this; it drops what nobody knows any more, and loads what it lacks.

        Before all have registered nobody knows what it lacks: see `settle`.
        """
        with self._lock:
            self._residency.forget_shard(handle.shard)
            self._room.set_capacity(handle.shard, handle.registration.pool_bytes)
            for one in kept:
                if self._registry.by_handle(one.load.handle) is None:
                    handle.send(pb.ShardCommand(drop=one.load.handle))
                else:
                    self._residency.of(one.load.handle).layers[handle.shard] = one.layers
            if self._settled.is_set():
                self._load_all_on(handle)
            handle.send(pb.ShardCommand(active=pb.Active(more=sorted(self._room.active), anew=True)))
            for client, handles in self._holds.by_client().items():
                handle.send(pb.ShardCommand(holds=pb.Holds(client=client, more=handles)))
            if self.registered.is_set():
                handle.send(pb.ShardCommand(refused=self._refusals.tell()))
            self._admit()

    def settle(self) -> None:
        """Every shard has said what it keeps: now each gets what only others knew of."""
        with self._lock:
            for handle in self._shards.live().values():
                self._load_all_on(handle)
            if self.registered.is_set():
                self.tell_refused()
            self._collect()

    def _load_all_on(self, handle: ShardHandle) -> None:
        for record in self._registry.records():  # of what is there already only the record is kept
            self._load_on(handle, record)

    def on_moved(self, shard: int, moved: Iterable[pb.Residency]) -> None:
        """What a shard has now of these adapters."""
        with self._lock:
            for one in moved:
                if self._registry.by_handle(one.handle) is not None:
                    resident = self._residency.of(one.handle)
                    resident.layers[shard], resident.host_layers[shard] = one.layers, one.host_layers
                    (resident.remote.add if one.remote else resident.remote.discard)(shard)
                    if one.measured:
                        self._room.set_size(one.handle, shard, one.bytes)
            if self.admission.num_queued:
                self._admit()

    # -- users

    def listings(self) -> list[Listing]:
        """Every adapter, by name."""
        with self._lock:
            return [self._listing(one) for one in sorted(self._registry.records(), key=lambda record: record.name)]

    def get(self, name: str) -> Listing:
        """One listed adapter; UnknownAdapterError says why there is none."""
        with self._lock:
            self._require_settled()
            return self._listing(self._registry.get(name))

    def by_shard(self, name: str) -> list[tuple[int, int, int, int, bool]]:
        """How far each shard is with a listed adapter: see Residency."""
        with self._lock:
            return self._residency.by_shard(self._registry.get(name).handle)

    def held(self, client: int) -> list[str]:
        """Names of what a client holds."""
        with self._lock:
            records = (self._registry.by_handle(handle) for handle in self._holds.of(client))
            return sorted(record.name for record in records if record is not None)

    def listed(self, names: Iterable[str]) -> list[str]:
        """Which of these are adapters."""
        with self._lock:
            return [name for name in names if self._registry.find(name) is not None]

    def _require_settled(self) -> None:
        if not self._settled.is_set():
            raise ServerUnavailableError(RESTARTED)

    def __len__(self) -> int:
        return len(self._registry.records())

    def _listing(self, record: Record) -> Listing:
        handle = record.handle
        state = self._residency.state(handle) if self._is_wanted(record) else "draining"
        layers, error = self._residency.num_layers(handle), self._residency.of(handle).error
        refusal = self._refusals.get(record.name) if self._registry.is_listed(record) else None
        warnings = (*record.warnings, refusal.reason) if refusal is not None else record.warnings
        return Listing(record, state, layers, self._spec.layers, error, self._holds.count(handle), warnings)

    def _is_wanted(self, record: Record) -> bool:
        """Listed, or about to be."""
        return self._registry.is_listed(record) or record.handle in self._coming

    # -- holds

    def acquire(self, client: int, names: Sequence[str], ticket: int = 0) -> tuple[list[Record], Queued | None]:
        """Hold all of `names`, or be queued for them; raises UnknownAdapterError, or why one failed to load."""
        with self._lock:
            self._require_settled()
            self._try_failed_again(names)
            answer = self.admission.acquire(client, ticket, names)
            queued = answer if isinstance(answer, Queued) else None
            handles = self._resolve(names) if isinstance(answer, Queued) else answer
            records = [record for handle in handles if (record := self._registry.by_handle(handle)) is not None]
            for record in records if queued is not None else ():
                if self._room.unmeasured([record.handle]) is not None:  # it is looked at before the others
                    self._load_everywhere(record, eager=False)
            return records, queued

    def _try_failed_again(self, names: Iterable[str]) -> None:
        """Why a shard could not read its files may be over; whoever asks next is told."""
        for record in filter(None, map(self._registry.find, set(names))):
            if self._residency.of(record.handle).error:
                self._load_everywhere(record, eager=False)

    def _resolve(self, names: Sequence[str]) -> list[int]:
        records = [self._registry.get(name) for name in names]
        for record in records:
            if error := self._residency.of(record.handle).error:
                raise AdapterLoadError(f"adapter {record.name!r}: {error}")
        return [record.handle for record in records]

    def wait_admitted(self, client: int, tickets: Collection[int], seconds: float) -> list[int]:
        """Until one of these does not wait any more, but no longer than that: those that do not."""

        def decided() -> list[int]:
            return [ticket for ticket in tickets if not self.admission.is_queued(client, ticket)]

        with self._admitted:
            return self._admitted.wait_for(decided, seconds)

    def settle_tickets(self, client: int, tickets: Iterable[int]) -> None:
        """The client has their answers."""
        with self._lock:
            self.admission.settle(client, tickets)

    def cancel(self, client: int, tickets: Iterable[int]) -> None:
        """Nobody wants what these asked for."""
        with self._lock:
            self.admission.cancel(client, tickets)
            self._collect()

    def release(self, client: int, handles: Iterable[int]) -> None:
        """Let go."""
        with self._lock:
            self.admission.release(client, handles)
            self._collect()

    def holds(self, client: int, handles: Iterable[int]) -> set[int]:
        """Which of these a client holds."""
        with self._lock:
            return {handle for handle in handles if self._holds.has(client, handle)}

    def forget_client(self, client: int) -> None:
        """A client is gone."""
        with self._lock:
            self.admission.forget_client(client)
            self._collect()

    def presume(self, handles: Iterable[int]) -> None:
        """A shard was told by an earlier controller that clients hold these."""
        with self._lock:
            self.admission.presume(handles)

    def _admit(self) -> None:
        self.admission.admit()
        self._admitted.notify_all()

    def _tell_active(self, more: Iterable[int], fewer: Iterable[int]) -> None:
        self._shards.broadcast(pb.ShardCommand(active=pb.Active(more=more, fewer=fewer)))

    def _tell_holds(self, client: int, more: Collection[int], fewer: Collection[int], anew: bool) -> None:
        self._shards.broadcast(pb.ShardCommand(holds=pb.Holds(client=client, more=more, fewer=fewer, anew=anew)))

    def expect(self, client: int) -> None:
        """A client of an earlier controller will say what it holds; until then nothing is given up."""
        with self._lock:
            self._holds.expect(client)

    def is_unknown(self, client: int) -> bool:
        """Whether a client still has to say what it holds."""
        with self._lock:
            return self._holds.is_unknown(client)

    def restore(self, client: int, handles: Iterable[int]) -> None:
        """It says so."""
        with self._lock:
            self.admission.restore(client, handles)
            self._collect()

    def _collect(self) -> None:
        """After a change: what nobody needs is dropped, and who waits looks again."""
        pinned = frozenset(record.handle for record in self._registry.listed() if record.pinned)
        if pinned != self._room.pinned:
            self._room.pinned = pinned
            self.admission.admit()
        self._admitted.notify_all()
        for record in self._registry.records():
            if not self._is_wanted(record) and not self._holds.is_held(record.handle):
                self._registry.remove(record.handle)
                self._residency.forget(record.handle)
                self._room.forget(record.handle)
                self._shards.broadcast(pb.ShardCommand(drop=record.handle))


def _wait_noted(notes: list[PendingCommand], name: str) -> None:
    try:
        wait_all(notes, NOTE_SECONDS, f"noting {name!r}")
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
