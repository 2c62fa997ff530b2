"""A client without a connector: it pushes one step of two experts again and again."""

from __future__ import annotations

import struct

from lora_server.spec import PROJECTIONS, ModelSpec, Site
from lora_server.transport.base import Link
from lora_server.wire import slot
from lora_server.wire.slot import RequestHeader


class StepClient:
    """Steps of `entries`, half of them of each expert. `mapped`: both experts have the same rows, as an engine's do."""

    def __init__(
        self, link: Link, number: int, spec: ModelSpec, site: Site, entries: int, *, handle: int, depth: int,
        mapped: bool = False,
    ) -> None:  # fmt: skip
        self.link, self.seq, self._depth = link, 0, depth
        half, width, summed = entries // 2, spec.in_width(site), mapped and site.projection == "down"
        rows = half if mapped else entries
        flags = slot.HAS_IN_MAP * mapped | slot.HAS_OUT_MAP * summed
        at = slot.request_offsets(2, entries, flags, rows * width * 4)
        for memory in map(link.region.request, range(depth)):
            struct.pack_into("<8I", memory, at.segments, handle, 0, 0, half, handle, 1, half, half)
            if mapped:
                struct.pack_into(f"<{entries}I", memory, at.in_map, *range(half), *range(half))
            if summed:
                struct.pack_into(f"<{entries}I", memory, at.out_map, *range(half), *range(half))
                struct.pack_into(f"<{entries}f", memory, at.weights, *[0.5] * entries)
        self._nbytes = at.end
        self._header = RequestHeader(
            step_class=slot.DECODE, flags=flags, client=number, epoch=1, seq=0, slot=0, layer=site.layer,
            projection=PROJECTIONS.index(site.projection), dtype=0, num_rows=rows, num_entries=entries, num_segments=2,
            num_out_rows=half if summed else entries, in_begin=0, in_end=width, windows=((0, spec.out_width(site)),),
            payload_bytes=at.end - slot.HEADER_BYTES, budget_us=60_000_000, pushed_ns=0,
        )  # fmt: skip

    def push(self) -> None:
        self.seq += 1
        self._header._replace(seq=self.seq, slot=self.seq % self._depth).pack_into(self.link.region.request(self.seq))
        self.link.push(self.seq, self._nbytes)

    @property
    def idle(self) -> bool:
        return self.link.responded() == self.seq
