"""The thread of a store: it brings one layer after the other, of who is needed first.

READY is per layer, so a step at layer 0 can run when layer 0 is there; which steps wait is the caller's business.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from lora_server import telemetry
from lora_server.errors import AdapterLoadError, LoraServerError
from lora_server.histogram import Histogram
from lora_server.memory.entry import Entry
from lora_server.memory.eviction import Policy, lru
from lora_server.memory.fetching import Fetching
from lora_server.memory.loading import Loader
from lora_server.memory.manifest import KEPT_BYTES, Manifests
from lora_server.memory.pins import Pins
from lora_server.memory.pools import Pool
from lora_server.memory.preload import Preload
from lora_server.memory.room import Room
from lora_server.memory.tier import Tier
from lora_server.memory.turns import Turns
from lora_server.placement import Placement
from lora_server.sources.cache import Lease
from lora_server.sources.fetch import NODE0, Fetcher
from lora_server.timings import DEFAULTS, Timings

LOOK_SECONDS = 0.02  # how often one that has no room looks whether somebody's turn is over


class Filling:
    """What a store knows, under one lock, and its thread."""

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
        timings: Timings = DEFAULTS,
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        """`fetcher` brings files from far; `preload`: idle memory is filled; `kept_bytes`: of manifests."""
        self._timings = timings
        self.tier, self._shard, self._on_layer = tier, shard, on_layer
        self._layers = placement.layers(shard)
        self._changed = threading.Condition()
        self._entries: dict[int, Entry] = {}
        self._pins, self._turns = Pins(), Turns(lambda entry: self._moved.add(entry.handle))
        self._preload = Preload(self._entries, tier.pool, self._let_go, preload, timings.preload_look)
        self._room = Room(
            self._entries, self._pins, tier, host_pool, shard, policy, self._evicted, self._preload.note_use
        )
        self._whole: set[int] = set()  # handles
        self._dropped: set[Entry] = set()  # and not free yet
        self._busy: Entry | None = None  # the thread works on it, without the lock
        self._starved = False  # the thread waits for memory
        self._moved: set[int] = set()
        self._loads = self._loaded_bytes = self._orders = 0
        self.load_times = {"host": Histogram(), "disk": Histogram()}  # of whole adapters, by where they came from
        self._closing = threading.Event()
        self._fetching = Fetching(fetcher, self._fetched, self._closing.is_set)
        self._on_disk: frozenset[str] = frozenset()  # versions that the disk cache has
        self._unneeded: set[str] = set()  # versions that came from node 0 for one that was dropped
        self._loader = Loader(
            placement,
            shard,
            tier,
            self._closing.wait,
            self._pins.none.wait,
            Manifests(kept_bytes),
            link_gbps,
            timings.block_patience,
        )
        self._thread = threading.Thread(target=self._run, name="weight-loader", daemon=True)
        self._thread.start()

    def unneeded(self) -> list[str]:
        """Versions that came from node 0 and that nothing here has any more; said once."""
        with self._changed:
            gone, self._unneeded = self._unneeded, set()
            return sorted(gone - {entry.source.version for entry in self._entries.values()})

    def _want(self, entry: Entry) -> None:
        self._turns.want(entry)
        self._changed.notify()

    def _next(self) -> Entry | None:
        """The entry to work on, with memory for it where its files were looked at; None at the end."""
        with self._changed:
            self._busy = None
            while not self._closing.is_set():
                now = time.monotonic()
                for entry in self._turns.in_order(now, self._let_go):
                    if self._loader.lacks_files(entry):
                        self._fetching.start(entry)
                        continue
                    if entry.size is None or self._room.make(entry, now):
                        self._busy = entry
                        return entry
                    if entry.eager and self._room.is_taken_by_active(entry):
                        self._postpone(entry)
                self._starved = self._turns.any_wanted()
                spare = None if self._starved else self._preload.choose(now)
                if spare is not None and self._loader.lacks_files(spare):
                    self._fetching.start(spare)
                elif spare is not None and self._room.make(spare, now):
                    self._busy = spare
                    return spare
                idle = self._timings.preload_look if self._preload.enabled else None
                self._changed.wait(LOOK_SECONDS if self._starved else idle)
            return None

    def _postpone(self, entry: Entry) -> None:
        """Whoever waits is told that it is known."""
        self._turns.postpone(entry)
        waiting, entry.waiting = entry.waiting, []
        for done in waiting:
            done(None)

    def _is_far(self, entry: Entry) -> bool:
        return bool(entry.source.remote) and entry.source.version not in self._on_disk

    def _fetched(self, entry: Entry, lease: Lease | None, error: LoraServerError | None) -> None:
        """In a thread of its own: its files are here, or why not."""
        if error is not None:
            self._fail(entry, error)
        with self._changed:
            self._fetching.finish(entry)
            over = (
                entry.dropped
                or self._closing.is_set()
                or not (entry.is_wanted() or entry.preloaded or self._turns.is_unasked(entry))
            )
            if lease is not None and over:
                lease.close()
                self._forget_files(entry)
            elif lease is not None:
                self._loader.hold(entry, lease)
                self._on_disk |= {entry.source.version}
                entry.far = False
                self._moved.add(entry.handle)
                if entry.looking:
                    self._turns.look(entry, first=True)
            self._changed.notify()
            answered = entry.answered() if error is not None else []
        if error is not None:
            self._on_layer(entry.handle, len(entry.ready))
        for done in answered:
            done(error)

    def _let_go(self, entry: Entry) -> None:
        """Nothing is brought in from its files now."""
        self._moved.add(entry.handle)
        if entry.device is None:
            self._loader.close(entry)

    def _evicted(self, entry: Entry) -> None:
        self._moved.add(entry.handle)
        self._tidy(entry)
        self._turns.give_up(entry)
        if entry.is_wanted():  # by somebody who needs it later
            self._turns.want(entry)

    def _free(self, entry: Entry) -> None:
        self._room.free_device(entry)
        self._room.free_host(entry)
        self._tidy(entry)

    def _tidy(self, entry: Entry) -> None:
        """Of one that is nowhere its source is kept, and what is known of its files."""
        if entry.device is None:
            self._loader.close(entry)
            if not entry.dropped:
                self._whole.discard(entry.handle)
            if entry.host is None:
                entry.manifest = None

    def _free_if_dropped(self, entry: Entry) -> None:
        if entry.dropped and entry.handle not in self._pins and entry is not self._busy:
            self._dropped.discard(entry)
            self.tier.release(entry.withdrawn)
            entry.withdrawn = None
            self._free(entry)
            self._forget_files(entry)
            self._changed.notify()

    def _forget_files(self, entry: Entry) -> None:
        if entry.dropped and entry.source.remote.startswith(NODE0):
            self._unneeded.add(entry.source.version)

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
                self._room.leaving.clear()  # now, because it takes as long as a step or two
            for done in answered:
                done(entry.failure)

    def _advance(self, entry: Entry) -> bool:
        """Look at its files, or bring a layer; whether it did that."""
        if entry.manifest is None:
            self._loader.measure(entry)
            if entry.device is not None and entry.device.nbytes < entry.nbytes:
                raise AdapterLoadError(f"{entry.source}: takes {entry.size} bytes, was said to take less; try again")
            self._room.check_fit([entry])
            with self._changed:
                self._moved.add(entry.handle)
                comes = entry.device is not None or (entry.is_wanted() and self._room.make(entry, time.monotonic()))
                if not (entry.dropped or comes):
                    self._tidy(entry)
            return False
        if not entry.ready:
            entry.came_from = "host" if entry.is_packed() else "disk"
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
                telemetry.record(
                    "lora.load",
                    entry.began,
                    entry.trace,
                    handle=entry.handle,
                    version=entry.source.version,
                    tier=entry.came_from,
                    shard=self._shard,
                    bytes=entry.nbytes,
                )
                self.load_times[entry.came_from].add(int(entry.usage.load_seconds * 1e9))
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
                self._free(entry)

    def _stop(self) -> None:
        """No other load begins, also not while the caller drops what there is; `join` comes last."""
        with self._changed:
            self._closing.set()
            self._changed.notify()
