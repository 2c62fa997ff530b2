"""Residency of adapters: which layers each shard has in which tier, as shards report it."""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from lora_server.placement import Layout, Placement
from lora_server.wire import lora_server_pb2 as pb


@dataclass
class ResidencyRow:
    """One adapter, by shard: layers that are READY, layers in the host pool; shards that opened its files, that are
    loading it, that lack its files on disk; why some failed."""

    layers: dict[int, int] = field(default_factory=dict)
    host_layers: dict[int, int] = field(default_factory=dict)
    known: set[int] = field(default_factory=set)
    loading: set[int] = field(default_factory=set)
    remote: set[int] = field(default_factory=set)
    errors: dict[int, str] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)  # until it is loaded; infinity: unknown
    failures: dict[int, str] = field(default_factory=dict)  # of the last load; empty: it did not fail

    def report(self, shard: int, one: pb.Residency) -> None:
        """Replace what a shard has of it."""
        self.layers[shard], self.host_layers[shard] = one.layers, one.host_layers
        (self.remote.add if one.remote else self.remote.discard)(shard)
        (self.loading.add if one.coming else self.loading.discard)(shard)
        self.seconds[shard] = one.expected_us * 1e-6 if one.HasField("expected_us") else math.inf
        self.failures[shard] = one.error

    def forget(self, shard: int) -> None:
        """Remove everything that a shard reported."""
        for by_shard in (self.layers, self.host_layers, self.errors, self.seconds, self.failures):
            by_shard.pop(shard, None)
        for shards in (self.known, self.loading, self.remote):
            shards.discard(shard)


_UNKNOWN = ResidencyRow()  # of an adapter that no shard has reported


class CountedLayers:
    """The layers that make an adapter complete: those of every shard that counts, `by_shard`."""

    def __init__(self, layout: Layout, by_shard: Mapping[int, int]) -> None:
        self._layout, self.by_shard = layout, by_shard
        owning = [shard for shard, layers in by_shard.items() if layers]
        stages = ([one for one in owning if layout.stage(one) == stage] for stage in range(layout.pp))
        self._owning = [stage for stage in stages if stage]
        self._all = self.on_all(by_shard)

    def without(self, idle: Collection[int]) -> CountedLayers:
        """Return them where these shards do not count."""
        counted = {shard: layers for shard, layers in self.by_shard.items() if shard not in idle}
        return CountedLayers(self._layout, counted)

    def on_all(self, layers: Mapping[int, int]) -> int:
        """Return how many layers all shards of their stage have."""
        return sum(min(layers.get(shard, 0) for shard in shards) for shards in self._owning)

    def is_complete(self, layers: Mapping[int, int]) -> bool:
        """Return whether every layer is there."""
        return self.on_all(layers) == self._all


class ResidencyTable:
    """The shards' latest reports, by handle. Thread-safe; its lock is a leaf."""

    def __init__(self, placement: Placement) -> None:
        self._layout, self.num_shards = placement.layout, placement.layout.num_shards
        owned = {shard: len(placement.layers(shard)) for shard in range(self.num_shards)}
        self._owned = self._counted = CountedLayers(placement.layout, owned)
        self._rows: dict[int, ResidencyRow] = {}
        self._lock = threading.RLock()

    def set_idle(self, shards: Collection[int]) -> None:
        """Forget what these have: an adapter is complete without them."""
        with self._lock:
            for shard in shards:
                self.forget_shard(shard)
            self._counted = self._owned.without(shards)

    def report(self, shard: int, one: pb.Residency) -> None:
        """Replace what a shard has of an adapter."""
        with self._lock:
            self._rows.setdefault(one.handle, ResidencyRow()).report(shard, one)

    def opened(self, handle: int, shard: int, error: str = "") -> None:
        """Note that a shard opened an adapter's files, or why it could not."""
        with self._lock:
            found = self._rows.setdefault(handle, ResidencyRow())
            if error:
                found.errors[shard] = error
            else:
                found.known.add(shard)
                found.errors.pop(shard, None)

    def forget(self, handle: int) -> None:
        """Remove an adapter."""
        with self._lock:
            self._rows.pop(handle, None)

    def forget_shard(self, shard: int) -> None:
        """Remove everything that a shard reported; its next report starts from nothing."""
        with self._lock:
            for row in self._rows.values():
                row.forget(shard)

    def error(self, handle: int, last_load: bool = False) -> str:
        """Return why an adapter cannot be used, empty if it can.

        `last_load`: also why its last load failed; the next may succeed.
        """
        with self._lock:
            found = self._rows.get(handle, _UNKNOWN)
            failures = found.failures.values() if last_load else ()
            return next(filter(None, [*found.errors.values(), *failures]), "")

    def seconds_left(self, handle: int) -> float:
        """Return how long the slowest shard still loads an adapter: 0 if it is loaded, infinity if that is unknown."""
        with self._lock:
            found = self._rows.get(handle, _UNKNOWN)
            lacking = [shard for shard, owned in self._counted.by_shard.items() if found.layers.get(shard, 0) < owned]
            return max((found.seconds.get(shard, math.inf) for shard in lacking), default=0.0)

    def is_remote(self, handle: int) -> bool:
        """Return whether a shard's node lacks the adapter's files."""
        with self._lock:
            return bool(self._rows.get(handle, _UNKNOWN).remote)

    def is_behind(self, shard: int, handles: Iterable[int]) -> bool:
        """Return whether a shard lacks layers of one of these that a twin has completely."""
        layers, others = (
            self._owned.by_shard[shard],
            [one for one in self._layout.twins(shard) if one != shard],
        )
        with self._lock:
            ready = [self._rows.get(handle, _UNKNOWN).layers for handle in handles]
            return any(
                one.get(shard, 0) < layers and any(one.get(other, 0) == layers for other in others) for one in ready
            )

    def on(self, handle: int, shard: int) -> tuple[bool, bool]:
        """Return whether a shard has layers of an adapter, and whether it is loading it."""
        with self._lock:
            found = self._rows.get(handle, _UNKNOWN)
            return bool(found.layers.get(shard)), shard in found.loading

    def by_shard(self, handle: int) -> list[tuple[int, int, int, int, bool]]:
        """Return, by shard: its number, layers that are READY, in the host pool, owned; whether its disk has none."""
        with self._lock:
            found = self._rows.get(handle, _UNKNOWN)
            ready, host = found.layers, found.host_layers
            return [
                (one, ready.get(one, 0), host.get(one, 0), layers, one in found.remote)
                for one, layers in self._owned.by_shard.items()
            ]

    def lacking(self, handle: int) -> list[int]:
        """Return the shards that do not have all their layers of an adapter READY."""
        return [shard for shard, ready, _, owned, _ in self.by_shard(handle) if ready < owned]

    def num_layers(self, handle: int) -> int:
        """Return how many layers all their shards have READY."""
        with self._lock:
            return self._counted.on_all(self._rows.get(handle, _UNKNOWN).layers)

    def state(self, handle: int, prewarmed: bool = False) -> str:
        """Return the lowest tier in which all of an adapter is, in one word; `prewarmed`: shards were told to load
        it."""
        with self._lock:
            found = self._rows.get(handle, _UNKNOWN)
            if found.errors:
                return "failed"
            if self._counted.is_complete(found.layers):
                return "ready"
            if prewarmed or found.loading or not found.known >= self._counted.by_shard.keys():
                return "loading"
            device, host = found.layers, found.host_layers
            if self._counted.is_complete({shard: max(device.get(shard, 0), host[shard]) for shard in host}):
                return "host"
            return "remote" if found.remote else "disk"
