"""Returns memory of a client's slots to the system if no recent step needed it.

A region has the size that the largest steps need, but the system provides a page only when it is first touched. Large
steps leave pages that smaller ones do not need. Only the client knows when its slots are not in use, so after each step
it returns a small part of such pages.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from lora_server.timings import Timings
from lora_server.transport.mapping import Mapping
from lora_server.wire.region import PAGE_BYTES, RegionLayout
from lora_server.wire.slot import aligned

GIVE_BYTES = 1 << 20  # returned at a time, in less than a millisecond


@dataclass
class _Slots:
    """The request slots, or the response slots, of a region; `begin` is the offset of the first."""

    begin: int
    nbytes: int  # per slot
    touched: int = 0  # bytes per slot, at most, that have pages
    needed: int = 0  # bytes per slot, at most, that steps used since the last `spare`

    def spare(self, depth: int, give_bytes: int) -> list[tuple[int, int]]:
        """Return (begin, end) of parts of the region that recent steps did not need, and start counting again."""
        needed = min(aligned(self.needed, PAGE_BYTES), self.nbytes)
        touched = max(self.touched, needed)
        self.needed, spares = 0, touched - needed >= give_bytes
        self.touched = needed if spares else touched
        slots = range(self.begin, self.begin + depth * self.nbytes, self.nbytes) if spares else ()
        return [
            (first, min(first + give_bytes, begin + touched))
            for begin in slots
            for first in range(begin + needed, begin + touched, give_bytes)
        ]


class Slack:
    """The unused memory of one client's region, which is not pinned. Not thread-safe."""

    def __init__(
        self,
        mapping: Mapping,
        layout: RegionLayout,
        keep_seconds: float = Timings.region_keep,
        give_bytes: int = GIVE_BYTES,
    ) -> None:
        """Keep unused pages for `keep_seconds`: faulting them in again is expensive."""
        self._mapping, self._depth = mapping, layout.depth
        self._keep_seconds, self._give_bytes = keep_seconds, give_bytes
        self._requests = _Slots(PAGE_BYTES, layout.request_bytes)
        self._responses = _Slots(PAGE_BYTES + layout.depth * layout.request_bytes, layout.response_bytes)
        self._spare: deque[tuple[int, int]] = deque()
        self._due = time.monotonic() + self._keep_seconds

    def consumed(self, request_bytes: int, response_bytes: int, idle: bool) -> None:
        """Note that a step of so many bytes is done. If the link is `idle`, return a part of the unused pages."""
        self._requests.needed = max(self._requests.needed, request_bytes)
        self._responses.needed = max(self._responses.needed, response_bytes)
        if not idle:
            return
        if self._spare:
            self._mapping.give_back(*self._spare.popleft())
        elif time.monotonic() >= self._due:
            for slots in (self._requests, self._responses):
                self._spare.extend(slots.spare(self._depth, self._give_bytes))
            self._due = time.monotonic() + self._keep_seconds
