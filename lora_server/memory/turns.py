"""Which adapter comes next: who is wanted, by whom and until when, and who merely could come (docs/memory.md)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable

from lora_server.memory.entry import Demand, Entry


class Turns:
    """The store's lock guards it."""

    def __init__(self) -> None:
        self._wanted: dict[int, Entry] = {}  # not whole, and somebody wants them
        self._unasked: deque[Entry] = deque()
        self._demanded: dict[Hashable, set[Entry]] = {}  # by whom
        self._postponed: dict[int, Entry] = {}  # eager ones, until fewer are active

    def want(self, entry: Entry) -> None:
        """Somebody does; what is whole, or FAILED, is left out when it would have its turn."""
        self._wanted[entry.handle] = entry

    def offer(self, entry: Entry, first: bool = False) -> None:
        """Nobody asks for it: to be looked at, and brought where there is room."""
        (self._unasked.appendleft if first else self._unasked.append)(entry)

    def demand(self, entries: Iterable[Entry], layer: int | None, owner: Hashable, deadline: float) -> None:
        """A step of the layer waits for these; None: a coming one needs them by then."""
        now = time.monotonic()
        for entry in entries:
            due = deadline if layer is None else min(now, entry.demands.get(owner, Demand(now, now)).due)
            entry.demands[owner] = Demand(due, deadline)
            self._demanded.setdefault(owner, set()).add(entry)
            if layer in entry.layers and layer not in entry.ready:
                entry.first = entry.layers.index(layer)
            if not entry.is_whole() and entry.failure is None:
                self.want(entry)

    def withdraw(self, owner: Hashable, handles: Collection[int] | None = None, but: Collection[int] = ()) -> None:
        """The owner needs these no more (None: all that it demanded), but for some."""
        demanded = self._demanded.pop(owner, set())
        over = {one for one in demanded if (handles is None or one.handle in handles) and one.handle not in but}
        for entry in over:
            entry.demands.pop(owner, None)
        if left := demanded - over:
            self._demanded[owner] = left

    def postpone(self, entry: Entry) -> None:
        """It was to be brought in, and active ones leave no room."""
        entry.eager = False
        self._postponed[entry.handle] = entry

    def resume(self) -> None:
        """Fewer are active."""
        for entry in self._postponed.values():
            entry.eager = True
            self.want(entry)
        self._postponed = {}

    def drop(self, entry: Entry) -> None:
        """It is known no more."""
        self._wanted.pop(entry.handle, None)
        self._postponed.pop(entry.handle, None)
        for demanded in self._demanded.values():
            demanded.discard(entry)

    def any_wanted(self) -> bool:
        """Whether somebody waits."""
        return bool(self._wanted)

    def is_offered(self, entry: Entry) -> bool:
        """Whether it is to be looked at."""
        return entry in self._unasked

    def in_order(self, now: float, has_room: Callable[[Entry], bool], let_go: Callable[[Entry], object]) -> list[Entry]:
        """Who is needed first comes first; one that nobody asked for last, if it `has_room`.

        `let_go` is called with those that do not come any more.
        """
        for entry in list(self._wanted.values()):
            entry.forget_demands(now)
            if entry.is_whole() or entry.failure is not None or not entry.is_wanted():
                del self._wanted[entry.handle]
                let_go(entry)
        wanted = sorted(self._wanted.values(), key=lambda one: (one.deadline(), len(one.ready), one.order))
        while self._unasked:
            entry = self._unasked[0]
            if not (entry.dropped or entry.failure is not None or entry.is_whole()) and has_room(entry):
                return [*wanted, entry] if entry.size is None or not wanted else wanted
            let_go(self._unasked.popleft())
        return wanted
