"""Adapters as shards know them: what each was told, what each has, and what the next controller will ask them."""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import structlog

from lora_server.clock import SYSTEM, Clock
from lora_server.control.adapters.allowed import NOWHERE, Allowed
from lora_server.control.adapters.attempts import Attempts
from lora_server.control.adapters.registry import Record, Registry
from lora_server.control.admission.admission import Admission
from lora_server.control.admission.holds import Holds
from lora_server.control.admission.residency import Residency
from lora_server.control.admission.room import Room
from lora_server.control.admission.tally import Tally
from lora_server.control.admission.unasked import Unasked
from lora_server.control.members.agreement import Agreement
from lora_server.control.members.leases import Leases
from lora_server.control.members.shards import PendingCommand, ShardHandle, ShardTable
from lora_server.errors import (
    AdapterLoadError,
    LoraServerError,
    ServerUnavailableError,
    ShardUnavailableError,
    UnknownAdapterError,
)
from lora_server.placement import Placement
from lora_server.registry.versions import Ledger
from lora_server.sources.copies import Copies
from lora_server.sources.fetch import Fetcher
from lora_server.sources.remote import is_remote
from lora_server.timings import DEFAULTS, Timings
from lora_server.wire import lora_server_pb2 as pb

RESTARTED = "the controller has just started and waits for its shards to register; try again"
log = structlog.get_logger()


class ToldAdapters:
    """Thread-safe. `registered` is set once the start-up directory is listed."""

    sends = False  # shards of other nodes get files from here; otherwise all nodes see them

    def __init__(
        self,
        agreement: Agreement,
        shards: ShardTable,
        settled: threading.Event,
        leases: Leases,
        most_active: int = 0,
        fetcher: Fetcher | None = None,
        allowed: Allowed = NOWHERE,
        ledger: Ledger | None = None,
        copies: Copies | None = None,
        timings: Timings = DEFAULTS,
        clock: Clock = SYSTEM,
    ) -> None:
        """`settled`: all shards have said what they keep, so that an unknown name is none; `most_active`: see Room;
        `fetcher` brings adapters from far; `allowed`: where those that are added may lie; `ledger`: what is added by
        name is kept there for good; `copies`: its files are copied there."""
        self._fetcher, self._allowed = fetcher, allowed
        self._spec, self._shards, self._settled, self._leases = agreement.spec, shards, settled, leases
        self._ledger, self._copies = ledger, copies
        self._timings, self._clock = timings, clock
        self._untidy = True  # there may be copies that nobody needs
        self._spec_digest = hashlib.sha256(agreement.spec.to_json().encode()).hexdigest()[:16]
        self._registry = Registry(ledger.take_handles if ledger is not None else None)
        self._room = Room(most_active)
        self.tally = Tally(self._name_of, clock.now)
        self._holds = Holds(self.tally.changed)
        self.admission = Admission(
            self._resolve,
            self._room,
            self._holds,
            changed=self._tell_active,
            told=self._tell_holds,
            is_resident=lambda handle: self._residency.state(handle) == "ready",
            clock=clock.now,
            first_seconds=timings.first_in_queue,
        )
        self._refusals = self._registry.refusals
        self._attempts = Attempts(ledger.attempts if ledger is not None else None)
        self._told_listed, self._told_not = set[int](), set[int]()  # handles, as shards keep them
        self._gone: set[int] = set()  # handles that an earlier controller dropped
        self._coming: set[int] = set()  # handles that are loaded to replace another under its name
        self._residency = Residency(Placement(agreement.spec, agreement.layout))
        self._unasked = Unasked(self._residency, self._room)
        self._until: dict[int, float] = {}  # handles that drain, and when whoever holds them still is cut off
        self._deadlines = ledger.drains.deadlines() if ledger is not None else {}  # an earlier controller's
        self._changing = threading.RLock()  # one change of the list at a time; taken before the next, never after it
        self._lock = threading.RLock()  # outcomes of commands may come while it is held
        self._admitted = threading.Condition(self._lock)
        self.registered = threading.Event()
        self.progress = 0, 0  # of registering the start-up directory: done, all

    # -- what shards are told

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
                self._unasked.note(record.handle, handle.shard)
                self._bring_unasked()

        if eager:
            self._unasked.asked(record.handle, handle.shard)
        load = self._load(record)
        load.eager = eager
        if (size := self._room.size_on(record.handle, handle.shard)) is not None:
            load.size = size
        return handle.send(pb.ShardCommand(load=load), loaded)

    def _bring_unasked(self) -> None:
        live = self._shards.live()
        if len(live) < self._residency.num_shards or not self._settled.is_set():
            return
        for bring in self._unasked.decide(lambda handle: handle not in self._registry.unlisted):
            for shard in bring.shards:
                live[shard].send(pb.ShardCommand(bring=bring.handle), partial(self._brought, bring.handle, shard))

    def _brought(self, handle: int, shard: int, error: LoraServerError | None) -> None:
        """Or not: then it comes when somebody asks."""
        with self._lock:
            if self._registry.by_handle(handle) is not None:
                self._unasked.answered(handle, shard)
            self._bring_unasked()

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
            sent=self.sends,
        )

    def path_of(self, version: str) -> Path:
        """Where this host has the files of a version that is registered, or about to be. Raises UnknownAdapterError."""
        with self._lock:
            paths = (one.path for one in self._registry.records() if one.version == version)
            found = next((path for path in paths if not is_remote(path)), None)
        if found is None or not self.sends:
            raise UnknownAdapterError(f"version {version[:12]}: node 0 has no files of it to send; was it removed?")
        return Path(found)

    def _note(self, record: Record) -> list[PendingCommand]:
        """Every shard keeps what is known of it now."""
        with self._lock:
            known = self._registry.by_handle(record.handle)
            return self._shards.broadcast(pb.ShardCommand(note=self._load(known))) if known is not None else []

    def tell_refused(self) -> list[PendingCommand]:
        """Every shard keeps them, for the next controller."""
        with self._lock:
            return self._shards.broadcast(pb.ShardCommand(refused=self._refusals.tell()))

    def _name_of(self, handle: int) -> str | None:
        record = self._registry.by_handle(handle)
        return None if record is None else record.name

    def _tell_active(self, more: Iterable[int], fewer: Iterable[int], trace: Mapping[str, str]) -> None:
        self._shards.broadcast(pb.ShardCommand(active=pb.Active(more=more, fewer=fewer, trace=trace)))

    def _tell_holds(self, client: int, more: Collection[int], fewer: Collection[int], anew: bool) -> None:
        self._shards.broadcast(pb.ShardCommand(holds=pb.Holds(client=client, more=more, fewer=fewer, anew=anew)))

    # -- shards that come

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
                (self._told_listed.add if load.listed else self._told_not.add)(record.handle)
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
            for record in self._registry.records():
                self._unasked.note(record.handle, handle.shard)
            self._room.set_capacity(handle.shard, handle.registration.pool_bytes)
            for one in kept:
                if self._registry.by_handle(one.load.handle) is None:
                    handle.send(pb.ShardCommand(drop=one.load.handle))
                else:
                    self._residency.of(one.load.handle).layers[handle.shard] = one.layers
                    self._unasked.note(one.load.handle, handle.shard)
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
            self._adopt_deadlines(self._deadlines)
            self._collect()

    def _adopt_deadlines(self, kept: Mapping[int, float]) -> None:
        """Of what drains, as another controller kept them: in seconds since 1970."""
        for handle in self._registry.unlisted - self._coming:
            if handle in kept:
                self._until.setdefault(handle, self._clock.now() + kept[handle] - self._clock.time())

    def _load_all_on(self, handle: ShardHandle) -> None:
        records = self._registry.records()
        self._unasked.offer(record.handle for record in records)
        for record in records:  # of what is there already only the record is kept
            self._load_on(handle, record)

    def on_moved(self, shard: int, moved: Iterable[pb.Residency]) -> None:
        """What a shard has now of these adapters."""
        with self._lock:
            for one in moved:
                if self._registry.by_handle(one.handle) is not None:
                    resident = self._residency.of(one.handle)
                    resident.layers[shard], resident.host_layers[shard] = one.layers, one.host_layers
                    (resident.remote.add if one.remote else resident.remote.discard)(shard)
                    (resident.coming.add if one.coming else resident.coming.discard)(shard)
                    if one.measured:
                        self._room.set_size(one.handle, shard, one.bytes)
                    self._unasked.note(one.handle, shard)
            self._unasked.heard(shard)
            self._bring_unasked()
            if self.admission.num_queued:
                self._admit()

    # -- what follows from a change

    def _require_settled(self) -> None:
        if not self._settled.is_set():
            raise ServerUnavailableError(RESTARTED)

    def _is_wanted(self, record: Record) -> bool:
        """Listed, or about to be."""
        return self._registry.is_listed(record) or record.handle in self._coming

    def _resolve(self, names: Sequence[str]) -> list[int]:
        records = [self._registry.get(name) for name in names]
        for record in records:
            if error := self._residency.of(record.handle).error:
                raise AdapterLoadError(f"adapter {record.name!r}: {error}")
        return [record.handle for record in records]

    def cut_off(self) -> None:
        """What drains longer than it may goes, whoever holds it. To be called about once a second."""
        with self._lock:
            over = [handle for handle, until in self._until.items() if until <= self._clock.now()]
            for handle in over:
                if cut := self.admission.revoke(handle):
                    log.warning("adapter taken from clients", name=self._name_of(handle), handle=handle, clients=cut)
            if over:
                self._collect()

    def _admit(self) -> None:
        self.admission.admit()
        self._admitted.notify_all()

    def _collect(self) -> None:
        """After a change: what nobody needs is dropped, and who waits looks again."""
        pinned = frozenset(self._registry.pinned)
        if pinned != self._room.pinned:
            self._room.pinned = pinned
            self.admission.admit()
        self._admitted.notify_all()
        for handle in sorted(self._registry.unlisted - self._coming):
            if not self._holds.is_held(handle) or self._until.get(handle, math.inf) <= self._clock.now():
                self._until.pop(handle, None)
                self._registry.remove(handle)
                self._untidy = True
                self._unasked.forget(handle)
                self._residency.forget(handle)
                self._room.forget(handle)
                self._shards.broadcast(pb.ShardCommand(drop=handle))
        self._bring_unasked()
