"""Prefetches the adapters of waiting requests before their turn comes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping

MOST = 64  # adapters in one announcement
SPACING_SECONDS = 0.1  # assumed between the starts of two successive waiting requests
EVERY_SECONDS = 0.05  # the shortest time between two looks at the queue
AGAIN_SECONDS = 10.0  # an unchanged queue is announced again before the server forgets it


class Lookahead:
    """Announcements of the adapters that a server will need next. Thread-safe.

    A request that is scheduled before the next look at the queue is not announced.
    `send(expected)` replaces the announcement before, see Session.prefetch; it never blocks.
    """

    def __init__(self, send: Callable[[Mapping[int, float]], None], now: Callable[[], float] = time.monotonic) -> None:
        self._send, self._now = send, now
        self._said: list[int] = []  # handles, in the order in which they are expected
        self._looked = self._sent = -AGAIN_SECONDS
        self._lock = threading.Lock()

    def is_due(self) -> bool:
        """Return whether it is time to look at the queue."""
        return self._now() >= self._looked + EVERY_SECONDS

    def follow(self, waiting: Iterable[int]) -> None:
        """Announce the handles of waiting requests, in order."""
        handles = list(dict.fromkeys(waiting))[:MOST]
        with self._lock:
            self._looked = self._now()
            if handles != self._said or (handles and self._looked >= self._sent + AGAIN_SECONDS):
                self._said, self._sent = handles, self._looked
                self._send({handle: place * SPACING_SECONDS for place, handle in enumerate(handles)})
