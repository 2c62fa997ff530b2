"""The adapters that a shard knows."""

from __future__ import annotations

from collections.abc import Iterable

from lora_server.memory.entry import AdapterEntry, Source

MOST_GONE = 65_536


class AdapterTable:
    """Entries by handle, and which of them changed. The store's lock guards it; single look-ups need no lock."""

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.layers = layers  # of this shard
        self.entries: dict[int, AdapterEntry] = {}
        self.complete: set[int] = set()  # handles with all layers READY
        self.dropped: dict[AdapterEntry, object] = {}  # not freed yet, with what the tier withdrew
        self._gone: dict[int, None] = {}  # the last handles that were removed
        self._changed: set[int] = set()
        self._registered = 0

    def add(self, handle: int, source: Source) -> AdapterEntry:
        """Register an adapter."""
        self._registered += 1
        entry = self.entries[handle] = AdapterEntry(handle, source, self.layers, self._registered)
        return entry

    def remove(self, handle: int) -> AdapterEntry | None:
        """Forget an adapter, and return its entry if it was known."""
        self._gone[handle] = None
        if len(self._gone) > MOST_GONE:
            del self._gone[next(iter(self._gone))]
        return self.entries.pop(handle, None)

    def is_gone(self, handle: int) -> bool:
        """Return whether it was removed, and not very many since."""
        return handle in self._gone

    def among(self, handles: Iterable[int]) -> list[AdapterEntry]:
        """Return the entries of those handles that are known."""
        return [entry for handle in handles if (entry := self.entries.get(handle)) is not None]

    def knows(self, entry: AdapterEntry) -> bool:
        """Return whether the entry was not dropped."""
        return self.entries.get(entry.handle) is entry

    def note(self, entry: AdapterEntry) -> None:
        """Report the adapter's residency with the next report."""
        self._changed.add(entry.handle)

    def take_changed(self) -> list[AdapterEntry]:
        """Return the entries that were noted since the last call."""
        changed, self._changed = self._changed, set()
        return self.among(changed)
