"""Adapters with a claim on the device pool, and what still fits beside them."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from lora_server.errors import AdapterLoadError
from lora_server.memory.entry import AdapterEntry
from lora_server.memory.pools import Pool
from lora_server.memory.table import AdapterTable


class Claims:
    """Active adapters are evicted for active ones alone, pinned ones never. The store's lock guards it."""

    def __init__(self, table: AdapterTable, pool: Pool, shard: int) -> None:
        self.active: set[int] = set()  # handles that clients hold, known here or not
        self.pinned: set[AdapterEntry] = set()  # by `adapters pin`
        self._table, self._pool, self._shard = table, pool, shard

    def check_step(self, entries: Iterable[AdapterEntry], pinned: Collection[AdapterEntry] = ()) -> None:
        """Raises AdapterLoadError where the adapters of one step do not fit the pool together with the pinned ones."""
        size, beside, capacity = _size_of(entries), _size_of(set(pinned).difference(entries)), self._pool.capacity
        if size + beside > capacity:
            of_which = f", of which {beside} are pinned" if beside else ""
            raise AdapterLoadError(
                f"shard {self._shard}: the adapters of one step take {size} bytes together, and its pool "
                f"has {capacity}{of_which}; put fewer adapters into a batch, or start the server with a larger "
                "--device-pool or more shards"
            )

    def check_pin(self, entry: AdapterEntry) -> None:
        """Raises AdapterLoadError where the adapter does not fit the pool together with the pinned ones."""
        pinned, capacity = self.pinned - {entry}, self._pool.capacity
        size = _size_of(pinned)
        if size + (entry.footprint.size or 0) > capacity:
            raise AdapterLoadError(
                f"shard {self._shard}: it takes {entry.footprint.size} bytes there, the {len(pinned)} adapters that "
                f"are pinned already take {size}, and the pool has {capacity}; unpin others, or start the server with "
                "a larger --device-pool"
            )

    def active_fit(self, newcomer: int = 0) -> bool:
        """Return whether the active adapters fit the pool together, and `newcomer` bytes beside them."""
        size = _size_of(self._table.among(self.active))
        return size + newcomer <= self._pool.capacity

    def exclude(self, entry: AdapterEntry) -> bool:
        """Return whether the active adapters leave no memory for one that is not active."""
        return not entry.active and not self.active_fit(entry.footprint.size or 0)


def _size_of(entries: Iterable[AdapterEntry]) -> int:
    return sum(entry.footprint.size or 0 for entry in entries)
