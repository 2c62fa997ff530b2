"""LoRA-aware routing of coupled instances, each with an adapter cache of its own.

The rules are what routers in front of engines have in common (the LoRA scorer of the Gateway API inference extension,
AIBrix, Dynamo). The first instance that exists is chosen, of several the least loaded:

1. one that has the adapter, and not clearly more requests than the least loaded instance;
2. one with a slot that is free or idle, and place in its batch: it loads the adapter;
3. one that has the adapter, however loaded, or else one where requests already wait to load it;
4. the one for whose slots the fewest adapters wait.

A request is not moved later. The router knows every cache exactly, which favours the coupled side.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from typing import Protocol

from provisioning.simulation.state import AdapterState, SlotCache

_MORE, _FEW = 1.25, 2  # "clearly more" requests than the least loaded instance: over 1.25 times as many, and two more


class RoutedInstance(Protocol):
    """An instance as the router sees it."""

    @property
    def batch(self) -> Sized:
        """The requests that run."""

    @property
    def load(self) -> int:
        """The number of all its requests."""


class LoraRouter:
    """Chooses an instance for each request by the present state of all caches."""

    def __init__(self, instances: Sequence[RoutedInstance], caches: Sequence[SlotCache], max_batch: int) -> None:
        self._instances, self._caches, self._max_batch = instances, caches, max_batch
        self._homes: dict[int, dict[int, AdapterState]] = {}  # adapter -> instance -> its state there

    def choose(self, adapter: int, least: int) -> AdapterState:
        """Return the adapter's state at the chosen instance. `least` is the index of the least loaded instance."""
        homes, instances = self._homes.setdefault(adapter, {}), self._instances
        most = min(_MORE * instances[least].load + _FEW, self._max_batch - 1)
        resident = [home for home, state in homes.items() if state.resident]
        at = self._least(home for home in resident if instances[home].load <= most)
        if at is None and self._open(least):
            at = least
        if at is None:
            at = self._least(home for home in range(len(instances)) if self._open(home))
        if at is None:
            at = self._least(resident or (home for home, state in homes.items() if state.blocked))
        if at is None:
            at = min(range(len(instances)), key=lambda home: (len(self._caches[home].waiting), instances[home].load))
        if at not in homes:
            homes[at] = AdapterState(self._caches[at], at, adapter)
        return homes[at]

    def _open(self, instance: int) -> bool:
        cache = self._caches[instance]
        return bool(cache.free or cache.idle) and len(self._instances[instance].batch) < self._max_batch

    def _least(self, among: Iterable[int]) -> int | None:
        return min(among, key=lambda home: self._instances[home].load, default=None)
