"""The order in which a shard loads adapters: wants, the most urgent first (docs/memory.md)."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable
from enum import IntEnum

from lora_server.errors import AdapterLoadError, LoraServerError
from lora_server.memory.entry import AdapterEntry, Answer, Reason, Want

_AWAITED = frozenset({Reason.ADD, Reason.PIN})  # answered when the adapter is complete
_MEASURES = frozenset({Reason.FETCH, Reason.ASKED, Reason.MEASURE})  # answered when its size is known


class Level(IntEnum):
    """Urgency of a want. Demands are ordered by deadline, the others first in, first out."""

    DEMAND = 0
    ASKED = 1
    MEASURE = 2
    PREWARM = 3

    @classmethod
    def of(cls, reason: Reason) -> Level:
        """Return the level of a reason."""
        measures = {Reason.ASKED: cls.ASKED, Reason.MEASURE: cls.MEASURE}
        return cls.DEMAND if reason.is_demand else measures.get(reason, cls.PREWARM)


class LoadQueue:
    """Entries by the urgency of their wants. The store's lock guards it.

    Wants of clients and of `active` adapters outlive a load: they order evictions, too. `note` is called with entries
    that start or stop waiting. `lacks_memory`: at the last look an entry in demand found none; a step's end may
    free some.
    """

    def __init__(self, note: Callable[[AdapterEntry], None]) -> None:
        self._note, self.lacks_memory = note, False
        self._queued: dict[Level, OrderedDict[AdapterEntry, None]] = {level: OrderedDict() for level in Level}
        self._owned: dict[Hashable, set[AdapterEntry]] = {}  # what clients want
        self._deferred: dict[AdapterEntry, None] = {}

    # -- wants

    def add(self, entry: AdapterEntry, want: Want) -> None:
        """Record a want, and queue the entry if anything of it is left to load."""
        entry.wants[want.owner] = want
        if entry.is_settled():
            return
        self._queued[Level.of(want.reason)][entry] = None
        self._note(entry)

    def demand(self, entries: Iterable[AdapterEntry], layer: int | None, owner: Hashable, deadline: float) -> None:
        """Record that a step of the owner waits for the layer of these; None: that a coming one needs them by then."""
        now = time.monotonic()
        for entry in entries:
            want = Want(Reason.PREFETCH, owner, deadline, deadline)
            if layer is not None:
                earlier = entry.wants.get(owner)
                want = Want(Reason.STEP, owner, now if earlier is None else min(now, earlier.due), deadline)
                if layer in entry.layers and layer not in entry.copies.ready:
                    entry.progress.first = entry.layers.index(layer)
            self._owned.setdefault(owner, set()).add(entry)
            self.add(entry, want)

    def withdraw(self, owner: Hashable, handles: Collection[int] | None = None, but: Collection[int] = ()) -> None:
        """Remove the owner's wants for these handles (None: for all), except for `but`."""
        wanted = self._owned.pop(owner, None)
        if not wanted:
            return
        over = {one for one in wanted if (handles is None or one.handle in handles) and one.handle not in but}
        for entry in over:
            entry.wants.pop(owner, None)
        if left := wanted - over:
            self._owned[owner] = left

    def requeue(self, entry: AdapterEntry) -> list[Answer]:
        """Queue an evicted entry again if it is in demand. Wants that depended on its memory end."""
        answers = self._end(entry, {Reason.PARTIAL, Reason.PREWARM, Reason.PRELOAD}, None)
        if entry.is_wanted():
            self._queued[Level.DEMAND][entry] = None
            self._note(entry)
        return answers

    def settle(self, entry: AdapterEntry) -> list[Answer]:
        """Remove the wants that are fulfilled, or that a failure ends; returns what to answer, without the lock."""
        error = entry.failure.error if entry.failure is not None else None
        answers = self._end(entry, _MEASURES, error) if error is not None or entry.footprint.size is not None else []
        if entry.is_settled():
            answers += self._end(entry, _AWAITED, error) + self._end(entry, {Reason.PARTIAL, Reason.PREWARM}, None)
        if error is not None:
            entry.wants.pop(Reason.PRELOAD, None)
        return answers

    def drop(self, entry: AdapterEntry) -> list[Answer]:
        """Remove all wants of an entry that is dropped."""
        error = AdapterLoadError(f"handle {entry.handle}: dropped while it loaded")
        answers = self._end(entry, _AWAITED | _MEASURES, error) + self._end(entry, {Reason.PREWARM}, None)
        for queue in self._queued.values():
            queue.pop(entry, None)
        self._deferred.pop(entry, None)
        for wanted in self._owned.values():
            wanted.discard(entry)
        entry.wants.clear()
        return answers

    def defer(self, entry: AdapterEntry) -> list[Answer]:
        """Put the load for `adapters add` off until `resume`; does nothing where there is no such want."""
        if not any(want.reason is Reason.ADD for want in entry.wants.values()):
            return []
        self._deferred[entry] = None
        return self._end(entry, _AWAITED, None)

    def resume(self) -> None:
        """Queue what was deferred."""
        deferred, self._deferred = self._deferred, {}
        for entry in deferred:
            if not entry.is_settled():
                self.add(entry, Want(Reason.ADD, Reason.ADD))

    def _end(self, entry: AdapterEntry, reasons: Collection[Reason], error: LoraServerError | None) -> list[Answer]:
        ended = [want for want in entry.wants.values() if want.reason in reasons]
        for want in ended:
            del entry.wants[want.owner]
        if Reason.PREWARM in reasons:
            self._queued[Level.PREWARM].pop(entry, None)
        return [(want.done, error) for want in ended if want.done is not None]

    # -- order

    @property
    def has_demand(self) -> bool:
        """Return whether any entry is queued for which others are evicted."""
        return bool(self._queued[Level.DEMAND])

    def is_loading(self, entry: AdapterEntry) -> bool:
        """Return whether it is queued to be loaded."""
        return not entry.is_settled() and (entry in self._queued[Level.DEMAND] or entry in self._queued[Level.PREWARM])

    def expire(self, now: float) -> list[AdapterEntry]:
        """Remove and return the entries that no want needs to be queued any more."""
        demands = self._queued[Level.DEMAND]
        for entry in demands:
            entry.expire_wants(now)
        over = [entry for entry in demands if entry.is_settled() or not entry.is_wanted()]
        for entry in over:
            del demands[entry]
        for measures in (self._queued[Level.ASKED], self._queued[Level.MEASURE]):
            while measures and ((first := next(iter(measures))).failure or first.footprint.size is not None):
                over.append(measures.popitem(last=False)[0])
        return over

    def in_order(self) -> list[AdapterEntry]:
        """Return the entries to try now: all demands by deadline, those without one that clients hold first, and first
        in, first out; then the first to measure that is asked for, and that is not; without a demand, also the first to
        prewarm."""
        demands = self._queued[Level.DEMAND]
        ordered = sorted(demands, key=lambda one: (one.deadline(), not one.active, len(one.copies.ready)))
        for level in (Level.ASKED, Level.MEASURE, *(() if demands else (Level.PREWARM,))):
            ordered += [entry for entry, _ in zip(self._queued[level], range(1), strict=False)]
        return ordered
