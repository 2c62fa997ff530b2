"""Counts of durations, to be shown as a Prometheus histogram."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

FIRST_BITS, NUM_BOUNDS = 14, 12  # 16.4 us, and twelve bounds of which each is four times the one before: to 69 s
BOUNDS_NS = tuple(1 << FIRST_BITS + 2 * i for i in range(NUM_BOUNDS))


class Histogram:
    """Counts of durations below each of BOUNDS_NS and not below the one before; the last: of all that are longer."""

    def __init__(self) -> None:
        self.counts = [0] * (NUM_BOUNDS + 1)
        self.sum_ns = 0

    def add(self, nanoseconds: int) -> None:
        """Count one more duration. Call it from one thread at a time."""
        self.sum_ns += nanoseconds
        self.counts[bisect_right(BOUNDS_NS, nanoseconds)] += 1

    def merge(self, counts: Sequence[int], sum_ns: int, sign: int = 1) -> None:
        """Add another histogram's counts; with `sign` -1 subtract them."""
        self.counts = [own + sign * more for own, more in zip(self.counts, counts, strict=True)]
        self.sum_ns += sign * sum_ns
