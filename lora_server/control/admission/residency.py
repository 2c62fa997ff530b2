"""What each shard has of each adapter. Not thread-safe: `adapters` calls it under its lock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lora_server.placement import Placement


@dataclass
class Resident:
    """One adapter, by shard: layers that are ready, layers in the host pool; who looked at it, who is bringing it in,
    whose disk does not have its files; why some failed."""

    layers: dict[int, int] = field(default_factory=dict)
    host_layers: dict[int, int] = field(default_factory=dict)
    known: set[int] = field(default_factory=set)
    coming: set[int] = field(default_factory=set)
    remote: set[int] = field(default_factory=set)
    errors: dict[int, str] = field(default_factory=dict)

    @property
    def error(self) -> str:
        """Why it cannot be used; empty if it can."""
        return next(iter(self.errors.values()), "")


class Residency:
    """By handle."""

    def __init__(self, placement: Placement) -> None:
        self._placement, layout = placement, placement.layout
        stages = ([one for one in layout.stage_shards(stage) if placement.layers(one)] for stage in range(layout.pp))
        self.num_shards = layout.num_shards
        self._owning = [shards for shards in stages if shards]
        self._all = sum(min(len(placement.layers(shard)) for shard in shards) for shards in self._owning)
        self._resident: dict[int, Resident] = {}

    def of(self, handle: int) -> Resident:
        """Where it stands; to be changed in place."""
        return self._resident.setdefault(handle, Resident())

    def forget(self, handle: int) -> None:
        """The adapter is gone."""
        self._resident.pop(handle, None)

    def forget_shard(self, shard: int) -> None:
        """A shard came anew: it has what it says, and nothing else."""
        for resident in self._resident.values():
            resident.layers.pop(shard, None)
            resident.host_layers.pop(shard, None)
            resident.known.discard(shard)
            resident.coming.discard(shard)
            resident.remote.discard(shard)
            resident.errors.pop(shard, None)

    def by_shard(self, handle: int) -> list[tuple[int, int, int, int, bool]]:
        """(shard, layers that it has ready, that it has in the host pool, that it owns; whether its disk has none)."""
        resident, placement = self.of(handle), self._placement
        ready, host = resident.layers, resident.host_layers
        shards = range(placement.layout.num_shards)
        return [
            (one, ready.get(one, 0), host.get(one, 0), len(placement.layers(one)), one in resident.remote)
            for one in shards
        ]

    def lacking(self, handle: int) -> list[int]:
        """Shards that do not have all of it."""
        return [shard for shard, ready, _, owned, _ in self.by_shard(handle) if ready < owned]

    def num_layers(self, handle: int) -> int:
        """Layers that all their shards have READY."""
        return self._on_all(self.of(handle).layers)

    def state(self, handle: int, brought: bool = False) -> str:
        """In one word: where all of it is, at the least; `brought`: shards were told to bring it in."""
        resident = self.of(handle)
        if resident.error:
            return "failed"
        ready = self._on_all(resident.layers)
        if ready == self._all:
            return "ready"
        if brought or resident.coming or len(resident.known) < self.num_shards:
            return "loading"
        device, host = resident.layers, resident.host_layers
        if self._on_all({shard: max(device.get(shard, 0), host[shard]) for shard in host}) == self._all:
            return "host"
        return "remote" if resident.remote else "disk"

    def _on_all(self, layers: Mapping[int, int]) -> int:
        return sum(min(layers.get(shard, 0) for shard in shards) for shards in self._owning)
