"""Decide what shards load before any request asks for it: the same adapters on all of them, since a step needs all.

A shard alone cannot tell: an adapter takes a different size on each, and each is at another point of its work. So
shards look at files and report how much each adapter takes; here it is decided which adapters are loaded, one by one:

1. adapters that some shards have and others lack, in the order of handles;
2. adapters that were registered, and all of them when a shard restarts, in the order in which they were offered.

An adapter that fits every shard that lacks it, beside all that is there or on its way, is loaded on these. For one that
does not fit, nothing is evicted: it is loaded when a request asks. Each is decided once, and not while a request waits
for any adapter. Those of 1 are decided again whenever memory becomes free on a shard, or a shard could not load one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

from lora_server.control.sync.residency import ResidencyTable
from lora_server.control.sync.sizes import PoolSizes

Place = tuple[int, int]  # handle, shard


class PrewarmLoad(NamedTuple):
    """The shards that are to load an adapter."""

    handle: int
    shards: list[int]


class Prewarm:
    """Decides which shards load adapters into idle memory. Not thread-safe: `ShardSync` calls it under its lock."""

    def __init__(self, residency: ResidencyTable, sizes: PoolSizes) -> None:
        self._residency, self._sizes = residency, sizes
        self._offered: dict[int, None] = {}  # handles that wait for a decision, in order
        self._uneven: set[int] = set()  # handles to decide on again: some shards may have them, and others not
        self._sent: dict[int, set[int]] = {}  # by handle: shards that have not answered yet
        self._refused: set[Place] = set()  # it fits, but the shard did not load it; until its next report
        self._asked: set[Place] = set()  # a request waits for it
        self._taken: defaultdict[int, dict[int, int]] = defaultdict(dict)  # bytes loaded, or loading, by shard
        self._used: Counter[int] = Counter()  # the same, by shard
        self._freed = False  # memory became free since the last decision

    def offer(self, handles: Iterable[int]) -> None:
        """Queue these for a decision; those that are queued already keep their place."""
        self._offered |= dict.fromkeys(handles)

    def is_loading(self, handle: int) -> bool:
        """Return whether a shard was told to load an adapter, and has not answered."""
        return handle in self._sent

    @property
    def is_settled(self) -> bool:
        """Return whether no load is in flight, and no shard is left to ask."""
        return not (self._offered or self._uneven or self._sent or self._refused or self._asked or self._freed)

    @property
    def is_due(self) -> bool:
        """Return whether there is anything to decide."""
        return bool(self._offered or self._uneven or self._freed)

    def asked(self, handle: int, shard: int) -> None:
        """Note that a request waits for an adapter on a shard, until `note` finds that it does not."""
        self._asked.add((handle, shard))

    def note(self, handle: int, shard: int) -> None:
        """Update what a shard has of an adapter, or is loading, and the bytes that this takes."""
        taken, (has_layers, _, loads) = self._taken[handle], self._residency.on(handle, shard)
        before = taken.pop(shard, None)
        if has_layers or loads or shard in self._sent.get(handle, ()):
            taken[shard] = self._sizes.of(handle, shard) or 0
        more = taken.get(shard, 0) - (before or 0)
        self._used[shard] += more
        self._freed |= more < 0
        if not taken:
            del self._taken[handle]
        if not loads:
            self._asked.discard((handle, shard))
        if handle in self._sent:
            return
        if loads:
            self._asked.add((handle, shard))
        if (before is None) != (shard not in taken):
            self._uneven.add(handle)

    def answered(self, handle: int, shard: int) -> None:
        """Note that a shard has loaded an adapter, or refused to."""
        shards = self._sent.get(handle, set())
        shards.discard(shard)
        if not shards:
            self._sent.pop(handle, None)
            self._uneven.add(handle)
        self.note(handle, shard)
        _, has_all, _ = self._residency.on(handle, shard)
        if not has_all and self._fits(handle, shard):
            self._refused.add((handle, shard))

    def heard(self, shard: int) -> None:
        """Reconsider the adapters that a shard refused, after it has reported its memory's use."""
        refused = {place for place in self._refused if place[1] == shard}
        self._refused -= refused
        self._uneven.update(handle for handle, _ in refused)

    def forget(self, handle: int) -> None:
        """Remove an adapter; others may fit now."""
        self._offered.pop(handle, None)
        self._uneven.discard(handle)
        self._sent.pop(handle, None)
        for places in (self._asked, self._refused):
            places.difference_update([place for place in places if place[0] == handle])
        self._used.subtract(self._taken.pop(handle, {}))
        self._freed = True

    def decide(self, may_load: Callable[[int], bool]) -> list[PrewarmLoad]:
        """Return the loads to send now; only while all shards are up. Each is on its way until it is `answered`."""
        found = list[PrewarmLoad]()
        if self._asked:
            return found
        if self._freed:
            self._freed = False
            everywhere = self._residency.num_shards
            self._uneven.update(handle for handle, shards in self._taken.items() if len(shards) < everywhere)
        for handle in sorted(self._uneven):
            if handle in self._taken and not self._decide(handle, may_load, found):
                return found
            self._uneven.discard(handle)
        while self._offered:
            handle = next(iter(self._offered))
            if not self._decide(handle, may_load, found):
                return found
            del self._offered[handle]
        return found

    def _decide(self, handle: int, may_load: Callable[[int], bool], found: list[PrewarmLoad]) -> bool:
        """Return False while a shard has not opened or measured it yet."""
        residency = self._residency
        if handle in self._sent or not may_load(handle) or residency.error(handle):
            return True
        if (files := residency.files(handle)).remote:
            return True
        if self._sizes.unmeasured([handle]) is not None or not files.opened:
            return False
        lacking = residency.lacking(handle)
        refused = any((handle, shard) in self._refused for shard in lacking)
        if lacking and not refused and all(self._fits(handle, shard) for shard in lacking):
            self._sent[handle] = set(lacking)
            for shard in lacking:
                self.note(handle, shard)
            found.append(PrewarmLoad(handle, lacking))
        return True

    def _fits(self, handle: int, shard: int) -> bool:
        used = self._used[shard] - self._taken.get(handle, {}).get(shard, 0)
        return used + (self._sizes.of(handle, shard) or 0) <= self._sizes.limit_of(shard)
