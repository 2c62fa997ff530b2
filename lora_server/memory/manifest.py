"""What one adapter has on one shard, and where in its extent each block lies: from the files' headers alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from lora_server.adapters import Adapter
from lora_server.memory.formats import Format
from lora_server.placement import Placement
from lora_server.spec import Site


class Placed(NamedTuple):
    """A block of `nbytes` at byte `begin` of the extent."""

    begin: int
    nbytes: int
    shape: Any  # the format's


class Manifest:
    """Layer after layer, in the order of `layers`; blocks of a layer follow each other.

    `nbytes` is what the extent must have, `layers` are those of the shard, `spans` their bytes [begin, end).
    """

    def __init__(
        self, adapter: Adapter, placement: Placement, shard: int, layers: Sequence[int], form: Format[Any]
    ) -> None:
        """Raises AdapterLoadError for what the format's kernels cannot serve."""
        self.blocks: dict[Site, dict[int, Placed]] = {}
        self.spans: dict[int, tuple[int, int]] = {}
        self.nbytes = 0
        sites: dict[int, list[Site]] = {}
        for site in adapter.sites():
            sites.setdefault(site.layer, []).append(site)
        shapes: dict[Any, Any] = {}  # equal ones are kept once
        for layer in layers:
            begin = self.nbytes
            for site in sites.get(layer, ()):
                own = placement.experts(site, shard)
                blocks = self.blocks[site] = {}
                for expert in (expert for expert in adapter.experts(site) if expert in own):
                    shape = form.shape(site, adapter.parts(site, expert))
                    shape = shapes.setdefault(shape, shape)
                    blocks[expert] = Placed(self.nbytes, form.nbytes(shape), shape)
                    self.nbytes += -(-blocks[expert].nbytes // form.alignment) * form.alignment
            self.spans[layer] = begin, self.nbytes
