"""The pace of an engine: how long its next pass is expected to take."""

from __future__ import annotations

import threading

from lora_server.timings import Timings

FADE = 0.98  # weight of a pass beside the next one
MARGIN = 0.5  # share of a pass that an adapter may still load when the pass begins: forecasts err


class PassPace:
    """Fits seconds = a + b * tokens to the engine's passes, by least squares with fading weights. Thread-safe."""

    def __init__(self, most_seconds: float = Timings.weights) -> None:
        """`most_seconds`: shards let steps wait so long for weights, so that a pass that is shorter than expected, as
        after slow first ones, finds them all the same."""
        self._most_seconds, self._ended = most_seconds, 0.0
        self._sums = [0.0] * 5  # weights, tokens, seconds, tokens squared, tokens times seconds
        self._most_tokens = 0
        self._lock = threading.Lock()

    def passed(self, tokens: int, began: float, ended: float) -> None:
        """Note a pass; one that was scheduled before an earlier pass ended counts from that end. Times are
        time.monotonic()."""
        with self._lock:
            seconds, self._ended = ended - max(began, self._ended), ended
            if tokens:
                seen = (1.0, tokens, seconds, tokens * tokens, tokens * seconds)
                self._sums = [FADE * one + more for one, more in zip(self._sums, seen, strict=True)]
                self._most_tokens = max(self._most_tokens, tokens)

    def of(self, tokens: int) -> float | None:
        """Return the seconds that an adapter may still load when a pass with this many tokens begins; 0 if no pass has
        been seen. A pass of more tokens than any before counts as the largest."""
        with self._lock:
            weight, x, y, xx, xy = self._sums
            if not weight:
                return 0.0
            spread = weight * xx - x * x
            slope = max(0.0, (weight * xy - x * y) / spread) if spread > 1e-6 * weight * xx else 0.0
            expected = max(0.0, (y + slope * (weight * min(tokens, self._most_tokens) - x)) / weight)
            return min(MARGIN * expected, self._most_seconds)
