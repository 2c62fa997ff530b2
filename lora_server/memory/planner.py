"""Decide what to load next, and account for what that evicts."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from lora_server.memory.entry import NEVER, AdapterEntry
from lora_server.memory.evictor import Evictor
from lora_server.memory.fetching import RemoteFiles
from lora_server.memory.layers import LayerLoader
from lora_server.memory.load_queue import LoadQueue
from lora_server.memory.lock import StoreLock
from lora_server.memory.preload import Preloader
from lora_server.memory.table import AdapterTable

NEWEST = 0.25  # share of the newest layer in a rate


class LoadForecast:
    """Bytes per second of the loads from each tier. The store's lock guards it.

    `lacks_files`: the entry's files have to be fetched first, and how long that takes is unknown.
    """

    def __init__(self, lacks_files: Callable[[AdapterEntry], bool]) -> None:
        self._lacks_files = lacks_files
        self._rates: dict[str, float] = {}  # by tier

    def note(self, tier: str, nbytes: int, seconds: float) -> None:
        """Account for a layer that was loaded. One for which the adapter has nothing on this shard says nothing."""
        if nbytes:
            rate = nbytes / max(seconds, 1e-9)
            self._rates[tier] = NEWEST * rate + (1 - NEWEST) * self._rates.get(tier, rate)

    def expect(self, ordered: Iterable[AdapterEntry]) -> dict[AdapterEntry, float]:
        """Return in how many seconds each entry is fully loaded if they load in this order; NEVER if that is unknown.

        An entry of unknown duration delays none behind it.
        """
        total, expected = 0.0, {}
        for entry in ordered:
            alone = self._alone(entry)
            expected[entry] = total + alone
            total += alone if alone < NEVER else 0.0
        return expected

    def _alone(self, entry: AdapterEntry) -> float:
        tier = "host" if entry.is_packed() else "disk"
        if entry.footprint.size is None or tier not in self._rates or self._lacks_files(entry):
            return NEVER
        left = 1 - len(entry.copies.ready) / len(entry.layers)
        return entry.footprint.nbytes * left / self._rates[tier]


class LoadPlanner:
    """Joins the load queue, the evictor and what fills idle memory. The store's lock guards it, and all of them."""

    def __init__(
        self,
        lock: StoreLock,
        table: AdapterTable,
        queue: LoadQueue,
        evictor: Evictor,
        preloader: Preloader,
        remote: RemoteFiles,
        layers: LayerLoader,
    ) -> None:
        self._lock, self.table, self.queue, self.evictor = lock, table, queue, evictor
        self.preloader, self.remote, self.layers = preloader, remote, layers
        self.forecast = LoadForecast(layers.lacks_files)

    def next(self, now: float) -> AdapterEntry | None:
        """Return the most urgent entry that can be worked on: it has memory, or has to be measured. Starts fetches."""
        for entry in self.queue.expire(now):
            self._release_files(entry)
        self.queue.lacks_memory = False
        for entry in self.queue.in_order():
            if self.layers.lacks_files(entry):
                self.remote.fetch(entry)
            elif entry.footprint.size is None or self.reserve(entry, now):
                return entry
            else:
                self.queue.lacks_memory = self.queue.has_demand
                if self.evictor.claims.exclude(entry):
                    self._lock.owe(*self.queue.defer(entry))
        return None if self.queue.has_demand else self._next_preload(now)

    def _next_preload(self, now: float) -> AdapterEntry | None:
        before = self.preloader.chosen
        chosen = self.preloader.choose(now)
        if before is not None and before is not chosen:
            self._release_files(before)
        if chosen is None:
            return None
        if self.layers.lacks_files(chosen):
            self.remote.fetch(chosen)
            return None
        return chosen if self.reserve(chosen, now) else None

    def reserve(self, entry: AdapterEntry, now: float) -> bool:
        """Reserve memory to load an entry, and evict others for it; return whether it has memory now."""
        evicted = self.evictor.reserve(entry, now)
        for one in evicted or ():
            self.table.note(one)
            self.tidy(one)
            self._lock.owe(*self.queue.requeue(one))
        return evicted is not None

    def free(self, entry: AdapterEntry) -> None:
        """Free the memory of an entry that was dropped or failed to load."""
        self.evictor.free(entry)
        self.tidy(entry)

    def tidy(self, entry: AdapterEntry) -> None:
        """Close the files of an entry without device memory; without any memory, its manifest goes, too."""
        if entry.copies.device is None:
            self.layers.close(entry)
            if self.table.knows(entry):
                self.table.complete.discard(entry.handle)
            if entry.copies.host is None:
                entry.footprint.manifest = None

    def _release_files(self, entry: AdapterEntry) -> None:
        self.table.note(entry)
        if entry.copies.device is None:
            self.layers.close(entry)
