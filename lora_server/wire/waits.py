"""What requests waited for: histograms at an engine, and in the messages by which the server hears of them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from lora_server.errors import ProtocolError
from lora_server.histogram import NUM_BOUNDS, Histogram
from lora_server.wire import lora_server_pb2 as pb

WAITS = NAME, PLACE, WEIGHTS, ENGINE = ("name", "place", "weights", "engine")


def phase_stats(named: Iterable[tuple[str, Histogram]]) -> list[pb.PhaseStats]:
    """Return histograms as messages."""
    return [pb.PhaseStats(phase=name, counts=one.counts, sum_ns=one.sum_ns) for name, one in named]


class WaitHistograms:
    """Histograms of the seconds that requests waited, by what they waited for (WAITS). Thread-safe."""

    def __init__(self) -> None:
        self.of = {what: Histogram() for what in WAITS}
        self._lock = threading.Lock()

    def add(self, seconds: Mapping[str, float]) -> None:
        """Count one request."""
        with self._lock:
            for what, waited in seconds.items():
                self.of[what].add(int(waited * 1e9))

    def messages(self) -> list[pb.PhaseStats]:
        """Return everything as messages; none if no request was counted."""
        with self._lock:
            return phase_stats((what, one) for what, one in self.of.items() if any(one.counts))

    def merge(self, messages: Iterable[pb.PhaseStats], sign: int = 1) -> None:
        """Add what `messages` count; with `sign` -1 take it away. A kind that is unknown here is left out. Raises
        ProtocolError."""
        with self._lock:
            for one in messages:
                if (own := self.of.get(one.phase)) is None:
                    continue
                if len(one.counts) != NUM_BOUNDS + 1:
                    raise ProtocolError(
                        f"waits for a {one.phase}: got {len(one.counts)} counts, expected {NUM_BOUNDS + 1}; "
                        "let engine and server be of one version"
                    )
                own.merge(one.counts, one.sum_ns, sign)
