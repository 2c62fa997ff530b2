"""Where every block of every adapter lies, so that a step finds all of its own at once.

Shapes: S segments, P places (one per adapter), E experts of a site. An entry is the block's row of the block
table and its first tile in that row's pages; ABSENT where there is nothing to read: an adapter that is not here, a
layer that is not loaded, an expert of another shard.
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
NOBODY = 0  # a place where nothing is ever put


class Directory:
    """Thread-safe; `lock` is held for moments only. The last of each array is spare: it stands for all beyond."""

    def __init__(self, spec: ModelSpec) -> None:
        self.lock = threading.Lock()
        self._spec = spec
        self._place_of = np.full(1, NOBODY, np.int64)  # by handle: they count up from 1
        self._entries_PE2 = {site: self.absent(site)[None] for site in spec.sites()}
        self._free: list[int] = []
        self._num_places = 1

    def absent(self, site: Site) -> Ints:
        """[E, 2], for `put`: nothing at any expert."""
        return np.full((self._spec.experts_at(site), 2), ABSENT, np.int32)

    def allocate(self, handle: int) -> int:
        """An empty place, which is this handle's from now on."""
        with self.lock:
            if not self._free:
                self._free.append(self._num_places)
                self._num_places += 1
            self._place_of = _reaching(self._place_of, handle, NOBODY)
            self._place_of[handle] = self._free.pop()
            return int(self._place_of[handle])

    def hide(self, handle: int) -> None:
        """The handle has no place any more; what is there stays."""
        with self.lock:
            self._place_of[handle] = NOBODY

    def deallocate(self, place: int) -> None:
        """Empty a place that no handle has, and give it back."""
        with self.lock:
            for entries_PE2 in self._entries_PE2.values():
                entries_PE2[place : place + 1] = ABSENT  # a slice: it may have got nothing at this site
            self._free.append(place)

    def put(self, place: int, entries: Mapping[Site, Ints]) -> None:
        """What a place has at some sites, each [E, 2]; whoever gathers sees all of it or nothing."""
        with self.lock:
            for site, entries_E2 in entries.items():
                self._entries_PE2[site] = _reaching(self._entries_PE2[site], place, ABSENT)
                self._entries_PE2[site][place] = entries_E2

    def gather(self, site: Site, handle_S: Ints, expert_S: Ints) -> Ints:
        """[S, 2]: the entry of each. The caller holds `lock`, to ask why one is ABSENT before that changes."""
        entries_PE2 = self._entries_PE2[site]
        place_S = self._place_of.take(handle_S, mode="clip")
        found_S2: Ints = entries_PE2.reshape(-1, 2).take(place_S * entries_PE2.shape[1] + expert_S, axis=0, mode="clip")
        return found_S2


def _reaching(array: npt.NDArray[Any], index: int, fill: int) -> npt.NDArray[Any]:
    """The array, or a copy of twice the length, with a spare after `index`."""
    if index + 1 < len(array):
        return array
    longer = np.full((max(index + 2, 2 * len(array)), *array.shape[1:]), fill, array.dtype)
    longer[: len(array)] = array
    return longer
