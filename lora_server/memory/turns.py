"""Which adapter comes next: who is wanted, by whom and until when, and what is brought unasked (docs/memory.md)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable

from lora_server.memory.entry import Demand, Done, Entry


class Turns:
    """The store's lock guards it. `moved` hears of each that comes from now on, or does not any more."""

    def __init__(self, moved: Callable[[Entry], object]) -> None:
        self._moved = moved
        self._wanted: dict[int, Entry] = {}  # not whole, and somebody wants them
        self._unseen: deque[Entry] = deque()
        self._unasked: dict[Entry, Done] = {}
        self._demanded: dict[Hashable, set[Entry]] = {}  # by whom
        self._postponed: dict[int, Entry] = {}  # eager ones, until fewer are active

    def want(self, entry: Entry) -> None:
        """Somebody does; what is whole, or FAILED, is left out when it would have its turn."""
        self._wanted[entry.handle] = entry
        self._moved(entry)

    def look(self, entry: Entry, first: bool = False) -> None:
        """At its files."""
        (self._unseen.appendleft if first else self._unseen.append)(entry)

    def bring(self, entry: Entry, done: Done) -> None:
        """It has memory, and comes when nobody waits; `done` when all of it has, or the memory was taken for others."""
        self.give_up(entry)
        self._unasked[entry] = done
        self._moved(entry)

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
        self.give_up(entry)

    def give_up(self, entry: Entry) -> None:
        """It is not brought unasked any more; nothing where it was not."""
        done = self._unasked.pop(entry, None)
        if done is not None:
            done(None)

    def any_wanted(self) -> bool:
        """Whether somebody waits."""
        return bool(self._wanted)

    def is_unasked(self, entry: Entry) -> bool:
        """Whether it is to be brought, or to be looked at, though nobody waits."""
        return entry in self._unasked or entry in self._unseen

    def is_coming(self, entry: Entry) -> bool:
        """Whether somebody wants it, or it is brought unasked, and it is not whole."""
        there = entry.is_whole() or entry.failure is not None
        return not there and (entry.handle in self._wanted or entry in self._unasked)

    def in_order(self, now: float, let_go: Callable[[Entry], object]) -> list[Entry]:
        """Who is needed first comes first, then one to be looked at; if nobody waits, one that is brought unasked.

        `let_go` is called with those that do not come any more.
        """
        for entry in list(self._wanted.values()):
            entry.forget_demands(now)
            if entry.is_whole() or entry.failure is not None or not entry.is_wanted():
                del self._wanted[entry.handle]
                let_go(entry)
        wanted = sorted(self._wanted.values(), key=lambda one: (one.deadline(), len(one.ready), one.order))
        while self._unseen:
            entry = self._unseen[0]
            if not entry.dropped and entry.failure is None and entry.size is None:
                return [*wanted, entry]
            let_go(self._unseen.popleft())
        while self._unasked and not wanted:
            entry = next(iter(self._unasked))
            if entry.failure is None and not entry.is_whole():
                return [entry]
            let_go(entry)
            self.give_up(entry)
        return wanted
