"""Bytes that each adapter takes on each shard, and that each shard's device pool has, as shards report them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping


class PoolSizes:
    """Sizes of the shards' device pools, and bytes that adapters take in them. Thread-safe; its lock is a leaf.

    A shard of unknown capacity limits nothing. `changes` counts changed sizes: a sum over sizes is current until it
    changes.
    """

    def __init__(self) -> None:
        self.changes = 0
        self._capacity: dict[int, int] = {}  # by shard
        self._sizes: dict[int, dict[int, int]] = {}  # handle -> shard -> bytes
        self._lock = threading.Lock()

    def set_capacity(self, shard: int, nbytes: int) -> None:
        """Set the size of a shard's device pool; 0 means unknown and changes nothing."""
        with self._lock:
            if nbytes:
                self._capacity[shard] = nbytes

    def set_idle(self, shards: Iterable[int]) -> None:
        """Let these limit nothing, until their size is set again."""
        with self._lock:
            for shard in shards:
                self._capacity.pop(shard, None)

    def set_size(self, handle: int, shard: int, nbytes: int) -> None:
        """Set what an adapter takes on a shard."""
        with self._lock:
            sizes = self._sizes.setdefault(handle, {})
            self.changes += sizes.get(shard) != nbytes
            sizes[shard] = nbytes

    def forget(self, handle: int) -> None:
        """Remove an adapter."""
        with self._lock:
            self.changes += self._sizes.pop(handle, None) is not None

    def capacities(self) -> dict[int, int]:
        """Return the pools' known sizes, by shard."""
        with self._lock:
            return dict(self._capacity)

    def of(self, handle: int) -> Mapping[int, int]:
        """Return what an adapter takes, by shard; shards that have not measured it are missing."""
        with self._lock:
            return dict(self._sizes.get(handle, {}))

    def on(self, shard: int, handles: Iterable[int]) -> int:
        """Return what these adapters take together on a shard, as far as it measured them."""
        with self._lock:
            return sum(self._sizes.get(handle, {}).get(shard, 0) for handle in handles)

    def unmeasured(self, handles: Iterable[int]) -> int | None:
        """Return a shard that has not measured one of these adapters yet, or None."""
        with self._lock:
            lacking = (one for handle in handles for one in self._capacity if one not in self._sizes.get(handle, {}))
            return next(lacking, None)
