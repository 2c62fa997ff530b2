"""The adapter weights of one shard, as its steps use them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from lora_server.errors import LoraServerError, ProtocolError, UnknownAdapterError
from lora_server.memory.adapters import ShardAdapters
from lora_server.memory.entry import LayerState, Reason, Want
from lora_server.memory.eviction import Policy, lru
from lora_server.memory.evictor import Claims, Evictor, UsageLog
from lora_server.memory.fetching import RemoteFiles
from lora_server.memory.layers import LayerLoader
from lora_server.memory.load_queue import LoadQueue
from lora_server.memory.loader import Loader, LoadStats
from lora_server.memory.lock import StoreLock
from lora_server.memory.manifest import KEPT_BYTES, Manifests
from lora_server.memory.pins import Pins
from lora_server.memory.planner import LoadPlanner
from lora_server.memory.pools import Pool
from lora_server.memory.preload import Preloader
from lora_server.memory.report import MemoryReport
from lora_server.memory.table import AdapterTable
from lora_server.memory.tier import Tier
from lora_server.placement import Placement
from lora_server.sources.fetch import Fetcher
from lora_server.spec import Site
from lora_server.timings import DEFAULTS, Timings


class WeightStore:
    """Thread-safe. `adapters` takes commands, `report` says what is where; the other methods are for steps.

    One lock guards the adapter table, the load queue, the memory's owners and the pins.
    """

    def __init__(
        self,
        placement: Placement,
        shard: int,
        tier: Tier,
        host_pool: Pool | None = None,
        *,
        policy: Policy = lru,
        link_gbps: float = 0.0,
        on_layer: Callable[[int, int | None], None] = lambda handle, left: None,
        fetcher: Fetcher | None = None,
        preload: bool = False,
        timings: Timings = DEFAULTS,
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        """`on_layer(handle, layers left)`: called by the loader's thread after each layer; None after a failure.

        `fetcher`: fetches remote files; `preload`: fill idle memory; `kept_bytes`: of manifests that are cached.
        """
        self.tier, self._shard = tier, shard
        self._lock, closing, self._pins = StoreLock(), threading.Event(), Pins()
        self._table = table = AdapterTable(placement.layers(shard))
        self._queue = LoadQueue(table.note)
        remote = RemoteFiles(
            fetcher,
            lambda entry, lease, error: self._loader.fetched(entry, lease, error),
            lambda entry: closing.is_set() or not table.knows(entry),
        )
        layers = LayerLoader(
            placement,
            shard,
            tier,
            closing.wait,
            self._pins.none.wait,
            Manifests(kept_bytes),
            link_gbps,
            timings.block_patience,
        )
        preloader = Preloader(table.entries, tier.pool, remote.lacks, preload, timings.preload_look)
        self._claims = Claims(table, tier.pool, shard)
        usage = UsageLog(table, self._pins, tier, preloader)
        evictor = Evictor(tier, host_pool, self._claims, self._pins, usage, policy)
        planner = LoadPlanner(self._lock, table, self._queue, evictor, preloader, remote, layers)
        self._loader = Loader(self._lock, planner, self._pins, on_layer, LoadStats(shard), timings, closing)
        self.adapters = ShardAdapters(self._lock, planner, self._loader, shard)
        self.report = MemoryReport(self._lock, planner, self._loader.stats)
        self._loader.start()

    def pin(self, handles: Collection[int], layer: int, owner: Hashable, deadline: float) -> int | None:
        """Pin the adapters of a step until `unpin`; None where one is not READY, which then is in demand.

        deadline: time.monotonic(). Unknown and FAILED ones delay no step: `gather` refuses them. Raises
        AdapterLoadError where the adapters do not fit the pool together.
        """
        with self._lock:
            if not self._table.complete.issuperset(handles) and not self._have(handles, layer, owner, deadline):
                return None
            self._queue.withdraw(owner, handles)
            return self._pins.add(handles, time.monotonic())

    def unpin(self, pin: int) -> None:
        """End a pin: the step was answered."""
        with self._lock:
            self._pins.remove(pin)
            if self._table.dropped:
                self._loader.reclaim()
            if self._queue.lacks_memory:
                self._lock.notify()

    def prefetch(self, handles: Iterable[int], owner: Hashable, deadline: float) -> None:
        """Load these before a step needs them by the deadline, at the first layer. Unknown handles are ignored."""
        with self._lock:
            self._queue.demand(self._table.among(handles), None, owner, deadline)
            self._lock.notify()

    def forget(self, owner: Hashable, but: Collection[int] = ()) -> None:
        """Withdraw the owner's steps and prefetches, except for these handles."""
        with self._lock:
            self._queue.withdraw(owner, but=but)
            self._lock.notify()

    def known(self, handles: Iterable[int]) -> frozenset[int]:
        """Return those handles that are adapters."""
        return frozenset(handle for handle in handles if handle in self._table.entries)

    def any_dropped(self, handles: Iterable[int]) -> bool:
        """Return whether one of these was an adapter, and is none any more."""
        return any(map(self._table.was_removed, handles))

    def missing(self, handles: Iterable[int], layer: int) -> list[int]:
        """Return the handles that a step of the layer has to wait for."""
        return [entry.handle for entry in self._table.among(handles) if entry.lacks(layer)]

    def gather(self, site: Site, segments_S4: npt.NDArray[np.int32], where: str) -> Any:
        """Return the weights of a step that is pinned; see Tier.gather. `where` names the step in errors.

        Raises why a load FAILED, UnknownAdapterError for weights that are not READY, ProtocolError for those of
        another shard.
        """

        def refusal(handle: int, expert: int) -> LoraServerError:
            state = self.report.state(handle, site.layer)
            if state is LayerState.FAILED:
                return self.report.error(handle)
            if state is LayerState.READY:
                return ProtocolError(
                    f"{site} expert {expert}: not on shard {self._shard}; placements differ, join again"
                )
            return UnknownAdapterError(
                f"shard {self._shard} {where}: handle {handle} is {state.value} here; was it removed?"
            )

        return self.tier.gather(site, segments_S4, refusal)

    def close(self) -> None:
        """Drop all adapters, and stop."""
        self._loader.stop()
        for handle in list(self._table.entries):
            self.adapters.drop(handle)
        self._loader.join()

    def _have(self, handles: Iterable[int], layer: int, owner: Hashable, deadline: float) -> bool:
        """Return whether a step can be served; otherwise demand what it lacks."""
        entries, now = self._table.among(handles), time.monotonic()
        for entry in entries:
            entry.retry(now)
        self._lock.notify()
        if any(entry.lacks(layer) for entry in entries):
            self._claims.check_step(entries, self._claims.pinned)
            self._queue.demand(entries, layer, owner, deadline)
            return False
        for entry in entries:
            if not entry.is_settled():
                self._queue.add(entry, Want(Reason.PARTIAL, Reason.PARTIAL, now))
        return True
