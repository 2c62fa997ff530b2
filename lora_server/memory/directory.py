"""Where every block of every adapter lies, so that a step finds all of its own at once.

Shapes: S segments, P places (one per adapter, from 0), E experts of a site. An entry is the block's row of
the block table and its first tile in that row's pages; ABSENT where there is nothing to read: nobody's place, a
layer that is not loaded, an expert of another shard.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from lora_server.spec import ModelSpec, Site

Ints = npt.NDArray[np.int32]
ABSENT = -1
NOBODY = 0  # a place without blocks


class Directory:
    """Thread-safe; `lock` is held for moments only."""

    def __init__(self, spec: ModelSpec) -> None:
        self.lock = threading.Lock()
        self._spec = spec
        self._entries_PE2 = {site: self.absent(site)[None] for site in spec.sites()}
        self._free: list[int] = []
        self._num_places = 1

    def absent(self, site: Site) -> Ints:
        """[E, 2], for `put`: nothing at any expert."""
        return np.full((self._spec.experts_at(site), 2), ABSENT, np.int32)

    def allocate(self) -> int:
        """An empty place."""
        with self.lock:
            if self._free:
                return self._free.pop()
            self._num_places += 1
            return self._num_places - 1

    def deallocate(self, place: int) -> None:
        """Empty a place, and give it back."""
        with self.lock:
            for entries_PE2 in self._entries_PE2.values():
                entries_PE2[place : place + 1] = ABSENT  # a slice: it may have got nothing at this site
            self._free.append(place)

    def put(self, place: int, entries: Mapping[Site, Ints]) -> None:
        """What a place has at some sites, each [E, 2]; whoever gathers sees all of it or nothing."""
        with self.lock:
            for site, entries_E2 in entries.items():
                if place >= len(self._entries_PE2[site]):
                    self._grow(site, place)
                self._entries_PE2[site][place] = entries_E2

    def _grow(self, site: Site, place: int) -> None:
        old_PE2 = self._entries_PE2[site]
        new_PE2 = np.full((max(place + 1, 2 * len(old_PE2)), *old_PE2.shape[1:]), ABSENT, np.int32)
        new_PE2[: len(old_PE2)] = old_PE2
        self._entries_PE2[site] = new_PE2

    def gather(self, site: Site, place_S: npt.NDArray[np.int64], expert_S: Ints) -> Ints:
        """[S, 2]: the entry of each (place, expert). The caller holds `lock`, and may ask why while nothing changes."""
        entries_PE2 = self._entries_PE2[site]
        known_S = np.where(place_S < len(entries_PE2), place_S, NOBODY)
        found_S2: Ints = entries_PE2.reshape(-1, 2).take(known_S * entries_PE2.shape[1] + expert_S, axis=0)
        return found_S2
