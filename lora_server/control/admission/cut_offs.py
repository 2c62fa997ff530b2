"""Deadlines of draining adapters: when they are taken from their clients, and which clients keep one for good."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from lora_server.clock import Clock
from lora_server.control.admission.holds import ClientHolds

MergedIn = Callable[[str], Collection[int]]  # the clients whose base weights contain a version


class CutOffs:
    """The deadlines by handle. Used under `AdmissionService`'s lock."""

    def __init__(self, holds: ClientHolds, clock: Clock, merged_in: MergedIn) -> None:
        self._holds, self._clock, self._merged_in = holds, clock, merged_in
        self._until: dict[int, float] = {}

    def begin(self, deadlines: Mapping[int, float], draining: Iterable[int]) -> None:
        """Set the deadlines of what drains, in seconds since 1970. The first of a handle stays."""
        since_1970 = self._clock.time() - self._clock.now()
        for handle in deadlines.keys() & set(draining):
            self._until.setdefault(handle, deadlines[handle] - since_1970)

    def over(self) -> list[int]:
        """Return the handles whose deadline has passed."""
        return [handle for handle, until in self._until.items() if until <= self._clock.now()]

    def forget(self, handle: int) -> None:
        """Forget a handle that is dropped."""
        self._until.pop(handle, None)

    def keepers(self, handle: int, version: str) -> set[int]:
        """Return the clients that keep a version after its deadline: it is in their base weights, and they hold it, or
        have not said yet what they hold. Without it they cannot serve any other adapter, nor the base model."""
        holders, unknown = self._holds.by_client(handle), self._holds.is_unknown
        return {client for client in self._merged_in(version) if client in holders or unknown(client)}
