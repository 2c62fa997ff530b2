"""Bytes that each adapter takes on each shard, and that each shard's device pool has, as shards report them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Bytes: TypeAlias = "npt.NDArray[np.int64]"  # by shard
NO_LIMIT = np.iinfo(np.int64).max
UNMEASURED = -1


class PoolSizes:
    """Sizes of the shards' device pools, and bytes that adapters take in them. Thread-safe; its lock is a leaf.

    A shard of unknown capacity limits nothing. `changes` counts changed sizes of adapters that all shards measured: a
    sum over sizes is current until it changes. A question about all shards is one operation on an array.
    """

    def __init__(self, num_shards: int = 1) -> None:
        """`num_shards` grows where a higher one reports."""
        self.changes = 0
        self._limits = np.full(num_shards, NO_LIMIT, np.int64)
        self._sizes: dict[int, Bytes] = {}  # by handle
        self._lock = threading.RLock()

    def set_capacity(self, shard: int, nbytes: int) -> None:
        """Set the size of a shard's device pool; 0 means unknown and changes nothing."""
        with self._lock:
            self._reach(shard)
            if nbytes:
                self._limits[shard] = nbytes

    def set_idle(self, shards: Iterable[int]) -> None:
        """Let these limit nothing, until their size is set again."""
        with self._lock:
            for shard in shards:
                self._reach(shard)
                self._limits[shard] = NO_LIMIT

    def set_size(self, handle: int, shard: int, nbytes: int) -> None:
        """Set what an adapter takes on a shard."""
        with self._lock:
            self._reach(shard)
            if (sizes := self._sizes.get(handle)) is None:
                sizes = self._sizes[handle] = np.full(len(self._limits), UNMEASURED, np.int64)
            changed = sizes[shard] != nbytes
            sizes[shard] = nbytes
            self.changes += bool(changed and self.unmeasured([handle]) is None)

    def forget(self, handle: int) -> None:
        """Remove an adapter."""
        with self._lock:
            self.changes += self._sizes.pop(handle, None) is not None

    def limits(self) -> Bytes:
        """Return the pools' sizes, by shard; NO_LIMIT where that is unknown."""
        with self._lock:
            return self._limits.copy()

    def limit_of(self, shard: int) -> int:
        """Return the size of a shard's pool; NO_LIMIT where that is unknown."""
        with self._lock:
            return int(self._limits[shard]) if shard < len(self._limits) else NO_LIMIT

    def of(self, handle: int, shard: int) -> int | None:
        """Return what an adapter takes on a shard; None where that has not measured it."""
        with self._lock:
            sizes = self._sizes.get(handle)
            if sizes is None or shard >= len(sizes) or sizes[shard] == UNMEASURED:
                return None
            return int(sizes[shard])

    def taken(self, handles: Iterable[int]) -> Bytes:
        """Return what these adapters take together, by shard, as far as they are measured."""
        with self._lock:
            total = np.zeros(len(self._limits), np.int64)
            for handle in handles:
                if (sizes := self._sizes.get(handle)) is not None:
                    total += np.maximum(sizes, 0)
            return total

    def each(self, handles: Sequence[int]) -> Bytes:
        """Return what each of these adapters takes, [handles, shards]; UNMEASURED where that is unknown."""
        with self._lock:
            none = np.full(len(self._limits), UNMEASURED, np.int64)
            found = [self._sizes.get(handle, none) for handle in handles]
            return np.stack(found) if found else np.empty((0, len(self._limits)), np.int64)

    def unmeasured(self, handles: Iterable[int]) -> int | None:
        """Return a shard that has not measured one of these adapters yet, or None."""
        with self._lock:
            for handle in handles:
                sizes, limited = self._sizes.get(handle), self._limits != NO_LIMIT
                lacking = limited if sizes is None else limited & (sizes == UNMEASURED)
                if lacking.any():
                    return int(lacking.argmax())
            return None

    def _reach(self, shard: int) -> None:
        """Have a place for a shard."""
        if (more := shard + 1 - len(self._limits)) > 0:
            self._limits = np.append(self._limits, np.full(more, NO_LIMIT))
            for handle, sizes in self._sizes.items():
                self._sizes[handle] = np.append(sizes, np.full(more, UNMEASURED))
            self.changes += 1
