"""The adapter weights of one shard: known, brought in, pinned by steps, evicted, dropped.

Its thread brings one layer after the other: first what is needed first (deadlines), then what somebody waits for,
then, as long as there is room, what nobody has asked for yet. READY is per layer, so a step at layer 0 can run when
layer 0 is there; which steps wait is the caller's business.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lora_server.errors import AdapterLoadError, LoraServerError, ProtocolError, UnknownAdapterError
from lora_server.memory.entry import Demand, Done, Entry, Source, State
from lora_server.memory.eviction import Policy, lru, may_go, victims
from lora_server.memory.fetching import Fetching
from lora_server.memory.loading import Loader
from lora_server.memory.pins import Pins
from lora_server.memory.pools import Pool
from lora_server.memory.preload import PAUSE_SECONDS, Preload
from lora_server.memory.tier import Tier
from lora_server.placement import Placement
from lora_server.sources.cache import Lease
from lora_server.sources.fetch import Fetcher
from lora_server.spec import Site

LOOK_SECONDS = 0.02  # how often one that has no room looks whether somebody's turn is over


class MemoryUse(NamedTuple):
    """Bytes of the device pool and of the host pool, and what has happened since the start."""

    weight_bytes: int
    free_bytes: int
    total_bytes: int
    host_bytes: int
    host_total_bytes: int
    loads: int  # of whole adapters
    loaded_bytes: int
    evictions: int
    preloads: int
    preload_hits: int


class Residency(NamedTuple):
    """How much of an adapter is where."""

    handle: int
    ready: int  # layers
    packed: int  # layers in the host pool
    nbytes: int  # that it takes of the device pool
    measured: bool  # its files were looked at: `nbytes` is true
    far: bool  # its files are not on this node's disk


class WeightStore:
    """Thread-safe. `on_layer(handle, layers ready)` is called by its thread after each layer, and after a failure."""

    def __init__(
        self,
        placement: Placement,
        shard: int,
        tier: Tier,
        host_pool: Pool | None = None,
        *,
        policy: Policy = lru,
        link_gbps: float = 0.0,
        on_layer: Callable[[int, int], None] = lambda handle, layers: None,
        fetcher: Fetcher | None = None,
        preload: bool = False,
    ) -> None:
        """`fetcher` brings files from far; `preload`: idle memory is filled."""
        self.tier, self.host_pool = tier, host_pool
        self._shard, self._policy, self._on_layer = shard, policy, on_layer
        self._layers = placement.layers(shard)
        self._changed = threading.Condition()
        self._entries: dict[int, Entry] = {}
        self._wanted: dict[int, Entry] = {}  # not whole, and somebody wants them
        self._unasked: deque[Entry] = deque()
        self._whole: set[int] = set()  # handles
        self._pins = Pins()
        self._demanded: dict[Hashable, set[Entry]] = {}  # by whom
        self._dropped: set[Entry] = set()  # and not free yet
        self._kept: set[Entry] = set()
        self._active: set[int] = set()  # handles that clients hold
        self._postponed: dict[int, Entry] = {}  # eager ones, until fewer are active
        self._busy: Entry | None = None  # the thread works on it, without the lock
        self._starved = False  # the thread waits for memory
        self._moved: set[int] = set()
        self._loads = self._loaded_bytes = self._evictions = self._orders = 0
        self._closing = threading.Event()
        self._preload = Preload(self._entries, tier.pool, self._let_go, preload)
        self._fetching = Fetching(fetcher, self._fetched, self._closing.is_set)
        self._on_disk: frozenset[str] = frozenset()  # versions that the disk cache has
        self._loader = Loader(placement, shard, tier, self._closing.wait, self._pins.none.wait, link_gbps)
        self._thread = threading.Thread(target=self._run, name="weight-loader", daemon=True)
        self._thread.start()

    # -- adapters

    def load(self, handle: int, source: Source, done: Done, eager: bool = True) -> None:
        """Know an adapter from now on; `done` is called once, from any thread.

        Eager: it is brought in, others make room, and `done` comes when all of it is READY; where active ones leave no
        room, it comes when that is known, and the adapter follows when they do. Otherwise `done` comes when its files
        were looked at, and it is brought in if there is room, or when somebody asks.
        """
        with self._changed:
            entry = self._entries.get(handle)
            again = entry is not None
            if entry is None:
                self._orders += 1
                entry = self._entries[handle] = Entry(handle, source, self._layers, self._orders)
                entry.far = self._is_far(entry)
                self._note_active(entry)
            elif entry.source.version != source.version:
                done(AdapterLoadError(f"handle {handle}: has version {entry.source.version[:12]} here already"))
                return
            entry.retry()
            self._moved.add(handle)
            known = entry.size is not None or (entry.far and not again)  # nothing is fetched before somebody asks
            if entry.failure is not None or entry.is_whole() or (known and not eager):
                done(entry.failure)
                return
            if eager:
                entry.eager = True
                entry.waiting.append(done)
                self._want(entry)
            else:
                entry.looking.append(done)
                self._look_at(entry, again)

    def keep(self, handle: int, done: Done) -> None:
        """Bring an adapter in, and let it never make room until `unkeep`; `done` is called as by an eager `load`.

        AdapterLoadError, and nothing changed, where all that are kept do not fit together.
        """

        def looked(error: LoraServerError | None) -> None:
            if error is None:
                self.keep(handle, done)
            else:
                done(error)

        with self._changed:
            entry = self._entries.get(handle)
            if entry is None:
                done(UnknownAdapterError(f"shard {self._shard}: handle {handle} is unknown here; was it removed?"))
                return
            entry.retry()
            if entry.failure is not None:
                done(entry.failure)
            elif entry.size is None:
                entry.looking.append(looked)
                self._look_at(entry)
            elif (error := self._too_many_kept(entry)) is not None:
                done(error)
            else:
                entry.stays = True
                self._kept.add(entry)
                if entry.is_whole():
                    done(None)
                else:
                    entry.waiting.append(done)
                    self._want(entry)

    def unkeep(self, handle: int) -> None:
        """It makes room as others do. Unknown handles are ignored."""
        with self._changed:
            entry = self._entries.get(handle)
            if entry is not None and entry.stays:
                entry.stays = False
                self._kept.discard(entry)
                self._changed.notify()

    def relocate(self, handle: int, source: Source) -> None:
        """The same content lies elsewhere, or in other files. Unknown handles, and other content, are ignored."""
        with self._changed:
            entry = self._entries.get(handle)
            if entry is not None and entry.source.version == source.version:
                entry.source, entry.far = source, self._is_far(entry)

    def note_disk(self, versions: frozenset[str]) -> None:
        """The disk cache has these, and no others."""
        with self._changed:
            if versions == self._on_disk:
                return
            self._on_disk = versions
            for entry in self._entries.values():
                if entry.far != self._is_far(entry):
                    entry.far = not entry.far
                    self._moved.add(entry.handle)

    def drop(self, handle: int) -> None:
        """Forget an adapter; its memory is free when no step reads it any more. Unknown handles are ignored.

        Whoever waits for it gets an AdapterLoadError.
        """
        with self._changed:
            entry = self._entries.pop(handle, None)
            if entry is None:
                return
            entry.dropped, entry.withdrawn = True, self.tier.withdraw(handle)
            self._wanted.pop(handle, None)
            self._whole.discard(handle)
            self._dropped.add(entry)
            for demanded in self._demanded.values():
                demanded.discard(entry)
            self._kept.discard(entry)
            self._postponed.pop(handle, None)
            self._active.discard(handle)
            self._free_if_dropped(entry)
            waiting, entry.waiting, entry.looking = entry.waiting + entry.looking, [], []
        for done in waiting:
            done(AdapterLoadError(f"handle {handle}: dropped while it loaded"))

    def set_active(self, more: Iterable[int], fewer: Iterable[int], anew: bool = False) -> None:
        """Which handles clients hold: these too, or with `anew` only these. They are brought in, and stay."""
        with self._changed:
            before = self._active
            self._active = (set() if anew else before - set(fewer)) | set(more)
            for handle in before ^ self._active:
                if handle in self._entries:
                    self._note_active(self._entries[handle])
            if before - self._active:
                postponed, self._postponed = self._postponed, {}
                for entry in postponed.values():
                    entry.eager = True
                    self._want(entry)
            self._changed.notify()

    # -- steps

    def pin(self, handles: Collection[int], layer: int, owner: Hashable, deadline: float) -> int | None:
        """Keep these adapters where they are until `unpin`; None where one is not READY, which is then demanded.

        deadline: time.monotonic(). Those that are unknown or FAILED keep nobody waiting: `gather` refuses them. Raises
        AdapterLoadError where all of them together do not fit.
        """
        with self._changed:
            if not self._whole.issuperset(handles) and not self._have(handles, layer, owner, deadline):
                return None
            if owner in self._demanded:
                self._withdraw(owner, {one for one in self._demanded[owner] if one.handle in handles})
            return self._pins.add(handles, time.monotonic())

    def unpin(self, pin: int) -> None:
        """The step was answered."""
        with self._changed:
            self._pins.remove(pin)
            for entry in list(self._dropped):
                self._free_if_dropped(entry)
            if self._starved:
                self._changed.notify()

    def prefetch(self, handles: Iterable[int], owner: Hashable, deadline: float) -> None:
        """These will be needed then, at the first layer. Unknown handles are ignored."""
        with self._changed:
            known = [entry for handle in handles if (entry := self._entries.get(handle)) is not None]
            self._demand(known, None, owner, deadline)

    def forget(self, owner: Hashable, but: Collection[int] = ()) -> None:
        """Whoever demanded something needs it no more, but for these handles."""
        with self._changed:
            self._withdraw(owner, {one for one in self._demanded.get(owner, ()) if one.handle not in but})
            self._changed.notify()

    def known(self, handles: Iterable[int]) -> frozenset[int]:
        """Those of these that are adapters."""
        return frozenset(handle for handle in handles if handle in self._entries)

    def missing(self, handles: Iterable[int], layer: int) -> int | None:
        """One of these that a step of the layer has to wait for."""
        entries = (self._entries.get(handle) for handle in handles)
        return next((entry.handle for entry in entries if entry is not None and entry.lacks(layer)), None)

    def gather(self, site: Site, segments_S4: npt.NDArray[np.int32], where: str) -> Any:
        """The weights of a step, for what it pinned; see Tier.gather. `where` names the step in errors: why loading
        FAILED, UnknownAdapterError for what is not READY, ProtocolError for what another shard owns."""

        def refusal(handle: int, expert: int) -> LoraServerError:
            entry = self._entries.get(handle)
            state = State.UNKNOWN if entry is None else entry.state(site.layer)
            if entry is not None and entry.failure is not None and state is State.FAILED:
                return entry.failure
            if state is State.READY:
                return ProtocolError(
                    f"{site} expert {expert}: not on shard {self._shard}; placements differ, join again"
                )
            return UnknownAdapterError(
                f"shard {self._shard} {where}: handle {handle} is {state.value} here; was it removed?"
            )

        return self.tier.gather(site, segments_S4, refusal)

    # -- what there is

    def state(self, handle: int, layer: int) -> State:
        """Where a layer stands."""
        entry = self._entries.get(handle)
        return State.UNKNOWN if entry is None else entry.state(layer)

    def error(self, handle: int) -> LoraServerError:
        """Why a handle is FAILED."""
        entry = self._entries.get(handle)
        failure = entry.failure if entry is not None else None
        return failure or AdapterLoadError(f"handle {handle}: not failed")

    def layers_ready(self, handle: int) -> int:
        """How many of its layers are; 0 for one that is unknown."""
        entry = self._entries.get(handle)
        return len(entry.ready) if entry is not None else 0

    def moved(self) -> list[Residency]:
        """Adapters that came or went since the last call."""
        with self._changed:
            moved, self._moved = self._moved, set()
            entries = [self._entries[handle] for handle in moved if handle in self._entries]
            return [
                Residency(
                    one.handle,
                    len(one.ready),
                    len(one.packed),
                    one.size or 0,
                    one.size is not None or one.is_whole(),
                    one.far,
                )
                for one in entries
            ]

    def use(self) -> MemoryUse:
        """What the pools hold."""
        with self._changed:
            self._note_uses()
        device, host = self.tier.pool, self.host_pool
        return MemoryUse(
            device.used,
            device.free,
            device.capacity,
            host.used if host else 0,
            host.capacity if host else 0,
            self._loads,
            self._loaded_bytes,
            self._evictions,
            self._preload.preloads,
            self._preload.hits,
        )

    def check_integrity(self) -> None:
        """When idle: every byte of the pools is free or an adapter's, once. Raises AssertionError."""
        with self._changed:
            entries = list(self._entries.values())
            self.tier.pool.check_integrity([entry.device for entry in entries if entry.device is not None])
            if self.host_pool is not None:
                self.host_pool.check_integrity([entry.host for entry in entries if entry.host is not None])
            for entry in entries:
                assert not entry.ready or entry.device is not None or not entry.nbytes, entry
                assert not entry.packed or entry.host is not None, entry

    def close(self) -> None:
        """Drop everything and stop."""
        with self._changed:
            self._closing.set()  # first: no other load begins
            self._changed.notify()
        for handle in list(self._entries):
            self.drop(handle)
        self._thread.join()

    # -- under the lock

    def _have(self, handles: Iterable[int], layer: int, owner: Hashable, deadline: float) -> bool:
        """Whether a step can be served; otherwise what it lacks is demanded."""
        entries, now = [one for handle in handles if (one := self._entries.get(handle)) is not None], time.monotonic()
        for entry in entries:
            entry.retry()
        if any(entry.lacks(layer) for entry in entries):
            self._check_fit(entries, self._kept)
            self._demand(entries, layer, owner, deadline)
            return False
        for entry in entries:
            entry.in_part = None if entry.is_whole() or entry.failure is not None else now
        return True

    def _withdraw(self, owner: Hashable, over: set[Entry]) -> None:
        for entry in over:
            entry.demands.pop(owner, None)
        left = self._demanded.pop(owner, set()) - over
        if left:
            self._demanded[owner] = left

    def _note_uses(self) -> None:
        for now, handles in self._pins.take_uses():
            for handle in handles:
                if handle in self._entries:
                    self._entries[handle].usage.count(now)
                    self._preload.note_use(self._entries[handle])

    def _note_active(self, entry: Entry) -> None:
        entry.active = entry.handle in self._active
        if entry.active and not entry.is_whole() and entry.failure is None:
            self._want(entry)

    def _is_far(self, entry: Entry) -> bool:
        return bool(entry.source.remote) and entry.source.version not in self._on_disk

    def _look_at(self, entry: Entry, soon: bool = False) -> None:
        """At its files, which may have to come first."""
        if self._loader.lacks_files(entry):
            self._want(entry)
            return
        (self._unasked.appendleft if soon else self._unasked.append)(entry)
        self._changed.notify()

    def _want(self, entry: Entry) -> None:
        self._wanted[entry.handle] = entry
        self._changed.notify()

    def _demand(self, entries: Iterable[Entry], layer: int | None, owner: Hashable, deadline: float) -> None:
        now = time.monotonic()
        for entry in entries:
            due = deadline if layer is None else min(now, entry.demands.get(owner, Demand(now, now)).due)
            entry.demands[owner] = Demand(due, deadline)
            self._demanded.setdefault(owner, set()).add(entry)
            if layer in entry.layers and layer not in entry.ready:
                entry.first = entry.layers.index(layer)
            if not entry.is_whole() and entry.failure is None:
                self._want(entry)

    def _too_many_kept(self, entry: Entry) -> AdapterLoadError | None:
        kept, capacity = self._kept - {entry}, self.tier.pool.capacity
        size = _size_of(kept)
        if size + (entry.size or 0) <= capacity:
            return None
        return AdapterLoadError(
            f"shard {self._shard}: it takes {entry.size} bytes there, the {len(kept)} adapters that are pinned already "
            f"take {size}, and the pool has {capacity}; unpin others, or start the server with a larger --device-pool"
        )

    def _check_fit(self, entries: Iterable[Entry], kept: Collection[Entry] = ()) -> None:
        size, beside, capacity = _size_of(entries), _size_of(set(kept).difference(entries)), self.tier.pool.capacity
        if size + beside > capacity:
            pinned = f", of which {beside} are pinned" if beside else ""
            raise AdapterLoadError(
                f"shard {self._shard}: the adapters of one step take {size} bytes together, and its pool "
                f"has {capacity}{pinned}; put fewer adapters into a batch, or start the server with a larger "
                "--device-pool or more shards"
            )

    def _next(self) -> Entry | None:
        """The entry to work on, with memory for it where its files were looked at; None at the end."""
        with self._changed:
            self._busy = None
            while not self._closing.is_set():
                now = time.monotonic()
                for entry in self._in_order(now):
                    if self._loader.lacks_files(entry):
                        self._fetching.start(entry)
                        continue
                    if entry.size is None or self._make_room(entry, now):
                        self._busy = entry
                        return entry
                    if (
                        entry.eager
                        and not entry.active
                        and self._size_of_active() + entry.size > self.tier.pool.capacity
                    ):
                        self._postpone(entry)
                self._starved = bool(self._wanted)
                spare = None if self._starved else self._preload.choose(now)
                if spare is not None and self._loader.lacks_files(spare):
                    self._fetching.start(spare)
                elif spare is not None and self._make_room(spare, now):
                    self._busy = spare
                    return spare
                idle = PAUSE_SECONDS if self._preload.enabled else None
                self._changed.wait(LOOK_SECONDS if self._starved else idle)
            return None

    def _postpone(self, entry: Entry) -> None:
        """Active ones leave no room; whoever waits is told that it is known."""
        entry.eager = False
        self._postponed[entry.handle] = entry
        waiting, entry.waiting = entry.waiting, []
        for done in waiting:
            done(None)

    def _size_of_active(self) -> int:
        return sum(self._entries[handle].size or 0 for handle in self._active if handle in self._entries)

    def _in_order(self, now: float) -> list[Entry]:
        for entry in list(self._wanted.values()):
            entry.forget_demands(now)
            if entry.is_whole() or entry.failure is not None or not entry.is_wanted():
                del self._wanted[entry.handle]
                self._let_go(entry)
        wanted = sorted(self._wanted.values(), key=lambda one: (one.deadline(), len(one.ready), one.order))
        while self._unasked:
            entry = self._unasked[0]
            if not (entry.dropped or entry.failure is not None or entry.is_whole()) and self._has_room(entry):
                return [*wanted, entry] if entry.size is None or not wanted else wanted
            self._let_go(self._unasked.popleft())
        return wanted

    def _let_go(self, entry: Entry) -> None:
        """Nothing is brought in from its files now."""
        if entry.device is None:
            self._loader.close(entry)

    def _has_room(self, entry: Entry) -> bool:
        return entry.size is None or entry.device is not None or self.tier.pool.can_allocate(entry.nbytes)

    def _make_room(self, entry: Entry, now: float) -> bool:
        """Whether it has device memory now; in the host pool it gets some if it can."""
        if entry.device is None:
            if not self._evict_for(entry, self.tier.pool, now):
                return False
            entry.device, entry.began = self.tier.pool.allocate(entry.nbytes), now
        if entry.host is None and self.host_pool is not None and self._evict_for(entry, self.host_pool, now):
            entry.host = self.host_pool.allocate(entry.nbytes)
        return True

    def _evict_for(self, entry: Entry, pool: Pool, now: float) -> bool:
        missing = pool.size_of(entry.nbytes) - pool.free
        if missing <= 0 or entry.is_spare():
            return missing <= 0
        self._note_uses()
        others = [one for one in self._entries.values() if one is not entry]
        if pool is self.tier.pool:
            active_fit = self._size_of_active() <= pool.capacity
            there = [one for one in others if one.device is not None and one.handle not in self._pins]
            resident = [one for one in there if may_go(one, entry, now, active_fit)]
        else:
            resident = [one for one in others if one.host is not None]
        chosen = victims(missing, resident, lambda one: pool.size_of(one.nbytes), self._policy)
        for one in chosen or ():
            self._evict(one, pool)
        return chosen is not None

    def _evict(self, entry: Entry, pool: Pool) -> None:
        if pool is self.tier.pool:
            self.tier.release(self.tier.withdraw(entry.handle))
            self._free_device(entry)
            self._evictions += 1
            if entry.is_wanted():  # by somebody who needs it later
                self._want(entry)
        else:
            self._free_host(entry)
        self._moved.add(entry.handle)

    def _free_device(self, entry: Entry) -> None:
        if entry.device is not None:
            self.tier.pool.deallocate(entry.device)
        entry.device, entry.first, entry.in_part, entry.preloaded = None, 0, None, False
        entry.ready.clear()
        if not entry.dropped:
            self._whole.discard(entry.handle)
        self._tidy(entry)

    def _free_host(self, entry: Entry) -> None:
        if entry.host is not None and self.host_pool is not None:
            self.host_pool.deallocate(entry.host)
        entry.host = None
        entry.packed.clear()
        self._tidy(entry)

    def _tidy(self, entry: Entry) -> None:
        """Of one that is nowhere only its source is kept."""
        if entry.device is None:
            self._loader.close(entry)
            if entry.host is None:
                entry.manifest = None

    def _free_if_dropped(self, entry: Entry) -> None:
        if entry.dropped and entry.handle not in self._pins and entry is not self._busy:
            self._dropped.discard(entry)
            self.tier.release(entry.withdrawn)
            entry.withdrawn = None
            self._free_device(entry)
            self._free_host(entry)
            self._changed.notify()

    def _fetched(self, entry: Entry, lease: Lease | None, error: LoraServerError | None) -> None:
        """In a thread of its own: its files are here, or why not."""
        if error is not None:
            self._fail(entry, error)
        with self._changed:
            self._fetching.finish(entry)
            over = (
                entry.dropped
                or self._closing.is_set()
                or not (entry.is_wanted() or entry.preloaded or entry in self._unasked)
            )
            if lease is not None and over:
                lease.close()
            elif lease is not None:
                self._loader.hold(entry, lease)
                self._on_disk |= {entry.source.version}
                entry.far = False
                self._moved.add(entry.handle)
                if entry.looking:
                    self._unasked.appendleft(entry)
            self._changed.notify()
            answered = entry.answered() if error is not None else []
        if error is not None:
            self._on_layer(entry.handle, len(entry.ready))
        for done in answered:
            done(error)

    # -- the thread

    def _run(self) -> None:
        while (entry := self._next()) is not None:
            try:
                moved = self._advance(entry)
            except Exception as error:
                self._fail(entry, error)
                moved = True
            with self._changed:
                self._busy = None
                self._free_if_dropped(entry)
                answered = entry.answered()
            if moved:
                self._on_layer(entry.handle, len(entry.ready))
            for done in answered:
                done(entry.failure)

    def _advance(self, entry: Entry) -> bool:
        """Look at its files, or bring a layer; whether it did that."""
        if entry.manifest is None:
            self._loader.measure(entry)
            self._check_fit([entry])
            with self._changed:
                self._moved.add(entry.handle)
                if not (entry.dropped or self._make_room(entry, time.monotonic())):
                    self._tidy(entry)
            return False
        layer = entry.next_layer()
        nbytes = self._loader.bring(entry, layer)
        with self._changed:
            if entry.dropped:
                return True
            assert entry.device is not None
            self.tier.publish(entry.handle, layer, entry.device, entry.manifest)
            entry.ready.add(layer)
            self._loaded_bytes += nbytes
            self._moved.add(entry.handle)
            entry.arrived(time.monotonic())
            if entry.is_whole():
                self._loads += 1
                self._preload.note_whole(entry)
                self._whole.add(entry.handle)
                self._loader.close(entry)
        return True

    def _fail(self, entry: Entry, error: Exception) -> None:
        if not isinstance(error, LoraServerError):
            error = AdapterLoadError(f"{entry.source}: {error!r}")
        with self._changed:
            entry.failure, entry.failed_at, entry.in_part = error, time.monotonic(), None
            entry.eager = False
            self._loader.close(entry)
            self._moved.add(entry.handle)
            if not entry.ready and not entry.dropped:
                self._free_device(entry)
                self._free_host(entry)


def _size_of(entries: Iterable[Entry]) -> int:
    return sum(entry.size or 0 for entry in entries)
