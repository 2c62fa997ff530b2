"""How long steps take in each of their phases at a shard, as histograms.

wait: from when the loop saw a step to when its turn came; receive: reading and checking its tables; compute; send:
what the loop does to answer, which is a signal in shared memory and a write on a socket.
"""

from __future__ import annotations

from collections.abc import Iterator

from lora_server.histogram import Histogram

PHASES = ("wait", "receive", "compute", "send")


class Phases:
    """One shard's. Written by its loop, read by others now and then."""

    def __init__(self) -> None:
        self._each = tuple(Histogram() for _ in PHASES)

    def add(self, *nanoseconds: int) -> None:
        """One step's, as in PHASES."""
        for histogram, duration in zip(self._each, nanoseconds, strict=True):
            histogram.add(duration)

    def __iter__(self) -> Iterator[tuple[str, Histogram]]:
        return zip(PHASES, self._each, strict=True)
