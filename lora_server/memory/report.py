"""Report what a shard's memory holds."""

from __future__ import annotations

from typing import NamedTuple

from lora_server.errors import AdapterLoadError, LoraServerError
from lora_server.histogram import Histogram
from lora_server.memory.entry import NEVER, AdapterEntry, LayerState
from lora_server.memory.loader import LoadStats
from lora_server.memory.lock import StoreLock
from lora_server.memory.planner import LoadPlanner


class MemoryUse(NamedTuple):
    """Bytes of the device pool and of the host pool, and counters since the start."""

    weight_bytes: int
    free_bytes: int
    total_bytes: int
    host_bytes: int
    host_total_bytes: int
    loads: int  # of complete adapters
    loaded_bytes: int
    evictions: int
    preloads: int
    preload_hits: int


class AdapterResidency(NamedTuple):
    """Layers and bytes of an adapter in each tier."""

    handle: int
    ready: int  # layers
    packed: int  # layers in the host pool
    nbytes: int  # of the device pool
    measured: bool  # `nbytes` is what its files say
    remote: bool  # its files are not on this node's disk
    loading: bool  # it is queued to be loaded
    seconds: float  # until all its layers are READY, as expected; NEVER if that is unknown
    error: LoraServerError | None  # why the last load failed


class MemoryReport:
    """Thread-safe."""

    def __init__(self, lock: StoreLock, planner: LoadPlanner, stats: LoadStats) -> None:
        self._lock, self._planner, self._stats = lock, planner, stats
        self._table = planner.table

    @property
    def load_times(self) -> dict[str, Histogram]:
        """Durations of complete loads, by the tier that the adapter was loaded from."""
        return self._stats.times

    def state(self, handle: int, layer: int) -> LayerState:
        """Return the state of a layer."""
        entry = self._table.entries.get(handle)
        return LayerState.UNKNOWN if entry is None else entry.state(layer, self._planner.remote.lacks(entry.source))

    def error(self, handle: int) -> LoraServerError:
        """Return why a handle is FAILED."""
        entry = self._table.entries.get(handle)
        if entry is None or entry.failure is None:
            return AdapterLoadError(f"handle {handle}: not failed")
        return entry.failure.error

    def layers_ready(self, handle: int) -> int:
        """Return the number of READY layers; 0 for an unknown handle."""
        entry = self._table.entries.get(handle)
        return len(entry.copies.ready) if entry is not None else 0

    def take_changes(self) -> list[AdapterResidency]:
        """Return the residency of the adapters that moved between tiers since the last call."""
        with self._lock:
            changed = self._table.take_changed()
            expected = self._planner.forecast.expect(self._planner.queue.in_order()) if changed else {}
            return [self._residency(entry, expected.get(entry, NEVER)) for entry in changed]

    def _residency(self, entry: AdapterEntry, expected: float) -> AdapterResidency:
        size, copies, failure = entry.footprint.size, entry.copies, entry.failure
        measured = size is not None or entry.is_complete()
        remote, loading = self._planner.remote.lacks(entry.source), self._planner.queue.is_loading(entry)
        seconds, error = 0.0 if entry.is_complete() else expected, failure.error if failure is not None else None
        return AdapterResidency(
            entry.handle, len(copies.ready), len(copies.packed), size or 0, measured, remote, loading, seconds, error
        )

    def take_unneeded(self) -> list[str]:
        """Return versions that node 0 sent and that no adapter here has any more, each once."""
        with self._lock:
            unneeded = self._planner.remote.take_unneeded()
            return sorted(unneeded - {entry.source.version for entry in self._table.entries.values()})

    def use(self) -> MemoryUse:
        """Return the use of the pools."""
        evictor, preloader = self._planner.evictor, self._planner.preloader
        with self._lock:
            evictor.usage.collect()
        device, host = self._planner.layers.tier.pool, evictor.host_pool
        return MemoryUse(
            device.used,
            device.free,
            device.capacity,
            host.used if host else 0,
            host.capacity if host else 0,
            self._stats.loads,
            self._stats.loaded_bytes,
            evictor.evictions,
            preloader.preloads,
            preloader.hits,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError unless every byte of the pools is free or one adapter's. For an idle store."""
        with self._lock:
            self._planner.evictor.check_integrity(self._table.entries.values())
