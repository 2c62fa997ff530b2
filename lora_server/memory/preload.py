"""Idle memory: the best of what is registered, brought in before anybody asks. It makes room for whoever does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lora_server.memory.entry import Entry
from lora_server.memory.eviction import value_density
from lora_server.memory.pools import Pool
from lora_server.timings import Timings


@dataclass
class Preload:
    """The store's lock guards it. `entries` are all that are known, by handle; `let_go` hears who does not come."""

    entries: Mapping[int, Entry]
    pool: Pool
    let_go: Callable[[Entry], object]
    enabled: bool = False
    look_seconds: float = Timings.preload_look  # between two looks at all that is registered
    preloads: int = 0  # whole adapters
    hits: int = 0  # of these, used before they had to go
    _chosen: Entry | None = None
    _next_look: float = 0.0

    def choose(self, now: float) -> Entry | None:
        """Whose next layer to bring while nobody waits: what fits as it is, the most valuable first."""
        if not self.enabled:
            return None
        if self._chosen is not None and not self._may_come(self._chosen):
            self.let_go(self._chosen)
            self._chosen = None
        if self._chosen is None:
            if now < self._next_look:
                return None
            self._next_look = now + self.look_seconds
            self._chosen = max(filter(self._may_come, self.entries.values()), key=value_density, default=None)
        if self._chosen is not None:
            self._chosen.preloaded = True
        return self._chosen

    def note_whole(self, entry: Entry) -> None:
        """All of its layers are READY."""
        self.preloads += entry.preloaded
        self._next_look = 0.0

    def note_use(self, entry: Entry) -> None:
        """A step reads it."""
        self.hits += entry.preloaded and entry.is_whole()
        entry.preloaded = False

    def _may_come(self, entry: Entry) -> bool:
        """A source that is far is not asked for it: only what a client wants leaves this node."""
        if entry.dropped or entry.far or entry.size is None or entry.failure is not None or entry.is_whole():
            return False
        return entry.device is not None or self.pool.can_allocate(entry.nbytes)
