"""EPx-PPy placement: which shard owns which (site, expert). Pure functions, leaf module.

Shard = stage * x + ep_rank. Layer l belongs to stage l mod y, so that loading one adapter uses the
links of all stages at once. The experts of a site lie in contiguous blocks over the x shards of its
stage; a dense site belongs to one of them, in turn. Everything has exactly one owner; a shard may
own nothing. Paper section 4.1, "LoRA Hybrid Parallel".

With replicas the whole set of x * y shards is there several times, one set numbered after the other. The shards at
one place of the sets are *twins*: they own the same.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from lora_server.errors import ConfigError
from lora_server.spec import ModelSpec, Site

MOST_REPLICAS = 4


@dataclass(frozen=True)
class Layout:
    """EPx-PPy: `ep` shards share the experts of a layer, `pp` stages share the layers; `replicas` times."""

    ep: int
    pp: int
    replicas: int = field(default=1, repr=False)  # not a part of the text

    def __post_init__(self) -> None:
        if self.ep < 1 or self.pp < 1 or self.replicas < 1:
            got = f"ep{self.ep}-pp{self.pp} with {self.replicas} replicas"
            raise ConfigError(f"layout: got {got}, expected all three to be at least 1")

    @classmethod
    def parse(cls, text: str, replicas: int = 1) -> Layout:
        """Return the layout of a text such as `ep2-pp4`; raises ConfigError for anything else."""
        match = re.fullmatch(r"ep(\d{1,4})-pp(\d{1,4})", text.strip().lower())
        if match is None:
            raise ConfigError(f"layout: got {text!r}, expected epX-ppY such as ep2-pp2")
        return cls(int(match[1]), int(match[2]), replicas)

    def __str__(self) -> str:
        return f"ep{self.ep}-pp{self.pp}"

    @property
    def num_shards(self) -> int:
        """Number of server processes, x * y of each replica."""
        return self.width * self.replicas

    @property
    def width(self) -> int:
        """Number of shards of one replica, x * y."""
        return self.ep * self.pp

    def twins(self, shard: int) -> range:
        """Return the shards that own what a shard owns, itself among them."""
        return range(shard % self.width, self.num_shards, self.width)

    def unserved(self, down: Collection[int]) -> list[int]:
        """Return the shards of the first replica whose twins are all among these, too."""
        return [shard for shard in range(self.width) if all(twin in down for twin in self.twins(shard))]

    def stage(self, shard: int) -> int:
        """Return the pipeline stage of a shard."""
        return shard % self.width // self.ep

    def ep_rank(self, shard: int) -> int:
        """Return a shard's place among the shards of its stage."""
        return shard % self.ep

    def stage_shards(self, layer: int) -> range:
        """Return the x shards of the first replica that a layer belongs to."""
        first = layer % self.pp * self.ep
        return range(first, first + self.ep)


def share(total: int, parts: int, index: int) -> range:
    """Return the index-th of `parts` contiguous blocks of range(total); the first total mod parts are one longer."""
    size, longer = divmod(total, parts)
    first = index * size + min(index, longer)
    return range(first, first + size + (index < longer))


@dataclass(frozen=True)
class Placement:
    """The owners of every expert and dense site, for one model in one layout.

    `generation` counts the placements of one server, from 1 on: what was told of one is not valid for another.
    """

    spec: ModelSpec
    layout: Layout
    generation: int = 1

    @cached_property
    def _dense_owner(self) -> dict[Site, int]:
        owners: dict[Site, int] = {}
        taken = [0] * self.layout.pp
        for site in self.spec.sites():
            if self.spec.is_dense(site):
                stage = site.layer % self.layout.pp
                owners[site] = stage * self.layout.ep + taken[stage] % self.layout.ep
                taken[stage] += 1
        return owners

    def experts(self, site: Site, shard: int) -> range:
        """Return the experts of `site` that `shard` owns; range(1) or range(0) at a dense site."""
        shard %= self.layout.width
        if shard not in self.layout.stage_shards(site.layer):
            return range(0)
        if self.spec.is_dense(site):
            return range(int(self._dense_owner[site] == shard))
        return share(self.spec.experts, self.layout.ep, self.layout.ep_rank(shard))

    def owners(self, site: Site, expert: int = 0) -> tuple[int, ...]:
        """Return the shards that own `expert` of `site`, one of each replica.

        Raises IndexError outside the model.
        """
        if not 0 <= expert < self.spec.experts_at(site):
            raise IndexError(f"{site}: expert {expert} of {self.spec.experts_at(site)}")
        if self.spec.is_dense(site):
            return tuple(self.layout.twins(self._dense_owner[site]))
        size, longer = divmod(self.spec.experts, self.layout.ep)
        in_longer = expert < longer * (size + 1)
        rank = expert // (size + 1) if in_longer else longer + (expert - longer * (size + 1)) // size
        return tuple(self.layout.twins(self.layout.stage_shards(site.layer)[rank]))

    def first_owners(self, site: Site) -> tuple[int, ...]:
        """Return the first owner of every expert of a site, by expert: a client sends its rows there, or to a twin."""
        return tuple(self.owners(site, expert)[0] for expert in range(self.spec.experts_at(site)))

    def sites(self, shard: int) -> Iterator[Site]:
        """Yield the sites of which a shard owns at least one expert, by layer."""
        for site in self.spec.sites():
            if self.experts(site, shard):
                yield site

    def stage_width(self, stage: int) -> int:
        """Return how many shards of a stage can own anything: at most one per expert, or per dense site."""
        sites = [site for site in self.spec.sites() if site.layer % self.layout.pp == stage]
        num_dense = sum(self.spec.is_dense(site) for site in sites)
        return max(num_dense, self.spec.experts if len(sites) > num_dense else 0)

    def layers(self, shard: int) -> tuple[int, ...]:
        """Return the layers of which a shard owns anything."""
        return tuple(sorted({site.layer for site in self.sites(shard)}))
