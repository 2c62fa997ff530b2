"""What each shard has of each adapter. Not thread-safe: `adapters` calls it under its lock."""

from __future__ import annotations

from dataclasses import dataclass, field

from lora_server.placement import Placement


@dataclass
class Resident:
    """One adapter: layers that each shard has ready, the shards that have all of theirs, why others failed."""

    layers: dict[int, int] = field(default_factory=dict)
    loaded: set[int] = field(default_factory=set)
    errors: dict[int, str] = field(default_factory=dict)

    @property
    def error(self) -> str:
        """Why it cannot be used; empty if it can."""
        return next(iter(self.errors.values()), "")


class Residency:
    """By handle."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
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
            resident.loaded.discard(shard)
            resident.errors.pop(shard, None)

    def by_shard(self, handle: int) -> list[tuple[int, int, int]]:
        """(shard, layers that it has ready, layers that it owns)."""
        ready, placement = self.of(handle).layers, self._placement
        shards = range(placement.layout.num_shards)
        return [(shard, ready.get(shard, 0), len(placement.layers(shard))) for shard in shards]

    def num_layers(self, handle: int) -> int:
        """Layers that all their shards have."""
        layout, resident, total = self._placement.layout, self.of(handle), 0
        for stage in range(layout.pp):
            owning = [shard for shard in layout.stage_shards(stage) if self._placement.layers(shard)]
            total += min((resident.layers.get(shard, 0) for shard in owning), default=0)
        return total

    def state(self, handle: int) -> str:
        """In one word."""
        resident = self.of(handle)
        if resident.error:
            return "failed"
        return "ready" if len(resident.loaded) == self._placement.layout.num_shards else "loading"
