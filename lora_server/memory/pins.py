"""Adapters that steps read now, and those that were used lately."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection
from typing import NamedTuple

MOST_USES = 10_000  # sets of adapters that are counted until they are taken


class PinnedUses(NamedTuple):
    """How many steps pinned the same adapters, and when the last of them did."""

    handles: frozenset[int]
    last: float  # time.monotonic()
    uses: int


class Pins:
    """One pin for all adapters of a step, in constant time. The store's lock guards it.

    `none` is set while there is no pin.
    """

    def __init__(self) -> None:
        self._handles: dict[int, frozenset[int]] = {}
        self.none = threading.Event()
        self.none.set()
        self._tokens = itertools.count(1)
        self._uses: dict[frozenset[int], tuple[float, int]] = {}

    def add(self, handles: Collection[int], now: float) -> int:
        """Add a pin; returns its token for `remove`."""
        token, distinct = next(self._tokens), frozenset(handles)
        self._handles[token] = distinct
        if (earlier := self._uses.get(distinct)) is not None:
            self._uses[distinct] = now, earlier[1] + 1
        elif len(self._uses) < MOST_USES:
            self._uses[distinct] = now, 1
        self.none.clear()
        return token

    def remove(self, token: int) -> None:
        """Remove a pin."""
        del self._handles[token]
        if not self._handles:
            self.none.set()

    def __contains__(self, handle: int) -> bool:
        return any(handle in handles for handles in self._handles.values())

    def take_uses(self) -> list[PinnedUses]:
        """Return the uses since the last call: one entry for all steps of the same adapters."""
        taken, self._uses = self._uses, {}
        return [PinnedUses(handles, last, uses) for handles, (last, uses) in taken.items()]
