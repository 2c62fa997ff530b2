"""The order in which adapters are listed: by name, then by handle."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right

ListPlace = tuple[str, int]  # name, handle


class ListOrder:
    """The places of all versions, kept in order. Thread-safe; its lock is a leaf."""

    def __init__(self) -> None:
        self._places: list[ListPlace] = []
        self._lock = threading.Lock()

    def add(self, place: ListPlace) -> None:
        """Insert a place; one that is there stays."""
        with self._lock:
            index = bisect_left(self._places, place)
            if self._places[index : index + 1] != [place]:
                self._places.insert(index, place)

    def remove(self, place: ListPlace) -> None:
        """Remove a place that is there."""
        with self._lock:
            del self._places[bisect_left(self._places, place)]

    def after(self, place: ListPlace = ("", 0)) -> list[ListPlace]:
        """Return the places that follow one."""
        with self._lock:
            return self._places[bisect_right(self._places, place) :]

    def has(self, name: str) -> bool:
        """Return whether there is a version of this name."""
        with self._lock:
            index = bisect_left(self._places, (name, 0))
            return index < len(self._places) and self._places[index][0] == name
