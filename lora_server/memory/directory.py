"""Directory of the blocks of all adapters, in which a step looks up all of its own at once.

Shapes: S segments, P places (one per adapter), E experts of a site. An entry is the block's row of the block table and
its first tile in that row's pages; ABSENT where there is nothing to read: an adapter that is not loaded, a layer that
is not READY, an expert of another shard.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from lora_server.spec import ModelSpec, Site

Ints = npt.NDArray[np.int32]
ABSENT = -1
EMPTY_PLACE = 0  # nothing is ever put there


class BlockDirectory:
    """Thread-safe; `lock` is held for moments only. The last item of each array stands for all indices beyond it."""

    def __init__(self, spec: ModelSpec) -> None:
        self.lock = threading.Lock()
        self._spec = spec
        self._place_of = np.full(1, EMPTY_PLACE, np.int64)  # by handle: they count up from 1
        self._entries_PE2 = {site: self.absent(site)[None] for site in spec.sites()}
        self._free: list[int] = []
        self._num_places = 1

    def absent(self, site: Site) -> Ints:
        """Return [E, 2] for `put`: no block at any expert."""
        return np.full((self._spec.experts_at(site), 2), ABSENT, np.int32)

    def allocate(self, handle: int) -> int:
        """Give the handle an empty place."""
        with self.lock:
            if not self._free:
                self._free.append(self._num_places)
                self._num_places += 1
            self._place_of = _reaching(self._place_of, handle, EMPTY_PLACE)
            self._place_of[handle] = self._free.pop()
            return int(self._place_of[handle])

    def hide(self, handle: int) -> None:
        """Take the handle's place away from it; the entries stay."""
        with self.lock:
            self._place_of[handle] = EMPTY_PLACE

    def deallocate(self, place: int) -> None:
        """Empty a place that no handle has, and free it."""
        with self.lock:
            for entries_PE2 in self._entries_PE2.values():
                entries_PE2[place : place + 1] = ABSENT  # a slice: the array may end before the place
            self._free.append(place)

    def put(self, place: int, entries: Mapping[Site, Ints]) -> None:
        """Put the entries of a place at some sites, each [E, 2]; `gather` sees all of them or none."""
        with self.lock:
            for site, entries_E2 in entries.items():
                self._entries_PE2[site] = _reaching(self._entries_PE2[site], place, ABSENT)
                self._entries_PE2[site][place] = entries_E2

    def gather(self, site: Site, handle_S: Ints, expert_S: Ints) -> Ints:
        """Return the entries [S, 2]. The caller holds `lock`, so that why one is ABSENT does not change meanwhile."""
        entries_PE2 = self._entries_PE2[site]
        place_S = self._place_of.take(handle_S, mode="clip")
        found_S2: Ints = entries_PE2.reshape(-1, 2).take(place_S * entries_PE2.shape[1] + expert_S, axis=0, mode="clip")
        return found_S2


def _reaching(array: npt.NDArray[Any], index: int, fill: int) -> npt.NDArray[Any]:
    """Return the array, or a copy of twice the length, with an item after `index`."""
    if index + 1 < len(array):
        return array
    longer = np.full((max(index + 2, 2 * len(array)), *array.shape[1:]), fill, array.dtype)
    longer[: len(array)] = array
    return longer
