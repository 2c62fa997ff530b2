"""How long steps take in each of their phases at a shard, as histograms.

wait: from when the loop saw a step to when its turn came; receive: reading and checking its tables; compute; send:
what the loop does to answer, which is a signal in shared memory and a write on a socket.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

PHASES = ("wait", "receive", "compute", "send")
FIRST_BITS, NUM_BOUNDS = 14, 11  # 16.4 us, and eleven bounds of which each is four times the one before
BOUNDS_NS = tuple(1 << FIRST_BITS + 2 * i for i in range(NUM_BOUNDS))


class Histogram:
    """Counts of durations below each of BOUNDS_NS and not below the one before; the last: of all that are longer."""

    def __init__(self) -> None:
        self.counts = [0] * (NUM_BOUNDS + 1)
        self.sum_ns = 0


class Phases:
    """One shard's. Written by its loop, read by others now and then."""

    def __init__(self) -> None:
        self._each = tuple(Histogram() for _ in PHASES)

    def add(self, *nanoseconds: int) -> None:
        """One step's, as in PHASES."""
        for histogram, duration in zip(self._each, nanoseconds, strict=True):
            histogram.sum_ns += duration
            histogram.counts[bisect_right(BOUNDS_NS, duration)] += 1

    def __iter__(self) -> Iterator[tuple[str, Histogram]]:
        return zip(PHASES, self._each, strict=True)
