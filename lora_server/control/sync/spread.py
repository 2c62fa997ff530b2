"""The shards that are told of an adapter before any request names it: all of them, or two that keep its record."""

from __future__ import annotations

from collections.abc import Iterable

MOST_TOLD = 262_144  # adapters times shards: the table of residency and a shard's commands grow with them


class AdapterSpread:
    """Decides which adapters every shard is told of. Not thread-safe: `ShardSync` calls it under its lock.

    While adapters times shards are at most `most`, that is all of them. Further ones are kept by two shards for a
    controller that is restarted, half the shards apart, so as a rule on two nodes; all shards are told of such an
    adapter when a request, or an operator, first names it. From then on it is like the others.
    """

    def __init__(self, num_shards: int, most: int = MOST_TOLD) -> None:
        self._num_shards, self._most = num_shards, most
        self.told: dict[int, None] = {}  # handles, in the order in which shards were told

    def tell(self, handles: Iterable[int]) -> None:
        """Note that all shards are told of these."""
        self.told |= dict.fromkeys(handles)

    def has_room(self) -> bool:
        """Return whether all shards may be told of another adapter that no request named yet."""
        return (len(self.told) + 1) * self._num_shards <= self._most

    def keepers(self, handle: int) -> set[int]:
        """Return the shards that keep the record of an adapter of which not all are told."""
        return {handle % self._num_shards, (handle + self._num_shards // 2) % self._num_shards}

    def forget(self, handle: int) -> None:
        """Remove an adapter."""
        self.told.pop(handle, None)
