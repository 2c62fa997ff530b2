"""What shards bring in before anybody asks for it: the same on all of them, since a step needs all.

A shard alone cannot tell: an adapter takes another size on each, and each is at another point of its work. So shards
look at files, and say how much each adapter takes; here it is decided who comes, one after the other:

1. what some shards have and others lost, or never had, by handle;
2. what was registered, and all that there is when a shard came anew, in that order.

Who fits every shard that lacks it, beside all that is there or on its way, is brought to these. For who does not,
nobody makes room: it comes when somebody asks. Each is decided once, and not while anybody waits for another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from lora_server.control.admission.residency import Residency
from lora_server.control.admission.room import Room

Place = tuple[int, int]  # handle, shard


class Bring(NamedTuple):
    """These shards are to bring it in."""

    handle: int
    shards: list[int]


class Unasked:
    """Not thread-safe: `adapters` calls it under its lock."""

    def __init__(self, residency: Residency, room: Room) -> None:
        self._residency, self._room = residency, room
        self._offered: dict[int, None] = {}  # handles, in their order; not decided yet
        self._uneven: set[int] = set()  # handles that some shards may have, and others not; not decided since
        self._bringing: dict[int, set[int]] = {}  # by handle: shards that have not answered yet
        self._asked: set[Place] = set()  # somebody waits for it
        self._taken: dict[Place, int] = {}  # bytes of what is there, or on its way
        self._used: Counter[int] = Counter()  # the same, by shard

    def offer(self, handles: Iterable[int]) -> None:
        """To be decided, unless they are already."""
        self._offered |= dict.fromkeys(handles)

    def is_brought(self, handle: int) -> bool:
        """Whether a shard was told to, and has not answered."""
        return handle in self._bringing

    def asked(self, handle: int, shard: int) -> None:
        """Somebody waits for it there, until `note` hears otherwise."""
        self._asked.add((handle, shard))

    def note(self, handle: int, shard: int) -> None:
        """What the shard has of it, or is bringing, or how much that takes, may be another than before."""
        resident, place, before = self._residency.of(handle), (handle, shard), self._taken.pop((handle, shard), None)
        comes = shard in resident.coming
        if resident.layers.get(shard) or comes or shard in self._bringing.get(handle, ()):
            self._taken[place] = self._room.size_on(handle, shard) or 0
        self._used[shard] += self._taken.get(place, 0) - (before or 0)
        if handle in self._bringing:
            return
        (self._asked.add if comes else self._asked.discard)(place)
        if (before is None) != (place not in self._taken):
            self._uneven.add(handle)

    def answered(self, handle: int, shard: int) -> None:
        """It is there, or does not come."""
        shards = self._bringing.get(handle, set())
        shards.discard(shard)
        if not shards:
            self._bringing.pop(handle, None)
        self.note(handle, shard)

    def forget(self, handle: int) -> None:
        """The adapter is gone, and others may have room now to be completed."""
        self._offered.pop(handle, None)
        self._uneven.discard(handle)
        self._bringing.pop(handle, None)
        for shard in self._used:
            self._asked.discard((handle, shard))
            self._used[shard] -= self._taken.pop((handle, shard), 0)
        self._uneven.update(other for other, _ in self._taken)

    def decide(self, may_come: Callable[[int], bool]) -> list[Bring]:
        """Whom to bring now, where all shards are up. They count as on their way until they are `answered`."""
        found = list[Bring]()
        if self._asked:
            return found
        for handle in sorted(self._uneven):
            somewhere = any((handle, shard) in self._taken for shard in self._used)
            if somewhere and not self._decide(handle, may_come, found):
                return found
            self._uneven.discard(handle)
        while self._offered:
            handle = next(iter(self._offered))
            if not self._decide(handle, may_come, found):
                return found
            del self._offered[handle]
        return found

    def _decide(self, handle: int, may_come: Callable[[int], bool], found: list[Bring]) -> bool:
        """False where nobody knows yet how much it takes."""
        resident = self._residency.of(handle)
        if handle in self._bringing or not may_come(handle) or resident.error or resident.remote:
            return True
        if self._room.unmeasured([handle]) is not None:
            return False
        lacking = self._residency.lacking(handle)
        if lacking and all(self._fits(handle, shard) for shard in lacking):
            self._bringing[handle] = set(lacking)
            for shard in lacking:
                self.note(handle, shard)
            found.append(Bring(handle, lacking))
        return True

    def _fits(self, handle: int, shard: int) -> bool:
        used = self._used[shard] - self._taken.get((handle, shard), 0)
        return used + (self._room.size_on(handle, shard) or 0) <= self._room.capacity_of(shard)
