"""Bytes that each adapter takes on each shard, and that each shard's device pool has, as shards report them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Bytes: TypeAlias = "npt.NDArray[np.int64]"  # by shard
NO_LIMIT = np.iinfo(np.int64).max
UNMEASURED = -1


class PoolSizes:
    """Sizes of the shards' device pools, and bytes that adapters take in them. Thread-safe; its lock is a leaf.

    Adapters of one outline (see adapters/outline.py) take the same bytes on a shard: one measurement counts for all of
    them. A shard of unknown capacity limits nothing. `changes` counts changed sizes of adapters that all shards
    measured: a sum over sizes is current until it changes. A question about all shards is one operation on an array.
    """

    def __init__(self, num_shards: int = 1) -> None:
        """`num_shards` grows where a higher one reports."""
        self.changes = 0
        self._limits = np.full(num_shards, NO_LIMIT, np.int64)
        self._sizes: dict[int | str, Bytes] = {}  # by outline; by handle where an adapter has none
        self._outlines: dict[int, str] = {}  # by handle
        self._num_of = Counter[str]()  # adapters of each outline
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

    def set_outline(self, handle: int, outline: str) -> None:
        """Set an adapter's outline, before its sizes. An empty one is ignored."""
        with self._lock:
            if outline and handle not in self._outlines:
                self._outlines[handle] = outline
                self._num_of[outline] += 1
                self.changes += outline in self._sizes

    def set_size(self, handle: int, shard: int, nbytes: int) -> None:
        """Set what an adapter, and the others of its outline, take on a shard."""
        with self._lock:
            self._reach(shard)
            if (sizes := self._of(handle)) is None:
                sizes = np.full(len(self._limits), UNMEASURED, np.int64)
                self._sizes[self._outlines.get(handle, handle)] = sizes
            changed = sizes[shard] != nbytes
            sizes[shard] = nbytes
            self.changes += bool(changed and self.unmeasured([handle]) is None)

    def forget(self, handle: int) -> None:
        """Remove an adapter."""
        with self._lock:
            outline = self._outlines.pop(handle, "")
            self._num_of[outline] -= 1
            if self._num_of[outline] <= 0:
                del self._num_of[outline]
                self.changes += self._sizes.pop(outline or handle, None) is not None

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
            sizes = self._of(handle)
            if sizes is None or shard >= len(sizes) or sizes[shard] == UNMEASURED:
                return None
            return int(sizes[shard])

    def taken(self, handles: Iterable[int]) -> Bytes:
        """Return what these adapters take together, by shard, as far as they are measured."""
        with self._lock:
            total = np.zeros(len(self._limits), np.int64)
            for key, count in Counter(self._outlines.get(handle, handle) for handle in handles).items():
                if (sizes := self._sizes.get(key)) is not None:
                    total += count * np.maximum(sizes, 0)
            return total

    def each(self, handles: Sequence[int]) -> Bytes:
        """Return what each of these adapters takes, [handles, shards]; UNMEASURED where that is unknown."""
        with self._lock:
            none = np.full(len(self._limits), UNMEASURED, np.int64)
            found = [none if (sizes := self._of(handle)) is None else sizes for handle in handles]
            return np.stack(found) if found else np.empty((0, len(self._limits)), np.int64)

    def unmeasured(self, handles: Iterable[int]) -> int | None:
        """Return a shard that has not measured one of these adapters yet, or None."""
        with self._lock:
            for handle in handles:
                sizes, limited = self._of(handle), self._limits != NO_LIMIT
                lacking = limited if sizes is None else limited & (sizes == UNMEASURED)
                if lacking.any():
                    return int(lacking.argmax())
            return None

    def _of(self, handle: int) -> Bytes | None:
        return self._sizes.get(self._outlines.get(handle, handle))

    def _reach(self, shard: int) -> None:
        """Have a place for a shard."""
        if (more := shard + 1 - len(self._limits)) > 0:
            self._limits = np.append(self._limits, np.full(more, NO_LIMIT))
            for key, sizes in self._sizes.items():
                self._sizes[key] = np.append(sizes, np.full(more, UNMEASURED))
            self.changes += 1
