"""Weights in pages that a shard's own kernel reads, by a directory on its GPU: no host is asked, and no step pinned."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from typing_extensions import override

from kernels_cuda.layout import GROUP
from lora_server.memory.directory import Ints
from lora_server.memory.manifest import Manifest
from lora_server.memory.paged import PagedTier
from lora_server.memory.pages import PagePool
from lora_server.memory.pools import Extent
from lora_server.placement import Placement
from lora_server.spec import PROJECTIONS, Site
from lora_server.transport.gpu.directory import DeviceDirectory
from lora_server.transport.gpu.kernel import ServeKernel


class ResidentTier(PagedTier):
    """See PagedTier. `withdraw` returns when no step reads what it withdraws."""

    def __init__(
        self, placement: Placement, shard: int, dtype: torch.dtype, pool: PagePool, kernel: ServeKernel
    ) -> None:
        super().__init__(placement, shard, dtype, pool)
        layers = placement.spec.layers
        self._kernel, self._foreign = kernel, frozenset(range(layers)) - set(placement.layers(shard))
        kernel.read_blocks(self.table.tensor)
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
    def publish(self, handle: int, layer: int, extent: Extent, manifest: Manifest) -> None:
        ranks = [
            GROUP * placed.shape.groups for blocks in manifest.blocks(layer).values() for placed in blocks.values()
        ]
        self._kernel.reserve_rank(max(ranks, default=0))
        super().publish(handle, layer, extent, manifest)

    @override
    def _tell(self, handle: int, layer: int, place: int, entries: Mapping[Site, Ints]) -> None:
        super()._tell(handle, layer, place, entries)
        own = {site: self._placement.experts(site, self._shard) for site in entries}
        fields = {
            PROJECTIONS.index(site.projection): (own[site], found[own[site].start : own[site].stop])
            for site, found in entries.items()
        }
        self._on_device.put(handle, layer, fields)

    @override
    def withdraw(self, handle: int) -> object:
        """Called again for what is gone already, it has nothing to wait for."""
        if handle in self._published:
            self._on_device.take_back(handle, self._foreign)
        return super().withdraw(handle)
