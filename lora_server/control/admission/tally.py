"""Usage counters: how often each adapter was held, and for how long. `provision` takes popularity from them.

A hold is counted when it ends, never on a step's path. The sums only grow. The first MOST adapters have sums of their
own, all others share one. Every REVIEW holds, an adapter that was held twice as often as one with its own sum replaces
it. The replaced adapter's sum is dropped and the new one starts at zero, so differences over time stay right. Not
thread-safe except `sums`.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

MOST, REVIEW = 512, 50_000


class Sum(NamedTuple):
    """Holds that ended, and the seconds that they took."""

    holds: int = 0
    seconds: float = 0.0

    def plus(self, other: Sum) -> Sum:
        """Return the sum of both."""
        return Sum(self.holds + other.holds, self.seconds + other.seconds)


class Tally:
    """Sums holds by adapter name. `name_of` returns the name of a handle, or None if the adapter is gone."""

    def __init__(
        self,
        name_of: Callable[[int], str | None],
        clock: Callable[[], float] = time.monotonic,
        most: int = MOST,
        review: int = REVIEW,
    ) -> None:
        self._name_of, self._clock, self._most, self._review = name_of, clock, most, review
        self._since: dict[int, deque[float]] = {}  # by handle; which of its holds ends makes no difference to the sum
        self._own: dict[str, Sum] = {}
        self._others = Sum()
        self._recent, self._num_recent = Counter[str](), 0

    def changed(self, handle: int, more: int) -> None:
        """Count `more` holds that begin or, if it is negative, so many that end."""
        now, since = self._clock(), self._since.setdefault(handle, deque())
        since.extend([now] * more)
        for _ in range(min(-more, len(since))):
            self._ended(self._name_of(handle), now - since.popleft())
        if not since:
            del self._since[handle]

    def sums(self) -> tuple[dict[str, Sum], Sum]:
        """Return the sums of adapters that have their own, by name, and the shared sum of all others."""
        return dict(self._own), self._others

    def _ended(self, name: str | None, seconds: float) -> None:
        one = Sum(1, seconds)
        if name is None:
            self._others = self._others.plus(one)
            return
        self._recent[name] += 1
        self._num_recent += 1
        if name in self._own or len(self._own) < self._most:
            self._own[name] = self._own.get(name, Sum()).plus(one)
        else:
            self._others = self._others.plus(one)
        if self._num_recent >= self._review:
            self._look()

    def _look(self) -> None:
        least = sorted(self._own, key=lambda name: self._recent[name])
        most = (name for name, _ in self._recent.most_common() if name not in self._own)
        for name, gives_way in zip(list(most), least, strict=False):
            if self._recent[name] <= 2 * self._recent[gives_way]:
                break
            del self._own[gives_way]
            self._own[name] = Sum()
        self._recent, self._num_recent = Counter(), 0
