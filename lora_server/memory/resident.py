"""Weights in pages that a shard's own kernel reads: it finds them in a directory on its GPU, and pins no step."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from typing_extensions import override

from kernels_cuda.layout import GROUP
from lora_server.device.host.directory import DeviceDirectory
from lora_server.device.host.kernel import ServeKernel
from lora_server.memory.directory import Ints
from lora_server.memory.manifest import Blocks
from lora_server.memory.paged import DirectoryMirror, PagedTier
from lora_server.memory.pages import PagePool
from lora_server.placement import Placement
from lora_server.spec import PROJECTIONS, Site


class KernelDirectory(DirectoryMirror):
    """The directory of a serving kernel. It holds the entries of this shard's experts alone."""

    def __init__(self, kernel: ServeKernel, placement: Placement, shard: int) -> None:
        layers = placement.spec.layers
        self._kernel, self._placement, self._shard = kernel, placement, shard
        self._foreign = frozenset(range(layers)) - set(placement.layers(shard))
        self._on_device = DeviceDirectory(kernel, layers)

    @override
    def know(self, handle: int) -> None:
        self._on_device.know(handle, self._foreign)

    @override
    def forget(self, handle: int) -> None:
        self._on_device.forget(handle)

    @override
    def take_uses(self) -> list[int]:
        return self._on_device.take_uses()

    @override
    def prepare(self, blocks: Blocks) -> None:
        ranks = [GROUP * placed.shape.groups for experts in blocks.values() for placed in experts.values()]
        self._kernel.reserve_rank(max(ranks, default=0))

    @override
    def put(self, handle: int, layer: int, entries: Mapping[Site, Ints]) -> None:
        own = {site: self._placement.experts(site, self._shard) for site in entries}
        fields = {
            PROJECTIONS.index(site.projection): (own[site], found[own[site].start : own[site].stop])
            for site, found in entries.items()
        }
        self._on_device.put(handle, layer, fields)

    @override
    def withdraw(self, handle: int) -> None:
        self._on_device.take_back(handle, self._foreign)


def resident_tier(
    placement: Placement, shard: int, dtype: torch.dtype, pool: PagePool, kernel: ServeKernel
) -> PagedTier:
    """Make a tier with blocks that the kernel finds by itself. Raises ConfigError for a dtype that it does not have."""
    tier = PagedTier(placement, shard, dtype, pool, KernelDirectory(kernel, placement, shard))
    kernel.arguments.point("blocks", tier.rows.table.tensor)
    return tier
