"""Decide what to load next, and account for what that evicts."""

from __future__ import annotations

from lora_server.memory.entry import AdapterEntry
from lora_server.memory.evictor import Evictor
from lora_server.memory.fetching import RemoteFiles
from lora_server.memory.forecast import LoadForecast
from lora_server.memory.layers import LayerLoader
from lora_server.memory.load_queue import LoadQueue
from lora_server.memory.lock import StoreLock
from lora_server.memory.preload import Preloader
from lora_server.memory.table import AdapterTable


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
