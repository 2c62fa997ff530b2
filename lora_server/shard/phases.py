"""Histograms of the phases of a step at a shard.

wait: from receiving a step to starting it; receive: reading and checking its tables; compute; send: answering it, by a
signal in shared memory or a write to a socket.
"""

from __future__ import annotations

from collections.abc import Iterator

from lora_server.histogram import Histogram

PHASES = ("wait", "receive", "compute", "send")


class Phases:
    """Written by the shard's loop, read by other threads."""

    def __init__(self) -> None:
        self._each = tuple(Histogram() for _ in PHASES)

    def add(self, *nanoseconds: int) -> None:
        """Add one step's durations, in the order of PHASES."""
        for histogram, duration in zip(self._each, nanoseconds, strict=True):
            histogram.add(duration)

    def __iter__(self) -> Iterator[tuple[str, Histogram]]:
        return zip(PHASES, self._each, strict=True)
