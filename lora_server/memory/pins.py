"""Adapters that steps read now, and those that were used lately."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Collection, Iterator

MOST_USES = 100_000  # kept until they are taken


class Pins:
    """One pin for all adapters of a step, in constant time. The store's lock guards it.

    `none` is set while there is no pin.
    """

    def __init__(self) -> None:
        self._handles: dict[int, Collection[int]] = {}
        self.none = threading.Event()
        self.none.set()
        self._tokens = itertools.count(1)
        self._uses: deque[tuple[float, Collection[int]]] = deque(maxlen=MOST_USES)

    def add(self, handles: Collection[int], now: float) -> int:
        """Add a pin; returns its token for `remove`."""
        token = next(self._tokens)
        self._handles[token] = handles
        self._uses.append((now, handles))
        self.none.clear()
        return token

    def remove(self, token: int) -> None:
        """Remove a pin."""
        del self._handles[token]
        if not self._handles:
            self.none.set()

    def __contains__(self, handle: int) -> bool:
        return any(handle in handles for handles in self._handles.values())

    def take_uses(self) -> Iterator[tuple[float, Collection[int]]]:
        """Yield each use once, the oldest first: its time and its handles."""
        while self._uses:
            yield self._uses.popleft()
