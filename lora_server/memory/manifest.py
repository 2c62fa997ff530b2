"""Blocks of one adapter on one shard, and the place of each in its extent."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lora_server.adapters import Outline
from lora_server.memory.formats import Format
from lora_server.placement import Placement
from lora_server.spec import PROJECTIONS, Site

KEPT_BYTES = 64_000_000  # of cached manifests
_LAYER_BYTES = 16


class Placed(NamedTuple):
    """A block of `nbytes` at byte `begin` of the extent."""

    begin: int
    nbytes: int
    shape: Any  # of the format


Blocks = Mapping[Site, Mapping[int, Placed]]  # of a layer, by site and expert


class Manifest:
    """Lays an extent out: layer after layer in the order of `layers`, and the blocks of a layer one after the other.

    Adapters of one outline share it, and it is cached while none of them is in memory. `nbytes`: size of the extent.
    Not thread-safe.
    """

    def __init__(
        self, outline: Outline, placement: Placement, shard: int, layers: Sequence[int], form: Format[Any]
    ) -> None:
        """Raises AdapterLoadError for a block that the format's kernels cannot serve."""
        self.outline = outline
        self._placement, self._shard, self._layers, self._form = placement, shard, tuple(layers), form
        self._ends = np.zeros(len(layers) + 1, np.int64)
        self._last: tuple[int, Blocks] = -1, {}
        for index, layer in enumerate(layers):
            self._ends[index + 1] = self._lay_out(layer, int(self._ends[index]))[1]
        self.nbytes = int(self._ends[-1])

    @property
    def kept_bytes(self) -> int:
        """Memory that the manifest takes, about."""
        return self.outline.nbytes + _LAYER_BYTES * len(self._layers)

    def span(self, layer: int) -> tuple[int, int]:
        """Return the bytes [begin, end) of a layer."""
        index = self._layers.index(layer)
        return int(self._ends[index]), int(self._ends[index + 1])

    def blocks(self, layer: int) -> Blocks:
        """Return the blocks of a layer. Only the last layer's are cached."""
        if self._last[0] != layer:
            self._last = layer, self._lay_out(layer, self.span(layer)[0])[0]
        return self._last[1]

    def _lay_out(self, layer: int, begin: int) -> tuple[Blocks, int]:
        """Lay a layer out from `begin` on; returns its blocks and their end."""
        blocks: dict[Site, dict[int, Placed]] = {}
        shapes: dict[Any, tuple[Any, int]] = {}
        for site in (Site(layer, projection) for projection in PROJECTIONS):
            own = self._placement.experts(site, self._shard)
            for expert, pairs in self.outline.at(site).items():
                if expert not in own:
                    continue
                parts = tuple(pair.kind.part for pair in pairs)
                if (site, parts) not in shapes:
                    shape = self._form.shape(site, parts)
                    shapes[site, parts] = shape, self._form.nbytes(shape)
                shape, nbytes = shapes[site, parts]
                blocks.setdefault(site, {})[expert] = Placed(begin, nbytes, shape)
                begin += -(-nbytes // self._form.alignment) * self._form.alignment
        return blocks, begin


class Manifests:
    """LRU cache of manifests by the key of their outlines, of at most `kept_bytes`."""

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._kept: OrderedDict[bytes, Manifest] = OrderedDict()
        self.nbytes = 0

    def get(self, key: bytes) -> Manifest | None:
        """Return a cached manifest."""
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def put(self, manifest: Manifest) -> None:
        """Cache a new manifest, and evict others if it takes too much."""
        self._kept[manifest.outline.key] = manifest
        self.nbytes += manifest.kept_bytes
        while self.nbytes > self._kept_bytes:
            self.nbytes -= self._kept.popitem(last=False)[1].kept_bytes
