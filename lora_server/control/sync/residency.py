"""Residency of adapters: which layers each shard has in which tier, as shards report it."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Collection, Iterable
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from lora_server.placement import Layout, Placement
from lora_server.wire import lora_server_pb2 as pb

Layers: TypeAlias = "npt.NDArray[np.int32]"  # by shard


class ResidencyRow:
    """One adapter, in arrays by shard: layers that are READY, layers in the host pool; shards that opened its files,
    that are loading it, that lack its files on disk; and by shard why some failed."""

    __slots__ = ("errors", "failures", "host_layers", "known", "layers", "loading", "remote", "seconds")

    def __init__(self, num_shards: int) -> None:
        self.layers, self.host_layers = np.zeros(num_shards, np.int32), np.zeros(num_shards, np.int32)
        self.known, self.loading, self.remote = (np.zeros(num_shards, np.bool_) for _ in range(3))
        self.seconds = np.full(num_shards, math.inf)  # until it is loaded; infinity: unknown
        self.errors: dict[int, str] = {}
        self.failures: dict[int, str] = {}  # of the last load

    def report(self, shard: int, one: pb.Residency) -> None:
        """Replace what a shard has of it."""
        self.layers[shard], self.host_layers[shard] = one.layers, one.host_layers
        self.remote[shard], self.loading[shard] = one.remote, one.coming
        self.seconds[shard] = one.expected_us * 1e-6 if one.HasField("expected_us") else math.inf
        self.failures.pop(shard, None)
        if one.error:
            self.failures[shard] = one.error

    def forget(self, shard: int) -> None:
        """Remove everything that a shard reported."""
        self.layers[shard] = self.host_layers[shard] = 0
        self.known[shard] = self.remote[shard] = self.loading[shard] = False
        self.seconds[shard] = math.inf
        self.errors.pop(shard, None)
        self.failures.pop(shard, None)


class CountedLayers:
    """The layers that make an adapter complete: those of every shard that `counts`. `owned`: layers by shard."""

    def __init__(self, layout: Layout, owned: Layers, idle: Collection[int] = ()) -> None:
        self._layout, self.owned = layout, owned
        self.counts = np.ones(len(owned), np.bool_)
        self.counts[list(idle)] = False
        owning = np.flatnonzero(self.counts & (owned > 0))
        stages = np.array([layout.stage(int(shard)) for shard in owning], np.intp)
        self._by_stage = owning[np.argsort(stages, kind="stable")]
        self._starts = np.unique(np.sort(stages), return_index=True)[1]  # of each stage's part of that
        self._all = self.on_all(owned)

    def without(self, idle: Collection[int]) -> CountedLayers:
        """Return them where these shards do not count, and all others do."""
        return CountedLayers(self._layout, self.owned, idle)

    def on_all(self, layers: Layers) -> int:
        """Return how many layers all shards of their stage have."""
        if not len(self._by_stage):
            return 0
        return int(np.minimum.reduceat(layers[self._by_stage], self._starts).sum())

    def is_complete(self, layers: Layers) -> bool:
        """Return whether every layer is there."""
        return self.on_all(layers) == self._all

    def have_opened(self, known: npt.NDArray[np.bool_]) -> bool:
        """Return whether all shards that count have opened an adapter's files."""
        return bool((known | ~self.counts).all())

    def lacking(self, layers: Layers) -> npt.NDArray[np.bool_]:
        """Return the shards that count and lack layers, as a mask."""
        return self.counts & (layers < self.owned)


class FilesState(NamedTuple):
    """`opened`: all shards have looked at an adapter's files, if their nodes have them; `remote`: one has not."""

    opened: bool
    remote: bool


class ResidencyTable:
    """The shards' latest reports, by handle. Thread-safe; its lock is a leaf.

    An adapter has a row once a shard has reported it. A question about all shards is one operation on an array.
    """

    def __init__(self, placement: Placement) -> None:
        self._layout, self.num_shards = placement.layout, placement.layout.num_shards
        owned = np.array([len(placement.layers(shard)) for shard in range(self.num_shards)], np.int32)
        self._owned, self._counted = owned, CountedLayers(placement.layout, owned)
        self._unknown = ResidencyRow(self.num_shards)  # of an adapter that no shard has reported
        self._rows = defaultdict[int, ResidencyRow](partial(ResidencyRow, self.num_shards))
        self._lock = threading.RLock()

    def set_idle(self, shards: Collection[int]) -> None:
        """Forget what these have: an adapter is complete without them."""
        with self._lock:
            for shard in shards:
                self.forget_shard(shard)
            self._counted = self._counted.without(shards)

    def report(self, shard: int, one: pb.Residency) -> None:
        """Replace what a shard has of an adapter."""
        with self._lock:
            self._rows[one.handle].report(shard, one)

    def opened(self, handle: int, shard: int, error: str = "") -> None:
        """Note that a shard opened an adapter's files, or why it could not."""
        with self._lock:
            found = self._rows[handle]
            if error:
                found.errors[shard] = error
            else:
                found.known[shard] = True
                found.errors.pop(shard, None)

    def forget(self, handle: int) -> None:
        """Remove an adapter."""
        with self._lock:
            self._rows.pop(handle, None)

    def forget_shard(self, shard: int) -> None:
        """Remove everything that a shard reported; its next report starts from nothing."""
        with self._lock:
            for one in self._rows.values():
                one.forget(shard)

    def error(self, handle: int, last_load: bool = False) -> str:
        """Return why an adapter cannot be used, empty if it can.

        `last_load`: also why its last load failed; the next may succeed.
        """
        with self._lock:
            found = self._rows.get(handle, self._unknown)
            return next(iter([*found.errors.values(), *(found.failures.values() if last_load else ())]), "")

    def seconds_left(self, handle: int) -> float:
        """Return how long the slowest shard still loads an adapter: 0 if it is loaded, infinity if that is unknown."""
        with self._lock:
            found = self._rows.get(handle, self._unknown)
            return float(found.seconds[self._counted.lacking(found.layers)].max(initial=0.0))

    def files(self, handle: int) -> FilesState:
        """Return how far shards have come with an adapter's files."""
        with self._lock:
            found = self._rows.get(handle, self._unknown)
            return FilesState(self._counted.have_opened(found.known), bool(found.remote.any()))

    def is_behind(self, shard: int, handles: Iterable[int]) -> bool:
        """Return whether a shard lacks layers of one of these that a twin has completely."""
        layers, others = self._owned[shard], [one for one in self._layout.twins(shard) if one != shard]
        with self._lock:
            ready = [self._rows.get(handle, self._unknown).layers for handle in handles]
            return any(one[shard] < layers and (one[others] == layers).any() for one in ready)

    def on(self, handle: int, shard: int) -> tuple[bool, bool, bool]:
        """Return whether a shard has layers of an adapter, whether it has all, and whether it is loading it."""
        with self._lock:
            found = self._rows.get(handle, self._unknown)
            layers = found.layers[shard]
            return bool(layers), bool(layers >= self._owned[shard]), bool(found.loading[shard])

    def by_shard(self, handle: int) -> list[tuple[int, int, int, int, bool]]:
        """Return, by shard: its number, layers that are READY, in the host pool, owned; whether its disk has none."""
        with self._lock:
            found = self._rows.get(handle, self._unknown)
            columns = found.layers, found.host_layers, self._owned, found.remote
            return list(zip(range(self.num_shards), *(column.tolist() for column in columns), strict=True))

    def lacking(self, handle: int) -> list[int]:
        """Return the shards that do not have all their layers of an adapter READY."""
        with self._lock:
            return [int(shard) for shard in np.flatnonzero(self._rows.get(handle, self._unknown).layers < self._owned)]

    def num_layers(self, handle: int) -> int:
        """Return how many layers all their shards have READY."""
        with self._lock:
            return self._counted.on_all(self._rows.get(handle, self._unknown).layers)

    def state(self, handle: int, prewarmed: bool = False) -> str:
        """Return the lowest tier in which all of an adapter is, in one word; `prewarmed`: shards were told to load
        it."""
        with self._lock:
            found = self._rows.get(handle, self._unknown)
            if found.errors:
                return "failed"
            if self._counted.is_complete(found.layers):
                return "ready"
            if prewarmed or found.loading.any() or not self._counted.have_opened(found.known):
                return "loading"
            if self._counted.is_complete(np.maximum(found.layers, found.host_layers)):
                return "host"
            return "remote" if found.remote.any() else "disk"
