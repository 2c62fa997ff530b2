"""Fill idle device memory with the most valuable adapters before a request needs them (`--preload`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lora_server.memory.entry import AdapterEntry, Reason, Source, Want
from lora_server.memory.eviction import value_density
from lora_server.memory.pools import Pool
from lora_server.timings import Timings


@dataclass
class Preloader:
    """Chooses one entry at a time. The store's lock guards it."""

    entries: Mapping[int, AdapterEntry]  # all that are known, by handle
    pool: Pool
    is_remote: Callable[[Source], bool]
    enabled: bool = False
    scan_seconds: float = Timings.preload_look  # between two scans of all entries
    preloads: int = 0  # complete loads
    hits: int = 0  # preloads that were used before they were evicted
    chosen: AdapterEntry | None = None
    _next_scan: float = 0.0

    def choose(self, now: float) -> AdapterEntry | None:
        """Return the entry to load a layer of when there is no demand: the most valuable one that fits without
        eviction."""
        if not self.enabled:
            return None
        if self.chosen is not None and not self._may_come(self.chosen):
            self.chosen = None
        if self.chosen is None:
            if now < self._next_scan:
                return None
            self._next_scan = now + self.scan_seconds
            self.chosen = max(filter(self._may_come, self.entries.values()), key=value_density, default=None)
        if self.chosen is not None:
            self.chosen.wants[Reason.PRELOAD] = Want(Reason.PRELOAD, Reason.PRELOAD)
        return self.chosen

    def note_complete(self, entry: AdapterEntry) -> None:
        """Count an entry that was preloaded."""
        self.preloads += Reason.PRELOAD in entry.wants
        self._next_scan = 0.0

    def note_use(self, entry: AdapterEntry) -> None:
        """Count a use: from the first on, the entry is kept like any other."""
        if entry.wants.pop(Reason.PRELOAD, None) is not None:
            self.hits += entry.is_complete()

    def _may_come(self, entry: AdapterEntry) -> bool:
        """Return whether an entry can be preloaded: it fits without eviction, and its files are on this node."""
        if self.entries.get(entry.handle) is not entry or entry.footprint.size is None or entry.is_settled():
            return False
        fits = entry.copies.device is not None or self.pool.can_allocate(entry.footprint.nbytes)
        return fits and not self.is_remote(entry.source)
