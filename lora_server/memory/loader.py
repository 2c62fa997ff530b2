"""The loader: a thread that loads one layer after the other, of the most urgent adapter.

READY is per layer, so that a step at layer 0 runs when layer 0 is there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from lora_server import telemetry
from lora_server.errors import AdapterLoadError, LoraServerError
from lora_server.histogram import Histogram
from lora_server.memory.entry import AdapterEntry, Answer, LoadFailure, Reason
from lora_server.memory.lock import StoreLock
from lora_server.memory.pins import Pins
from lora_server.memory.planner import LoadPlanner
from lora_server.sources.cache import Lease
from lora_server.telemetry import NOTHING
from lora_server.timings import Timings

RETRY_SECONDS = 0.02  # between two attempts to reserve memory for what is in demand


@dataclass
class LoadStats:
    """Counters of loads since the start. The store's lock guards them."""

    shard: int
    loads: int = 0  # of complete adapters
    loaded_bytes: int = 0
    times: dict[str, Histogram] = field(default_factory=lambda: {"host": Histogram(), "disk": Histogram()})  # by tier

    def count(self, entry: AdapterEntry) -> None:
        """Count, and trace, a complete load."""
        self.loads += 1
        active = entry.wants.get(Reason.ACTIVE)
        telemetry.record(
            "lora.load",
            entry.progress.began,
            active.trace if active is not None else NOTHING,
            handle=entry.handle,
            version=entry.source.version,
            tier=entry.progress.tier,
            shard=self.shard,
            bytes=entry.footprint.nbytes,
        )
        self.times[entry.progress.tier].add(int(entry.usage.load_seconds * 1e9))


class Loader:
    """A thread of its own, which shares the store's lock, and notifies and waits on it.

    `on_layer(handle, layers left)` is called without the lock after each layer, and with None after a failure.
    """

    def __init__(
        self,
        lock: StoreLock,
        planner: LoadPlanner,
        pins: Pins,
        on_layer: Callable[[int, int | None], None],
        stats: LoadStats,
        timings: Timings,
        closing: threading.Event,
    ) -> None:
        self.stats, self.closing = stats, closing
        self._lock, self._planner, self._pins, self._on_layer = lock, planner, pins, on_layer
        self._timings, self._layers = timings, planner.layers
        self._busy: AdapterEntry | None = None  # the thread works on it, without the lock
        self._thread = threading.Thread(target=self._run, name="weight-loader", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Begin no other load."""
        with self._lock:
            self.closing.set()
            self._lock.notify()

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def is_idle(self) -> bool:
        """Return whether the thread works on nothing."""
        return self._busy is None

    def reclaim(self) -> None:
        """Free dropped entries that neither a step nor the thread uses. The caller has the lock."""
        table = self._planner.table
        for entry in list(table.dropped):
            if entry.handle not in self._pins and entry is not self._busy:
                self._layers.tier.release(table.dropped.pop(entry))
                self._planner.free(entry)
                self._planner.remote.drop(entry.source)
                self._lock.notify()

    def fetched(self, entry: AdapterEntry, lease: Lease | None, error: LoraServerError | None) -> None:
        """Take the outcome of a fetch; called from its thread."""
        table, remote = self._planner.table, self._planner.remote
        with self._lock:
            if entry is self._busy or not self._layers.lacks_files(entry):
                error = None  # its files came another way meanwhile
            needed = bool(entry.wants) and not self.closing.is_set()
            remote.finish(entry, lease is not None and needed)
            if error is not None:
                self._fail(entry, error)
            elif lease is not None and needed:
                self._layers.hold(entry, lease)
                for one in table.entries.values():
                    if one.source.version == entry.source.version:
                        table.note(one)
            elif lease is not None:
                lease.close()
                if not table.knows(entry):
                    remote.drop(entry.source)
            if error is not None:
                self._lock.owe(self._telling(entry), *self._planner.queue.settle(entry))
            self._lock.notify()

    def _run(self) -> None:
        while (entry := self._next()) is not None:
            failure, loaded = None, True
            try:
                loaded = self._advance(entry)
            except Exception as error:
                failure = error
            with self._lock:
                self._busy = None
                if failure is not None:
                    self._fail(entry, failure)
                self.reclaim()
                if loaded:
                    self._lock.owe(self._telling(entry))
                self._lock.owe(*self._planner.queue.settle(entry))
            if loaded:
                self._planner.evictor.leaving.clear()  # now, because it takes as long as a step or two

    def _telling(self, entry: AdapterEntry) -> Answer:
        """Return what is to be called, without the lock, to tell of an entry's layers."""
        left = len(entry.layers) - len(entry.copies.ready) if entry.failure is None else None
        return lambda _: self._on_layer(entry.handle, left), None

    def _next(self) -> AdapterEntry | None:
        """Wait for an entry to work on; None at the end."""
        while not self.closing.is_set():
            with self._lock:
                self._busy = self._planner.next(time.monotonic())
                if self._busy is not None:
                    return self._busy
                idle = self._timings.preload_look if self._planner.preloader.enabled else None
                if not self.closing.is_set():
                    self._lock.wait(RETRY_SECONDS if self._planner.queue.has_demand else idle)
        return None

    def _advance(self, entry: AdapterEntry) -> bool:
        """Measure the entry, or load its next layer; whether it loaded one."""
        if entry.footprint.manifest is None:
            self._measure(entry)
            return False
        progress = entry.progress
        if not entry.copies.ready:
            progress.tier = "host" if entry.is_packed() else "disk"
        layer, began, tier = entry.next_layer(), time.monotonic(), "host" if entry.is_packed() else "disk"
        device, manifest = entry.copies.device, entry.footprint.manifest
        assert device is not None and manifest is not None
        nbytes = self._layers.load(entry, layer)
        prepared = self._layers.tier.prepare(layer, device, manifest)
        with self._lock:
            self._planner.forecast.note(tier, nbytes, time.monotonic() - began)
            if self._planner.table.knows(entry):
                self._layers.tier.publish(entry.handle, layer, device, prepared)
                self._note_ready(entry, layer, nbytes)
        return True

    def _measure(self, entry: AdapterEntry) -> None:
        self._layers.measure(entry)
        footprint, device = entry.footprint, entry.copies.device
        if device is not None and device.nbytes < footprint.nbytes:
            raise AdapterLoadError(f"{entry.source}: takes {footprint.size} bytes, was said to take less; try again")
        self._planner.evictor.claims.check_step([entry])
        with self._lock:
            self._planner.table.note(entry)
            if device is None and not (entry.is_wanted() and self._planner.reserve(entry, time.monotonic())):
                self._planner.tidy(entry)

    def _note_ready(self, entry: AdapterEntry, layer: int, nbytes: int) -> None:
        table = self._planner.table
        entry.copies.ready.add(layer)
        self.stats.loaded_bytes += nbytes
        table.note(entry)
        entry.note_layer(time.monotonic())
        if entry.is_complete():
            self.stats.count(entry)
            self._planner.preloader.note_complete(entry)
            table.complete.add(entry.handle)
            self._layers.close(entry)

    def _fail(self, entry: AdapterEntry, error: Exception) -> None:
        if not isinstance(error, LoraServerError):
            error = AdapterLoadError(f"{entry.source}: {error!r}")
        entry.failure = LoadFailure(error, time.monotonic() + self._timings.load_retry)
        self._layers.close(entry)
        self._planner.table.note(entry)
        if not entry.copies.ready and self._planner.table.knows(entry):
            self._planner.free(entry)
