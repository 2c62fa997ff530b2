"""The memory of one shard's adapters: who has some, who gets some, and who makes room for whom."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping

from lora_server.errors import AdapterLoadError
from lora_server.memory.entry import Entry
from lora_server.memory.eviction import Policy, may_go, victims
from lora_server.memory.pins import Pins
from lora_server.memory.pools import Pool
from lora_server.memory.tier import Tier


class Room:
    """Of the device pool and, where there is one, the host pool. The store's lock guards it.

    `entries` are all that are known, by handle. `on_evicted` is called with each that made room, `on_use` with each
    that a step has read.
    """

    def __init__(
        self,
        entries: Mapping[int, Entry],
        pins: Pins,
        tier: Tier,
        host_pool: Pool | None,
        shard: int,
        policy: Policy,
        on_evicted: Callable[[Entry], None],
        on_use: Callable[[Entry], None],
    ) -> None:
        self.tier, self.host_pool = tier, host_pool
        self.active: set[int] = set()  # handles that clients hold
        self.kept: set[Entry] = set()  # they never make room (`adapters pin`)
        self.evictions = 0
        self.leaving: list[object] = []  # what evicted ones had, to be let go when there is time
        self._entries, self._pins = entries, pins
        self._shard, self._policy = shard, policy
        self._on_evicted, self._on_use = on_evicted, on_use
        self._on_device: dict[Entry, None] = {}  # an ordered set
        self._on_host: dict[Entry, None] = {}

    # -- whether they fit

    def check_fit(self, entries: Iterable[Entry], kept: Collection[Entry] = ()) -> None:
        """Raises AdapterLoadError where the adapters of one step do not fit together, beside those that are kept."""
        size, beside, capacity = _size_of(entries), _size_of(set(kept).difference(entries)), self.tier.pool.capacity
        if size + beside > capacity:
            pinned = f", of which {beside} are pinned" if beside else ""
            raise AdapterLoadError(
                f"shard {self._shard}: the adapters of one step take {size} bytes together, and its pool "
                f"has {capacity}{pinned}; put fewer adapters into a batch, or start the server with a larger "
                "--device-pool or more shards"
            )

    def check_kept(self, entry: Entry) -> None:
        """Raises AdapterLoadError where it does not fit beside those that are kept already."""
        kept, capacity = self.kept - {entry}, self.tier.pool.capacity
        size = _size_of(kept)
        if size + (entry.size or 0) > capacity:
            raise AdapterLoadError(
                f"shard {self._shard}: it takes {entry.size} bytes there, the {len(kept)} adapters that are pinned "
                f"already take {size}, and the pool has {capacity}; unpin others, or start the server with a larger "
                "--device-pool"
            )

    def is_taken_by_active(self, entry: Entry) -> bool:
        """Whether only active ones could make room for it, and it is none."""
        return not entry.active and self._size_of_active() + (entry.size or 0) > self.tier.pool.capacity

    def _size_of_active(self) -> int:
        return _size_of(self._entries[handle] for handle in self.active if handle in self._entries)

    # -- taking and giving back

    def take(self, entry: Entry, now: float) -> bool:
        """Whether it has device memory, for which nobody had to make room. Who got it first goes first, too, however
        long each then loads."""
        if entry.device is None:
            if not self.tier.pool.can_allocate(entry.nbytes):
                return False
            self._allocate(entry)
            entry.usage.count(now, 0)
        return True

    def make(self, entry: Entry, now: float) -> bool:
        """Whether it has device memory now, and may be loaded; in the host pool it gets some if it can."""
        if entry.device is None:
            if not self._evict_for(entry, self.tier.pool, now):
                return False
            self._allocate(entry)
        entry.began = entry.began or now
        if entry.host is None and self.host_pool is not None and self._evict_for(entry, self.host_pool, now):
            entry.host = self.host_pool.allocate(entry.nbytes)
            self._on_host[entry] = None
        return True

    def _allocate(self, entry: Entry) -> None:
        entry.device = self.tier.pool.allocate(entry.nbytes)
        self._on_device[entry] = None

    def _evict_for(self, entry: Entry, pool: Pool, now: float) -> bool:
        missing = pool.size_of(entry.nbytes) - pool.free
        if missing <= 0 or entry.is_spare():
            return missing <= 0
        self.note_uses()
        if pool is self.tier.pool:
            active_fit = self._size_of_active() <= pool.capacity
            there = [one for one in self._on_device if one is not entry and one.handle not in self._pins]
            resident = [one for one in there if may_go(one, entry, now, active_fit)]
        else:
            resident = [one for one in self._on_host if one is not entry]
        chosen = victims(missing, resident, lambda one: pool.size_of(one.nbytes), self._policy)
        for one in chosen or ():
            self._evict(one, pool)
        return chosen is not None

    def _evict(self, entry: Entry, pool: Pool) -> None:
        if pool is self.tier.pool:
            withdrawn = self.tier.withdraw(entry.handle)
            self.tier.release(withdrawn)
            self.leaving.append((withdrawn, entry.device))
            self.free_device(entry)
            self.evictions += 1
        else:
            self.free_host(entry)
        self._on_evicted(entry)

    def note_uses(self) -> None:
        """What steps have read lately counts."""
        unpinned = [(time.monotonic(), [handle]) for handle in self.tier.take_uses()]
        for now, handles in [*self._pins.take_uses(), *unpinned]:
            for handle in handles:
                if handle in self._entries:
                    self._entries[handle].usage.count(now)
                    self._on_use(self._entries[handle])

    def free_device(self, entry: Entry) -> None:
        """Nobody reads it any more."""
        if entry.device is not None:
            self.tier.pool.deallocate(entry.device)
            del self._on_device[entry]
        entry.device, entry.first, entry.in_part, entry.preloaded, entry.began = None, 0, None, False, 0.0
        entry.ready.clear()

    def free_host(self, entry: Entry) -> None:
        """Its packed bytes are not there any more."""
        if entry.host is not None and self.host_pool is not None:
            self.host_pool.deallocate(entry.host)
            del self._on_host[entry]
        entry.host = None
        entry.packed.clear()

    def check_integrity(self) -> None:
        """When idle: every byte of the pools is free or an adapter's, once. Raises AssertionError."""
        entries = self._entries.values()
        self.tier.pool.check_integrity([entry.device for entry in entries if entry.device is not None])
        if self.host_pool is not None:
            self.host_pool.check_integrity([entry.host for entry in entries if entry.host is not None])
        for entry in entries:
            assert not entry.ready or entry.device is not None or not entry.nbytes, entry
            assert not entry.packed or entry.host is not None, entry
            assert (entry.device is not None) == (entry in self._on_device), entry
            assert (entry.host is not None) == (entry in self._on_host), entry


def _size_of(entries: Iterable[Entry]) -> int:
    return sum(entry.size or 0 for entry in entries)
