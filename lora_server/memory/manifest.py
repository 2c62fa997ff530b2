"""What one adapter has on one shard, and where in its extent each block lies."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lora_server.adapters import Outline
from lora_server.memory.formats import Format
from lora_server.placement import Placement
from lora_server.spec import PROJECTIONS, Site

KEPT_BYTES = 64_000_000  # of manifests that are kept
_LAYER_BYTES = 16


class Placed(NamedTuple):
    """A block of `nbytes` at byte `begin` of the extent."""

    begin: int
    nbytes: int
    shape: Any  # the format's


Blocks = Mapping[Site, Mapping[int, Placed]]  # of a layer, by expert


class Manifest:
    """Layer after layer, in the order of `layers`; blocks of a layer follow each other.

    Small: adapters of one outline share it, and it is kept while none of them is in memory. `nbytes` is what the
    extent must have. One thread at a time.
    """

    def __init__(
        self, outline: Outline, placement: Placement, shard: int, layers: Sequence[int], form: Format[Any]
    ) -> None:
        """Raises AdapterLoadError for what the format's kernels cannot serve."""
        self.outline = outline
        self._placement, self._shard, self._layers, self._form = placement, shard, tuple(layers), form
        self._ends = np.zeros(len(layers) + 1, np.int64)
        self._last: tuple[int, Blocks] = -1, {}
        for index, layer in enumerate(layers):
            self._ends[index + 1] = self._lay_out(layer, int(self._ends[index]))[1]
        self.nbytes = int(self._ends[-1])

    @property
    def kept_bytes(self) -> int:
        """Of memory, or so."""
        return self.outline.nbytes + _LAYER_BYTES * len(self._layers)

    def span(self, layer: int) -> tuple[int, int]:
        """The bytes of a layer [begin, end)."""
        index = self._layers.index(layer)
        return int(self._ends[index]), int(self._ends[index + 1])

    def blocks(self, layer: int) -> Blocks:
        """Of a layer; made anew, except for who asks again for the last one."""
        if self._last[0] != layer:
            self._last = layer, self._lay_out(layer, self.span(layer)[0])[0]
        return self._last[1]

    def _lay_out(self, layer: int, begin: int) -> tuple[Blocks, int]:
        """From `begin` on; returns where they end, too."""
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
    """By the key of their outlines; over `kept_bytes` the least recently used go, and are made anew when needed."""

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._kept: OrderedDict[bytes, Manifest] = OrderedDict()
        self.nbytes = 0

    def get(self, key: bytes) -> Manifest | None:
        """One that is kept."""
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def put(self, manifest: Manifest) -> None:
        """A new one."""
        self._kept[manifest.outline.key] = manifest
        self.nbytes += manifest.kept_bytes
        while self.nbytes > self._kept_bytes:
            self.nbytes -= self._kept.popitem(last=False)[1].kept_bytes
