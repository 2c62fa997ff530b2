"""Weights as matrices in host memory, for the CPU kernels."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from kernels_cuda.ops import NOTHING, Block, Segment
from lora_server.adapters import Weights
from lora_server.memory.formats import HostFormat
from lora_server.memory.manifest import Blocks, Manifest, Placed
from lora_server.memory.pools import Extent, Pool
from lora_server.memory.tier import Refusal, Tier
from lora_server.placement import Placement
from lora_server.spec import Site

Unpacked: TypeAlias = dict[tuple[Site, int], Block]


@dataclass
class _CpuWeights:
    """Blocks of dense sites are unpacked with their layer, those of experts when a step first reads them: most of these
    are read by none."""

    extent: Extent
    layers: dict[int, Blocks] = field(default_factory=dict)
    blocks: Unpacked = field(default_factory=dict)


class CpuTier(Tier):
    """Tier of `--device cpu`."""

    def __init__(self, placement: Placement, shard: int, dtype: torch.dtype, pool: Pool) -> None:
        self.pool, self.device = pool, torch.device("cpu")
        self.format: HostFormat = HostFormat(placement.spec, dtype)
        self._placement, self._shard = placement, shard
        self._published: dict[int, _CpuWeights] = {}

    @override
    def read(self, weights: Weights, site: Site, expert: int, extent: Extent, placed: Placed) -> None:
        pairs = self._unpacked(extent, placed).pairs
        weights.read_into(site, expert, [(pair.a_RK, pair.b_OR) for pair in pairs])

    @override
    def prepare(self, layer: int, extent: Extent, manifest: Manifest) -> tuple[Blocks, Unpacked]:
        blocks = manifest.blocks(layer)
        unpacked: Unpacked = {}
        for site, experts in blocks.items():
            if self._placement.spec.is_dense(site):
                unpacked |= {(site, expert): self._unpacked(extent, placed) for expert, placed in experts.items()}
        return blocks, unpacked

    @override
    def publish(self, handle: int, layer: int, extent: Extent, prepared: tuple[Blocks, Unpacked]) -> None:
        published = self._published.setdefault(handle, _CpuWeights(extent))
        published.layers[layer], unpacked = prepared
        published.blocks |= unpacked

    @override
    def withdraw(self, handle: int) -> object:
        return self._published.pop(handle, None)

    @override
    def gather(self, site: Site, segments_S4: npt.NDArray[np.int32], refusal: Refusal) -> list[Segment]:
        return [
            Segment(self._block(handle, site, expert, refusal), first, num_entries)
            for handle, expert, first, num_entries in segments_S4.tolist()
        ]

    def _block(self, handle: int, site: Site, expert: int, refusal: Refusal) -> Block:
        published = self._published.get(handle)
        if published is None or site.layer not in published.layers:
            raise refusal(handle, expert)
        block = published.blocks.get((site, expert))
        if block is None:
            placed = published.layers[site.layer].get(site, {}).get(expert)
            if placed is None and expert not in self._placement.experts(site, self._shard):
                raise refusal(handle, expert)
            block = NOTHING if placed is None else self._unpacked(published.extent, placed)
            published.blocks[site, expert] = block
        return block

    def _unpacked(self, extent: Extent, placed: Placed) -> Block:
        (packed_B,) = extent.pieces(placed.begin, placed.begin + placed.nbytes)
        return self.format.unpack(packed_B, placed.shape)
