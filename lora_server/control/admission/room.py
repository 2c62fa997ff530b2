"""What the shards' device pools hold, and what each adapter takes of them. Not thread-safe."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Set

from lora_server.units import size


class Room:
    """`most` adapters may be active together, 0: as many as fit. A shard whose capacity is unknown bounds nothing."""

    def __init__(self, most: int = 0) -> None:
        self.most = most
        self.active: set[int] = set()  # handles that have a place: in use, or pinned
        self.pinned: frozenset[int] = frozenset()
        self.in_use: Set[int] = set()
        self._capacity: dict[int, int] = {}  # by shard
        self._sizes: dict[int, dict[int, int]] = {}  # handle -> shard -> bytes
        self._used: Counter[int] = Counter()  # by shard, of the active

    def set_capacity(self, shard: int, nbytes: int) -> None:
        """Of its device pool; 0 says nothing."""
        if nbytes:
            self._capacity[shard] = nbytes

    def set_size(self, handle: int, shard: int, nbytes: int) -> None:
        """What an adapter takes there."""
        before = self._sizes.setdefault(handle, {}).get(shard, 0)
        self._sizes[handle][shard] = nbytes
        if handle in self.active:
            self._used[shard] += nbytes - before

    def capacity_of(self, shard: int) -> float:
        """What its device pool takes."""
        return self._capacity.get(shard, math.inf)

    def size_on(self, handle: int, shard: int) -> int | None:
        """What it takes there, where that is known."""
        return self._sizes.get(handle, {}).get(shard)

    def set_in_use(self, in_use: Set[int]) -> tuple[set[int], set[int]]:
        """These and the pinned ones have a place from now on; which are more than before, which are not any more."""
        self.in_use, active = in_use, in_use | self.pinned
        more, fewer = set(active - self.active), set(self.active - active)
        for handle in more:
            self._used.update(self._sizes.get(handle, {}))
        for handle in fewer:
            self._used.subtract(self._sizes.get(handle, {}))
        self.active = (self.active | more) - fewer
        return more, fewer

    def forget(self, handle: int) -> None:
        """An adapter that is gone."""
        self.pinned -= {handle}
        self.set_in_use(self.in_use - {handle})
        self._sizes.pop(handle, None)

    def unmeasured(self, handles: Iterable[int]) -> int | None:
        """A shard that has not looked yet at one of them."""
        lacking = (shard for handle in handles for shard in self._capacity if shard not in self._sizes.get(handle, {}))
        return next(lacking, None)

    def too_large(self, handles: Set[int]) -> str:
        """Why these can never have places together; empty where they can."""
        if self.most and len(handles) > self.most:
            return f"{len(handles)} adapters together are more than --max-active-adapters {self.most}"
        for shard, capacity in self._capacity.items():
            beside = self._taken(self.pinned - handles, shard)
            if (taken := self._taken(handles, shard)) + beside > capacity:
                pinned = f", of which {beside} are pinned" if beside else ""
                return f"{taken} bytes are needed together on shard {shard}, and its pool has {capacity}{pinned}"
        return ""

    def lacking(self, handles: Set[int], without: Set[int] = frozenset()) -> str:
        """Why there is no place for these beside the active ones, or beside those that are left without some that are
        in use; empty where there is."""
        in_use, gone = self.in_use - without, without - self.pinned
        if self.most and len(in_use | handles) > self.most and not handles <= in_use:
            return f"{len(in_use)} adapters are in use, and --max-active-adapters is {self.most}"
        new = handles - (self.active - gone)
        if not new:
            return ""
        for shard, capacity in self._capacity.items():
            taken, used = self._taken(new, shard), self._used[shard] - self._taken(gone, shard)
            if used + taken > capacity:
                return (
                    f"shard {shard}'s pool of {size(capacity)} has {size(max(0, capacity - used))} beside "
                    f"the {len(self.active)} adapters that are in use or pinned, {size(taken)} are needed"
                )
        return ""

    def _taken(self, handles: Iterable[int], shard: int) -> int:
        return sum(self._sizes.get(handle, {}).get(shard, 0) for handle in handles)
