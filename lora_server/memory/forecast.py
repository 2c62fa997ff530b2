"""Forecast when adapters are fully loaded, from how fast earlier layers came and what is queued before."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from lora_server.memory.entry import NEVER, AdapterEntry

NEWEST = 0.25  # share of the newest layer in a rate


class LoadForecast:
    """Bytes per second of the loads from each tier. The store's lock guards it.

    `lacks_files`: the entry's files have to be fetched first, and how long that takes is unknown.
    """

    def __init__(self, lacks_files: Callable[[AdapterEntry], bool]) -> None:
        self._lacks_files = lacks_files
        self._rates: dict[str, float] = {}  # by tier

    def note(self, tier: str, nbytes: int, seconds: float) -> None:
        """Account for a layer that was loaded. One for which the adapter has nothing on this shard says nothing."""
        if nbytes:
            rate = nbytes / max(seconds, 1e-9)
            self._rates[tier] = NEWEST * rate + (1 - NEWEST) * self._rates.get(tier, rate)

    def expect(self, ordered: Iterable[AdapterEntry]) -> dict[AdapterEntry, float]:
        """Return in how many seconds each entry is fully loaded if they load in this order; NEVER if that is unknown.

        An entry of unknown duration delays none behind it.
        """
        total, expected = 0.0, {}
        for entry in ordered:
            alone = self._alone(entry)
            expected[entry] = total + alone
            total += alone if alone < NEVER else 0.0
        return expected

    def _alone(self, entry: AdapterEntry) -> float:
        tier = "host" if entry.is_packed() else "disk"
        if entry.footprint.size is None or tier not in self._rates or self._lacks_files(entry):
            return NEVER
        left = 1 - len(entry.copies.ready) / len(entry.layers)
        return entry.footprint.nbytes * left / self._rates[tier]
