"""Parts of the simulated system: caches of adapter slots, adapters and decode instances."""

from __future__ import annotations

from collections import OrderedDict


class SlotCache:
    """Adapter slots: free ones, idle adapters in LRU order, and the adapters that wait for a slot."""

    __slots__ = ("free", "idle", "waiting")

    def __init__(self, slots: int) -> None:
        self.free = slots
        self.idle: OrderedDict[AdapterState, None] = OrderedDict()
        self.waiting: list[tuple[int, int, AdapterState]] = []  # (key, adapter, its state here)

    def take(self) -> bool:
        """Take a free slot, or evict the idle adapter that was used least recently; False where there is neither."""
        if self.free:
            self.free -= 1
        elif self.idle:
            self.idle.popitem(last=False)[0].resident = False
        else:
            return False
        return True


class AdapterState:
    """One adapter in one cache: its instance (None: any), its users, and the requests that wait for its slot."""

    __slots__ = ("adapter", "blocked", "cache", "owner", "resident", "users")

    def __init__(self, cache: SlotCache, owner: int | None, adapter: int) -> None:
        self.cache, self.owner, self.adapter = cache, owner, adapter
        self.resident, self.users = False, 0
        self.blocked: list[tuple[int, int]] = []  # (key, request)

    def hold(self) -> bool | None:
        """Add a user; return whether the adapter was resident, or None, and add none, if no slot is left."""
        was_resident = self.resident
        if was_resident:
            if not self.users:
                del self.cache.idle[self]
        elif not self.cache.take():
            return None
        self.resident = True
        self.users += 1
        return was_resident

    def release(self) -> None:
        """Remove a user; an adapter without users is idle."""
        self.users -= 1
        if not self.users:
            self.cache.idle[self] = None


class DecodeInstance:
    """One instance: its batch, its queue, and a clock in tokens, which stops while prompts are computed.

    The clock is that of the time `seen`, which lies ahead while a prompt is computed; `pace` is the seconds of a token.
    Events of an older `version` are out of date.
    """

    __slots__ = ("batch", "clock", "pace", "queue", "seen", "version")

    def __init__(self, pace: float) -> None:
        self.batch: list[tuple[float, int]] = []  # (clock at its last token, request)
        self.queue: list[tuple[int, int]] = []  # (key, request)
        self.clock = self.seen = 0.0
        self.pace, self.version = pace, 0

    @property
    def load(self) -> int:
        """Return the number of its requests, running and queued."""
        return len(self.batch) + len(self.queue)

    def advance(self, now: float) -> tuple[float, float]:
        """Return (tokens so far, when the next may begin)."""
        ready = max(now, self.seen)
        if not self.batch:
            return 0.0, ready
        return self.clock + (ready - self.seen) / self.pace, ready
