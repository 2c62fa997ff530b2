"""The controller's side of what shards know of adapters: commands go out in one order, outcomes and reports come in."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable
from functools import partial

import structlog

from lora_server.control.adapters.catalog import AdapterCatalog
from lora_server.control.adapters.records import Record
from lora_server.control.events.log import EventLog
from lora_server.control.events.residency import ResidencyNews
from lora_server.control.members.shards import PendingCommand, ShardHandle, ShardTable, SharedCommand, swap
from lora_server.control.start import StartState
from lora_server.control.sync.prewarm import Prewarm
from lora_server.control.sync.residency import ResidencyTable
from lora_server.control.sync.sizes import PoolSizes
from lora_server.control.sync.spread import AdapterSpread
from lora_server.errors import LoraServerError, ShardUnavailableError
from lora_server.placement import Placement
from lora_server.wire import lora_server_pb2 as pb

NOT_TOLD = "disk"  # the state of an adapter that no request named yet, see AdapterSpread
log = structlog.get_logger()


class PrewarmCommands:
    """Sends shards the loads that `Prewarm` decides on. `send` is called under `lock`, which outcomes take."""

    def __init__(
        self,
        prewarm: Prewarm,
        shards: ShardTable,
        catalog: AdapterCatalog,
        start: StartState,
        lock: threading.RLock,
        changed: Callable[[Record], object],
    ) -> None:
        """`changed` is called when a load that was decided on has ended."""
        self.prewarm, self._shards, self._catalog, self._start, self._lock = prewarm, shards, catalog, start, lock
        self._changed = changed

    def send(self) -> None:
        """Decide, and send what was decided, once all shards are there."""
        if not self.prewarm.is_due or not self._start.settled.is_set():
            return
        live = self._shards.live()
        if len(live) < self._shards.layout.num_shards:
            return
        for load in self.prewarm.decide(self._is_listed):
            for shard in load.shards:
                command = pb.ShardCommand(bring=load.handle)
                live[shard].commands.send(command, partial(self._answered, self.prewarm, load.handle, shard))

    def _answered(self, prewarm: Prewarm, handle: int, shard: int, _: LoraServerError | None) -> None:
        """Take the outcome; what a shard did not load is loaded when a request asks."""
        with self._lock:
            if (record := self._catalog.by_handle(handle)) is not None:
                prewarm.answered(handle, shard)
                self._changed(record)
            self.send()

    def _is_listed(self, handle: int) -> bool:
        record = self._catalog.by_handle(handle)
        return record is None or self._catalog.is_listed(record)


class LoadCommands:
    """Commands to load an adapter. Shards on which it takes the same share one, which is encoded once.

    A shard that is told what an adapter takes does not open its files before it loads it. Without `tells_size` all
    shards open them now, so that one whose node has none says so.
    """

    def __init__(self, load: pb.Load, tells_size: bool = True) -> None:
        self.load, self._tells_size = load, tells_size
        self._of_size: dict[int | None, SharedCommand] = {}

    def of_size(self, size: int | None) -> SharedCommand:
        """Return the command for the shards on which it takes this; None: they are to measure it."""
        size = size if self._tells_size else None
        if (command := self._of_size.get(size)) is None:
            own = pb.ShardCommand(load=self.load)  # a copy
            if size is not None:
                own.load.size = size
            command = self._of_size[size] = SharedCommand(own, has_outcome=True)
        return command


class ShardSync:
    """Sends the shards commands about adapters, and keeps what they report. Thread-safe.

    `lock` orders commands: no shard loads an adapter after the command to drop it. Hold it around a change of the
    catalog and the command that follows from it. Never blocks; outcomes of commands may arrive while it is held.
    While the server is resized, `other` does the same for the placement that does not serve, under the same lock.
    """

    other: ShardSync | None = None

    def __init__(
        self,
        shards: ShardTable,
        catalog: AdapterCatalog,
        start: StartState,
        placement: Placement,
        events: EventLog,
        lock: threading.RLock | None = None,
    ) -> None:
        self.shards, self._catalog, self._start = shards, catalog, start
        self.residency, self.sizes = ResidencyTable(placement), PoolSizes(placement.layout.num_shards)
        self.prewarm, self._news = Prewarm(self.residency, self.sizes), ResidencyNews(events)
        self.lock = threading.RLock() if lock is None else lock
        self.spread = AdapterSpread(placement.layout.num_shards)
        self._prewarming = PrewarmCommands(self.prewarm, shards, catalog, start, self.lock, self._publish)
        self.sends = False  # shards of other nodes get files from here; otherwise all nodes see them

    # -- commands

    def broadcast(self, command: pb.ShardCommand) -> list[PendingCommand]:
        """Send a command to every live shard, in the order of the others."""
        with self.lock:
            return self.shards.broadcast(command)

    def register(self, record: Record) -> list[PendingCommand]:
        """Tell shards of an adapter that no request named yet: all of them, which load it where it fits, or once they
        know many those that keep its record."""
        with self.lock:
            if not (record.handle in self.spread.on_all or record.pinned or self.spread.has_room()):
                return self.note(record.handle)
            loads = self.load(record)
            self.prewarm.offer([record.handle])
            self._prewarming.send()
            return loads

    def require(self, record: Record) -> bool:
        """Tell all shards of an adapter that a request or an operator names now; return False if they know it."""
        with self.lock:
            is_new = record.handle not in self.spread.on_all
            if is_new:
                self.load(record, asked=True)
            return is_new

    def load(self, record: Record, eager: bool = False, asked: bool = False) -> list[PendingCommand]:
        """Tell every live shard of an adapter. Eager: they load it and evict others for it; otherwise they open its
        files, and load it where there is room, or when a step needs it. `asked`: a request waits for that."""
        with self.lock:
            failed = self.residency.error(record.handle, last_load=True)  # then they are to look at its files
            loads = LoadCommands(self._message(record, eager, asked), tells_size=asked and not failed)
            if (other := self.other) is not None:
                other.spread.add([record.handle])
                for handle in other.shards.live().values():
                    other._load_on(handle, record, loads)
            self.spread.add([record.handle])
            return [self._load_on(handle, record, loads) for handle in self.shards.live().values()]

    def ask(self, handle: ShardHandle, record: Record) -> None:
        """Have one shard measure an adapter that a request waits for, unless it has."""
        with self.lock:
            if (owner := self.of(handle)) is not None and owner.sizes.of(record.handle, handle.shard) is None:
                owner._load_on(handle, record, LoadCommands(self._message(record, asked=True)))

    def _load_on(self, handle: ShardHandle, record: Record, loads: LoadCommands) -> PendingCommand:
        if loads.load.eager:
            self.prewarm.asked(record.handle, handle.shard)
        self.sizes.set_outline(record.handle, record.outline)
        command = loads.of_size(self.sizes.of(record.handle, handle.shard))
        return handle.commands.send(command, partial(self._loaded, handle, record))

    def _loaded(self, handle: ShardHandle, record: Record, error: LoraServerError | None) -> None:
        """Take the outcome of a load. A shard's death is none: its successor is sent the load again."""
        with self.lock:
            if (owner := self.of(handle)) is not None and self._catalog.by_handle(record.handle) is not None:
                owner._note_load(handle.shard, record, error)

    def of(self, handle: ShardHandle) -> ShardSync | None:
        """Return the one that keeps what a shard has, None where its placement is over. Call it under the lock."""
        both = (self, self.other)
        return next((one for one in both if one and one.shards.generation == handle.generation), None)

    def _note_load(self, shard: int, record: Record, error: LoraServerError | None) -> None:
        if error is None:
            self.residency.opened(record.handle, shard)
        elif self._catalog.is_listed(record) and not isinstance(error, ShardUnavailableError):
            self.residency.opened(record.handle, shard, str(error))
            log.error("adapter failed to load", name=record.name, shard=shard, error=str(error))
        self._note(record, shard)
        self._prewarming.send()

    def _message(self, record: Record, eager: bool = False, asked: bool = False) -> pb.Load:
        return pb.Load(
            handle=record.handle,
            path=record.path,
            version=record.version,
            stamp=record.stamp,
            record=record.encode(),
            listed=self._catalog.is_wanted(record),
            pinned=record.pinned and self._catalog.is_listed(record),
            sent=self.sends,
            eager=eager,
            asked=asked,
        )

    def note(self, handle: int) -> list[PendingCommand]:
        """Have every shard that knows an adapter, or keeps its record, keep what the catalog says of it now."""
        with self.lock:
            if (record := self._catalog.by_handle(handle)) is None:
                return []
            note = pb.ShardCommand(note=self._message(record))
            if handle in self.spread.on_all:
                return self.broadcast(note)
            return [
                found.commands.send(pb.ShardCommand(note=note.note))
                for one in filter(None, (self, self.other))
                for shard, found in one.shards.live().items()
                if shard in one.spread.keepers(handle)
            ]

    def tell_refused(self) -> list[PendingCommand]:
        """Have every shard keep the refusals, for the next controller."""
        with self.lock:
            return self.broadcast(pb.ShardCommand(refused=self._catalog.refusals.tell()))

    def drop(self, handle: int) -> None:
        """Have every shard drop an adapter that is not in the catalog any more."""
        with self.lock:
            for one in filter(None, (self, self.other)):
                one.prewarm.forget(handle)
                one.residency.forget(handle)
                one.sizes.forget(handle)
                one.spread.forget(handle)
                one._news.forget(handle)
            self.broadcast(pb.ShardCommand(drop=handle))
            self._prewarming.send()

    # -- shards that register, and report

    def introduce(self, handle: ShardHandle, kept: Iterable[pb.Kept], first: Collection[int] = ()) -> None:
        """Take what a shard that registered has; it drops what is not in the catalog, and loads what it lacks, with
        these handles before all others.

        Before all shards have registered no shard's lack is known: see `settle`.
        """
        with self.lock:
            self.count()
            self.residency.forget_shard(handle.shard)
            for known_to_all in self.spread.on_all:
                if (record := self._catalog.by_handle(known_to_all)) is not None:
                    self._note(record, handle.shard)
            self.sizes.set_capacity(handle.shard, handle.registration.pool_bytes)
            for one in kept:
                if (known := self._catalog.by_handle(one.load.handle)) is None:
                    handle.commands.send(pb.ShardCommand(drop=one.load.handle))
                elif one.layers:
                    self.spread.add([known.handle])
                    self.residency.report(handle.shard, pb.Residency(handle=known.handle, layers=one.layers))
                    self._note(known, handle.shard)
            if self._start.settled.is_set():
                self._load_all_on(handle, first)
            if self._start.registered.is_set():
                handle.commands.send(pb.ShardCommand(refused=self._catalog.refusals.tell()))

    def count(self) -> None:
        """Let adapters be complete without the shards that are down while their twins are up."""
        layout, live = self.shards.layout, self.shards.live().keys()
        idle = {one for one in range(layout.num_shards) if one not in live and live & set(layout.twins(one))}
        with self.lock:
            self.residency.set_idle(idle)
            self.sizes.set_idle(idle)

    def settle(self) -> None:
        """Give each shard what others kept and it did not, once all of them have said what they keep."""
        with self.lock:
            for record in self._catalog.records():
                if record.pinned or self.spread.has_room():
                    self.spread.add([record.handle])
            for handle in self.shards.live().values():
                self._load_all_on(handle)
            if self._start.registered.is_set():
                self.tell_refused()

    def swap(self, other: ShardSync) -> None:
        """Exchange placements, shards and what they have with `other`."""
        with self.lock:
            swap(self.shards, other.shards)
            self.residency, other.residency = other.residency, self.residency
            self.sizes, other.sizes = other.sizes, self.sizes
            self.spread, other.spread = other.spread, self.spread
            self.prewarm, other.prewarm = other.prewarm, self.prewarm
            for one in (self, other):
                one._prewarming.prewarm = one.prewarm
            for record in self._catalog.records():
                self._publish(record)

    def _load_all_on(self, handle: ShardHandle, first: Collection[int] = ()) -> None:
        records = sorted(self._catalog.records(), key=lambda record: record.handle not in first)
        self.prewarm.offer(record.handle for record in records if record.handle in self.spread.on_all)
        for record in records:  # a shard that has one keeps only the record
            if record.handle in self.spread.on_all:
                self._load_on(handle, record, LoadCommands(self._message(record, eager=record.handle in first)))
            elif handle.shard in self.spread.keepers(record.handle):
                handle.commands.send(pb.ShardCommand(note=self._message(record)))

    def hear(self, handle: ShardHandle, moved: Iterable[pb.Residency]) -> bool:
        """Take a shard's report of what it has of these adapters; return whether it is one of those that serve."""
        with self.lock:
            if (owner := self.of(handle)) is not None:
                owner.moved(handle.shard, moved)
            return owner is self

    def moved(self, shard: int, moved: Iterable[pb.Residency]) -> None:
        """Take a shard's report of what it has of these adapters."""
        with self.lock:
            for one in moved:
                if (record := self._catalog.by_handle(one.handle)) is not None:
                    self.residency.report(shard, one)
                    self.sizes.set_outline(one.handle, record.outline)
                    if one.measured:
                        self.sizes.set_size(one.handle, shard, one.bytes)
                    self._note(record, shard)
            self.prewarm.heard(shard)
            self._prewarming.send()

    def _note(self, record: Record, shard: int) -> None:
        """Take that what a shard has of an adapter changed."""
        self.prewarm.note(record.handle, shard)
        self._publish(record)

    def _publish(self, record: Record) -> None:
        self._news.note(record, self.state(record.handle))

    # -- queries

    def state(self, handle: int) -> str:
        """Return an adapter's state, see ResidencyTable.state."""
        with self.lock:
            if handle not in self.spread.on_all:
                return NOT_TOLD
            return self.residency.state(handle, self.prewarm.is_loading(handle))
