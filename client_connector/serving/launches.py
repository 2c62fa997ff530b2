"""The launches of one site of one engine step, on every shard that has some of it; see launched.

Shapes: T rows of the engine's step, k experts each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from client_connector.exchange import Started
from client_connector.packing import Window
from client_connector.serving.sites import Part
from kernels_cuda.routing import Choice
from lora_server.device.client.captured import CapturedSite
from lora_server.spec import PROJECTIONS, Site
from lora_server.wire import slot
from lora_server.wire.slot import RequestHeader

NOTHING = range(0)  # the experts of a shard that is sent a step to keep its stage in step: see docs/gpu.md, leader mode


class ChunkLaunch(NamedTuple):
    """Rows [first, first + rows) of the engine's step, on each shard that has some of the site."""

    first: int
    rows: int
    on: list[tuple[CapturedSite, Choice]]

    def put(self) -> None:
        """Route and put, in parallel to the engine's next work."""
        for site, choice in self.on:
            site.put(choice)


@dataclass(frozen=True)
class Launched(Started):
    """One site's step. The first `depth` chunks are put at once; each later one waits for an earlier one's slot."""

    chunks: list[ChunkLaunch]
    top_k: int
    depth: int
    summed: bool = False  # several chunks have a row's deltas: sum these before they are added, which rounds them less

    def put(self) -> None:
        """Put the first chunks, in parallel to the engine's next work."""
        for chunk in self.chunks[: self.depth]:
            chunk.put()

    def add(self, parts: Sequence[Part], per_entry: bool) -> None:
        """See SiteSteps.add."""
        if self.summed:
            sums = [(torch.zeros_like(y, memory_format=torch.contiguous_format), begin) for y, begin in parts]
            self._add(sums, per_entry)
            for (y, _), (delta, _) in zip(parts, sums, strict=True):
                y.add_(delta)
        else:
            self._add(parts, per_entry)

    def _add(self, parts: Sequence[Part], per_entry: bool) -> None:
        per_row = self.top_k if per_entry else 1
        for index, chunk in enumerate(self.chunks):
            rows = slice(chunk.first * per_row, (chunk.first + chunk.rows) * per_row)
            for site, choice in chunk.on:
                if choice.among == NOTHING:
                    site.wait()
                    site.link.queue.lead_engine()  # its failure, too, is known before the next put
                    continue
                for y, begin in parts:
                    _add_columns(site, y[rows], begin)
            if index + self.depth < len(self.chunks):
                self.chunks[index + self.depth].put()


def _add_columns(site: CapturedSite, y: torch.Tensor, begin: int) -> None:
    """Add to columns, which need not be contiguous."""
    if y.stride(1) == 1:
        site.add_columns(y, begin)
        return
    delta = torch.zeros_like(y, memory_format=torch.contiguous_format)
    site.add_columns(delta, begin)
    y.add_(delta)


def header_of(site: Site, dtype: int, width: int, by_entry: bool, window: Window) -> RequestHeader:
    """Make the header of steps with `width` input columns, one row per token or, by entry, per token and expert.

    The GPU adds the rest.
    """
    return RequestHeader(
        step_class=slot.DECODE,
        flags=slot.HAS_OUT_MAP if by_entry else slot.HAS_IN_MAP,
        client=0,
        epoch=0,
        seq=0,
        slot=0,
        layer=site.layer,
        projection=PROJECTIONS.index(site.projection),
        dtype=dtype,
        num_rows=0,
        num_entries=0,
        num_segments=0,
        num_out_rows=0,
        in_begin=window.in_begin,
        in_end=window.in_begin + width,
        windows=window.out,
        payload_bytes=0,
        budget_us=0,
        pushed_ns=0,
    )
