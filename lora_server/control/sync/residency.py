"""Residency of adapters: which layers each shard has in which tier, as shards report it."""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from lora_server.placement import Placement
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


class ResidencyTable:
    """The shards' latest reports, by handle. Thread-safe; its lock is a leaf."""

    def __init__(self, placement: Placement) -> None:
        self._placement, layout = placement, placement.layout
        self.num_shards = layout.num_shards
        self._layers = {shard: len(placement.layers(shard)) for shard in range(layout.num_shards)}
        self._owned: dict[int, int] = {}  # of these, the shards that count
        self._owning: list[list[int]] = []  # that own any, by stage
        self._all = 0
        self._adapters: dict[int, ResidencyRow] = {}
        self._lock = threading.RLock()
        self.set_idle(())

    def set_idle(self, shards: Collection[int]) -> None:
        """Forget what these have: an adapter is complete without them."""
        layout = self._placement.layout
        with self._lock:
            for shard in shards:
                self.forget_shard(shard)
            self._owned = {shard: layers for shard, layers in self._layers.items() if shard not in shards}
            owning = [shard for shard, layers in self._owned.items() if layers]
            stages = ([one for one in owning if layout.stage(one) == stage] for stage in range(layout.pp))
            self._owning = [stage for stage in stages if stage]
            self._all = sum(min(map(self._owned.__getitem__, stage)) for stage in self._owning)

    def report(self, shard: int, one: pb.Residency) -> None:
        """Replace what a shard has of an adapter."""
        with self._lock:
            found = self._adapters.setdefault(one.handle, ResidencyRow())
            found.layers[shard], found.host_layers[shard] = one.layers, one.host_layers
            (found.remote.add if one.remote else found.remote.discard)(shard)
            (found.loading.add if one.coming else found.loading.discard)(shard)
            found.seconds[shard] = one.expected_us * 1e-6 if one.HasField("expected_us") else math.inf
            found.failures[shard] = one.error

    def opened(self, handle: int, shard: int, error: str = "") -> None:
        """Note that a shard opened an adapter's files, or why it could not."""
        with self._lock:
            found = self._adapters.setdefault(handle, ResidencyRow())
            if error:
                found.errors[shard] = error
            else:
                found.known.add(shard)
                found.errors.pop(shard, None)

    def forget(self, handle: int) -> None:
        """Remove an adapter."""
        with self._lock:
            self._adapters.pop(handle, None)

    def forget_shard(self, shard: int) -> None:
        """Remove everything that a shard reported; its next report starts from nothing."""
        with self._lock:
            for one in self._adapters.values():
                for by_shard in (one.layers, one.host_layers, one.errors, one.seconds, one.failures):
                    by_shard.pop(shard, None)
                for shards in (one.known, one.loading, one.remote):
                    shards.discard(shard)

    def error(self, handle: int, last_load: bool = False) -> str:
        """Return why an adapter cannot be used, empty if it can.

        `last_load`: also why its last load failed; the next may succeed.
        """
        with self._lock:
            found = self._of(handle)
            failures = found.failures.values() if last_load else ()
            return next(filter(None, [*found.errors.values(), *failures]), "")

    def seconds_left(self, handle: int) -> float:
        """Return how long the slowest shard still loads an adapter: 0 if it is loaded, infinity if that is unknown."""
        with self._lock:
            found = self._of(handle)
            lacking = [shard for shard, owned in self._owned.items() if found.layers.get(shard, 0) < owned]
            return max((found.seconds.get(shard, math.inf) for shard in lacking), default=0.0)

    def is_remote(self, handle: int) -> bool:
        """Return whether a shard's node lacks the adapter's files."""
        with self._lock:
            return bool(self._of(handle).remote)

    def is_behind(self, shard: int, handles: Iterable[int]) -> bool:
        """Return whether a shard lacks layers of one of these that a twin has completely."""
        layers, others = self._layers[shard], [one for one in self._placement.layout.twins(shard) if one != shard]
        with self._lock:
            ready = [self._of(handle).layers for handle in handles]
            return any(
                one.get(shard, 0) < layers and any(one.get(other, 0) == layers for other in others) for one in ready
            )

    def on(self, handle: int, shard: int) -> tuple[bool, bool]:
        """Return whether a shard has layers of an adapter, and whether it is loading it."""
        with self._lock:
            found = self._of(handle)
            return bool(found.layers.get(shard)), shard in found.loading

    def by_shard(self, handle: int) -> list[tuple[int, int, int, int, bool]]:
        """Return, by shard: its number, layers that are READY, in the host pool, owned; whether its disk has none."""
        with self._lock:
            found = self._of(handle)
            ready, host = found.layers, found.host_layers
            return [
                (one, ready.get(one, 0), host.get(one, 0), layers, one in found.remote)
                for one, layers in self._layers.items()
            ]

    def lacking(self, handle: int) -> list[int]:
        """Return the shards that do not have all their layers of an adapter READY."""
        return [shard for shard, ready, _, owned, _ in self.by_shard(handle) if ready < owned]

    def num_layers(self, handle: int) -> int:
        """Return how many layers all their shards have READY."""
        with self._lock:
            return self._on_all(self._of(handle).layers)

    def state(self, handle: int, prewarmed: bool = False) -> str:
        """Return the lowest tier in which all of an adapter is, in one word; `prewarmed`: shards were told to load
        it."""
        with self._lock:
            found = self._of(handle)
            if found.errors:
                return "failed"
            if self._on_all(found.layers) == self._all:
                return "ready"
            if prewarmed or found.loading or not found.known >= self._owned.keys():
                return "loading"
            device, host = found.layers, found.host_layers
            if self._on_all({shard: max(device.get(shard, 0), host[shard]) for shard in host}) == self._all:
                return "host"
            return "remote" if found.remote else "disk"

    def _of(self, handle: int) -> ResidencyRow:
        return self._adapters.get(handle) or ResidencyRow()

    def _on_all(self, layers: Mapping[int, int]) -> int:
        return sum(min(layers.get(shard, 0) for shard in shards) for shards in self._owning)
