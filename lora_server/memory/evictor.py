"""Memory of a shard's adapters: reserves it in the device pool and the host pool, and evicts others for it."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable

from lora_server.errors import AdapterLoadError
from lora_server.memory.entry import AdapterEntry, Progress
from lora_server.memory.eviction import Policy, may_go, victims
from lora_server.memory.pins import PinnedUses, Pins
from lora_server.memory.pools import Pool
from lora_server.memory.preload import Preloader
from lora_server.memory.table import AdapterTable
from lora_server.memory.tier import Tier


class Claims:
    """Active adapters are evicted for active ones alone, pinned ones never. The store's lock guards it."""

    def __init__(self, table: AdapterTable, pool: Pool, shard: int) -> None:
        self.active: set[int] = set()  # handles that clients hold, known here or not
        self.pinned: set[AdapterEntry] = set()  # by `adapters pin`
        self._table, self._pool, self._shard = table, pool, shard

    def check_step(self, entries: Iterable[AdapterEntry], pinned: Collection[AdapterEntry] = ()) -> None:
        """Raises AdapterLoadError where the adapters of one step do not fit the pool together with the pinned ones."""
        size, beside, capacity = _size_of(entries), _size_of(set(pinned).difference(entries)), self._pool.capacity
        if size + beside > capacity:
            of_which = f", of which {beside} are pinned" if beside else ""
            raise AdapterLoadError(
                f"shard {self._shard}: the adapters of one step take {size} bytes together, and its pool "
                f"has {capacity}{of_which}; put fewer adapters into a batch, or start the server with a larger "
                "--device-pool or more shards"
            )

    def check_pin(self, entry: AdapterEntry) -> None:
        """Raises AdapterLoadError where the adapter does not fit the pool together with the pinned ones."""
        pinned, capacity = self.pinned - {entry}, self._pool.capacity
        size = _size_of(pinned)
        if size + (entry.footprint.size or 0) > capacity:
            raise AdapterLoadError(
                f"shard {self._shard}: it takes {entry.footprint.size} bytes there, the {len(pinned)} adapters that "
                f"are pinned already take {size}, and the pool has {capacity}; unpin others, or start the server with "
                "a larger --device-pool"
            )

    def active_fit(self, newcomer: int = 0) -> bool:
        """Return whether the active adapters fit the pool together, and `newcomer` bytes beside them."""
        size = _size_of(self._table.among(self.active))
        return size + newcomer <= self._pool.capacity

    def exclude(self, entry: AdapterEntry) -> bool:
        """Return whether the active adapters leave no memory for one that is not active."""
        return not entry.active and not self.active_fit(entry.footprint.size or 0)


def _size_of(entries: Iterable[AdapterEntry]) -> int:
    return sum(entry.footprint.size or 0 for entry in entries)


class UsageLog:
    """Passes on which adapters steps have read: to their entries, and to the preloader. The store's lock guards it."""

    def __init__(self, table: AdapterTable, pins: Pins, tier: Tier, preloader: Preloader) -> None:
        self._table, self._pins, self._tier, self._preloader = table, pins, tier, preloader

    def collect(self) -> None:
        """Count the uses since the last call."""
        now = time.monotonic()
        unpinned = [PinnedUses(frozenset([handle]), now, 1) for handle in self._tier.take_uses()]
        for handles, last, uses in [*self._pins.take_uses(), *unpinned]:
            for entry in self._table.among(handles):
                entry.usage.count(last, uses)
                self._preloader.note_use(entry)


class Evictor:
    """Owns the extents of both pools. The store's lock guards it. `host_pool`: None where there is none."""

    def __init__(
        self, tier: Tier, host_pool: Pool | None, claims: Claims, pins: Pins, usage: UsageLog, policy: Policy
    ) -> None:
        self.claims, self.usage, self.host_pool = claims, usage, host_pool
        self.evictions = 0
        self.leaving: list[object] = []  # what evicted entries had: to release it takes as long as a step
        self._tier, self._pins, self._policy = tier, pins, policy
        self._on_device: dict[AdapterEntry, None] = {}  # in the order of allocation
        self._on_host: dict[AdapterEntry, None] = {}

    def reserve_free(self, entry: AdapterEntry, now: float) -> bool:
        """Reserve free device memory for an entry that has none; return whether it has some now. Evicts nothing."""
        if entry.copies.device is None:
            if not self._tier.pool.can_allocate(entry.footprint.nbytes):
                return False
            self._allocate(entry)
            entry.usage.count(now, 0)
        return True

    def reserve(self, entry: AdapterEntry, now: float) -> list[AdapterEntry] | None:
        """Reserve device memory for an entry, and host memory if there is any; None if device memory is exhausted.

        Returns the entries that were evicted from a pool.
        """
        evicted: list[AdapterEntry] = []
        copies, nbytes = entry.copies, entry.footprint.nbytes
        if copies.device is None:
            if not self._evict_for(entry, self._tier.pool, now, evicted):
                return None
            self._allocate(entry)
        entry.progress.began = entry.progress.began or now
        if copies.host is None and self.host_pool is not None and self._evict_for(entry, self.host_pool, now, evicted):
            copies.host = self.host_pool.allocate(nbytes)
            self._on_host[entry] = None
        return evicted

    def _allocate(self, entry: AdapterEntry) -> None:
        entry.copies.device = self._tier.pool.allocate(entry.footprint.nbytes)
        self._on_device[entry] = None

    def _evict_for(self, entry: AdapterEntry, pool: Pool, now: float, evicted: list[AdapterEntry]) -> bool:
        missing = pool.size_of(entry.footprint.nbytes) - pool.free
        if missing <= 0 or entry.is_spare():
            return missing <= 0
        self.usage.collect()
        if pool is self._tier.pool:
            active_fit = self.claims.active_fit()
            free_to_go = [one for one in self._on_device if one is not entry and one not in self.claims.pinned]
            resident = [
                one for one in free_to_go if one.handle not in self._pins and may_go(one, entry, now, active_fit)
            ]
        else:
            resident = [one for one in self._on_host if one is not entry]
        chosen = victims(missing, resident, lambda one: pool.size_of(one.footprint.nbytes), self._policy)
        for one in chosen or ():
            self._evict(one, pool)
        evicted += chosen or ()
        return chosen is not None

    def _evict(self, entry: AdapterEntry, pool: Pool) -> None:
        if pool is not self._tier.pool:
            self._free_host(entry)
            return
        withdrawn = self._tier.withdraw(entry.handle)
        self._tier.release(withdrawn)
        self.leaving.append((withdrawn, entry.copies.device))
        self._free_device(entry)
        self.evictions += 1

    def free(self, entry: AdapterEntry) -> None:
        """Free the memory of an entry that no step reads."""
        self._free_device(entry)
        self._free_host(entry)

    def _free_device(self, entry: AdapterEntry) -> None:
        if entry.copies.device is not None:
            self._tier.pool.deallocate(entry.copies.device)
            del self._on_device[entry]
        entry.copies.device, entry.progress = None, Progress()
        entry.copies.ready.clear()

    def _free_host(self, entry: AdapterEntry) -> None:
        if entry.copies.host is not None and self.host_pool is not None:
            self.host_pool.deallocate(entry.copies.host)
            del self._on_host[entry]
        entry.copies.host = None
        entry.copies.packed.clear()

    def check_integrity(self, entries: Iterable[AdapterEntry]) -> None:
        """Raises AssertionError unless every byte of the pools is free or one entry's. For an idle store."""
        copies = {entry: entry.copies for entry in entries}
        self._tier.pool.check_integrity([one.device for one in copies.values() if one.device is not None])
        if self.host_pool is not None:
            self.host_pool.check_integrity([one.host for one in copies.values() if one.host is not None])
        for entry, one in copies.items():
            assert not one.ready or one.device is not None or not entry.footprint.nbytes, entry
            assert not one.packed or one.host is not None, entry
            assert (one.device is not None) == (entry in self._on_device), entry
            assert (one.host is not None) == (entry in self._on_host), entry
