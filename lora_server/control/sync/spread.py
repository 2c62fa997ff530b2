"""The shards that know an adapter before any request names it: all of them, or two that keep its record."""

from __future__ import annotations

from collections.abc import Iterable

MOST_IN_ADVANCE = 262_144  # adapters that no request named, times shards that know them: rows of the residency table


class AdapterSpread:
    """Decides which adapters every shard knows. Not thread-safe: `ShardSync` calls it under its lock.

    While adapters times shards are at most `most`, that is all of them. Further ones are kept by two shards for a
    controller that is restarted, half the shards apart, so as a rule on two nodes; all shards learn of such an
    adapter when a request, or an operator, first names it. From then on it is like the others.
    """

    def __init__(self, num_shards: int, most: int = MOST_IN_ADVANCE) -> None:
        self._num_shards, self._most = num_shards, most
        self.on_all: dict[int, None] = {}  # handles that all shards know, in the order in which they were sent them

    def add(self, handles: Iterable[int]) -> None:
        """Note that all shards are sent these."""
        self.on_all |= dict.fromkeys(handles)

    def has_room(self) -> bool:
        """Return whether all shards may be sent another adapter that no request named yet."""
        return (len(self.on_all) + 1) * self._num_shards <= self._most

    def keepers(self, handle: int) -> set[int]:
        """Return the shards that keep the record of an adapter that not all know."""
        return {handle % self._num_shards, (handle + self._num_shards // 2) % self._num_shards}

    def forget(self, handle: int) -> None:
        """Remove an adapter."""
        self.on_all.pop(handle, None)
