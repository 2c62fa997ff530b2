"""The adapters that a shard knows."""

from __future__ import annotations

from collections.abc import Iterable

from lora_server.memory.entry import AdapterEntry, Source

MOST_REMOVED = 65_536  # handles that are remembered


class AdapterTable:
    """Entries by handle, and which of them changed. The store's lock guards it; single look-ups need no lock."""

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.layers = layers  # of this shard
        self.entries: dict[int, AdapterEntry] = {}
        self.complete: set[int] = set()  # handles with all layers READY
        self.dropped: dict[AdapterEntry, object] = {}  # not freed yet, with what the tier withdrew
        self._removed: dict[int, None] = {}  # the last handles that were
        self._changed: set[int] = set()
        self._registered = 0

    def add(self, handle: int, source: Source) -> AdapterEntry:
        """Register an adapter."""
        self._registered += 1
        self._removed.pop(handle, None)  # a controller that starts anew counts handles from the first one again
        entry = self.entries[handle] = AdapterEntry(handle, source, self.layers, self._registered)
        return entry

    def remove(self, handle: int) -> AdapterEntry | None:
        """Forget an adapter, and return its entry if it was known."""
        self._removed[handle] = None
        if len(self._removed) > MOST_REMOVED:
            del self._removed[next(iter(self._removed))]
        return self.entries.pop(handle, None)

    def was_removed(self, handle: int) -> bool:
        """Return whether the handle is among the last MOST_REMOVED that were removed."""
        return handle in self._removed

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
