"""Who may use its adapters now, and who waits until there is a place. Not thread-safe: `adapters` has the lock.

An adapter is active while a client holds it, and the active ones fit the device pools of all shards together. Whoever
asks for active ones alone, or for others that fit beside them, is admitted at once; others are queued.

The rule: places go to those who came first. Nobody waits for one whose adapters no shard has measured yet. Who fits
goes before those who came earlier and do not. Once somebody has been the first of these for `first_seconds`, nobody
takes a new place before it, and adapters give way: those that have the fewest holds, as many as it needs, and one more
every `first_seconds`. Who asks for one of them waits behind it; who asks for others in use is admitted at once all the
same. So its place comes when those who hold theirs have let go, and nobody starves.

Who came first counts within a tenant. Between those that wait, each begins where what its tenant has been given, and
asked for earlier, ends: an adapter counts for one, divided by the tenant's weight. A tenant that begins to wait begins
where the others are, so nobody saves up for later, and a long queue of one tenant's is passed by all others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from lora_server import telemetry
from lora_server.control.admission.holds import Holds
from lora_server.control.admission.room import Room
from lora_server.errors import AdapterLoadError, AdmissionError, LoraServerError
from lora_server.histogram import Histogram
from lora_server.timings import Timings

MAX_NAMES, MAX_TICKETS = 4096, 16_384  # of one call; of one client that are not settled

Resolve = Callable[[Sequence[str]], list[int]]  # names to handles; raises why there is none
Key = tuple[int, int]  # client, ticket


def check_bounds(names: Collection[str]) -> None:
    """Of one call; raises AdmissionError."""
    if len(names) > MAX_NAMES:
        raise AdmissionError(f"{len(names)} adapters in one call: expected at most {MAX_NAMES}; ask in parts")


class Queued(NamedTuple):
    """No place yet: where in the queue, from 1 on, behind whom or what."""

    position: int
    reason: str


@dataclass
class Ticket:
    """What a client asked for. Answered by `handles` that it holds, or by an error."""

    names: tuple[str, ...]
    since: float
    tenant: str = ""
    weight: float = 1.0
    first_since: float | None = None  # nobody who has been measured is before it
    waited: bool = False
    handles: list[int] | None = None
    error: LoraServerError | None = None
    trace: Mapping[str, str] = field(default_factory=telemetry.headers)  # of the call that asked for it


@dataclass
class Counters:
    """What has happened since the start."""

    immediate: int = 0
    queued: int = 0  # admitted after they had waited
    waits: Histogram = field(default_factory=Histogram)  # of those
    hits: int = 0  # adapters that were whole in the device pools when somebody got them
    misses: int = 0


@dataclass
class Admission:
    """`changed(more, fewer, trace)` hears which handles became active, for whose trace, and which are not any more;
    `told(client, more, fewer, anew)` what a client holds now, before it is answered.

    A ticket is known by its client and a number; asked again with the same, it is the same, until it is settled.
    """

    resolve: Resolve
    room: Room = field(default_factory=Room)
    holds: Holds = field(default_factory=Holds)
    changed: Callable[[Collection[int], Collection[int], Mapping[str, str]], object] = lambda *_: None
    told: Callable[[int, Collection[int], Collection[int], bool], object] = lambda client, more, fewer, anew: None
    is_resident: Callable[[int], bool] = lambda handle: True  # whether all its weights are in device pools
    clock: Callable[[], float] = time.monotonic
    first_seconds: float = Timings.first_in_queue
    counters: Counters = field(default_factory=Counters)
    paused: str = ""  # why nobody is admitted, whatever room there is

    def __post_init__(self) -> None:
        self._tickets: dict[int, dict[int, Ticket]] = {}  # by client and number
        self._queue: dict[Key, Ticket] = {}  # of these, who waits; first come first
        self._presumed: set[int] = set()  # held when an earlier controller was last heard
        self._had: dict[str, float] = {}  # by tenant, since somebody has been waiting
        self._now = 0.0  # where who was admitted last began

    # -- clients

    def acquire(
        self, client: int, number: int, names: Sequence[str], tenant: str = "", weight: float = 1.0
    ) -> list[int] | Queued:
        """Hold all of these, or be queued; raises why they cannot be had. Number 0 is never queued, but refused."""
        if not names:  # a client that asks whether its lease is good
            return []
        ticket = self._tickets.get(client, {}).get(number) if number else None
        if ticket is None:
            check_bounds(names)
            self._check_tickets(client)
            ticket = Ticket(tuple(names), self.clock(), tenant, weight)
            self._ask((client, number), ticket)
        if ticket.error is not None:
            raise ticket.error
        return list(ticket.handles) if ticket.handles is not None else self._queued((client, number), ticket)

    def _check_tickets(self, client: int) -> None:
        if (tickets := len(self._tickets.get(client, ()))) >= MAX_TICKETS:
            raise AdmissionError(f"client {client}: {tickets} requests of it are open, as many as may be; end some")

    def _ask(self, key: Key, ticket: Ticket) -> None:
        self.resolve(ticket.names)  # raises
        if all(one.tenant != ticket.tenant for one in self._queue.values()):
            self._had[ticket.tenant] = max(self._had.get(ticket.tenant, 0.0), self._now)
        self._queue[key] = ticket
        if key[1]:
            self._tickets.setdefault(key[0], {})[key[1]] = ticket
        self.admit()
        ticket.waited = True
        if key[1] == 0 and key in self._queue:
            reason = self._queued(key, ticket).reason
            ticket.error = AdmissionError(f"adapters {list(ticket.names)}: no place now: {reason}")
        if key[1] == 0 or ticket.error is not None:
            self._drop(key)

    def is_queued(self, client: int, number: int) -> bool:
        """Whether a ticket still waits; one that is unknown does not."""
        return (client, number) in self._queue

    def settle(self, client: int, numbers: Iterable[int]) -> None:
        """The client has the answers; those that wait do so on."""
        for number in numbers:
            if (client, number) not in self._queue:
                self._drop((client, number))

    def cancel(self, client: int, numbers: Iterable[int]) -> None:
        """Nobody wants these: what is queued goes, what was admitted is let go. Also of one that is yet to come."""
        for number in numbers:
            key = client, number
            ticket = self._tickets.setdefault(client, {}).setdefault(number, Ticket((), self.clock()))
            self._queue.pop(key, None)
            if ticket.handles is not None:
                self._release(client, ticket.handles)
            ticket.handles, ticket.error = None, AdmissionError(f"adapters {list(ticket.names)}: not wanted any more")
        self.admit()

    def release(self, client: int, handles: Iterable[int]) -> None:
        """Let go; who waits may come."""
        self._release(client, handles)
        self.admit()

    def revoke(self, handle: int) -> list[int]:
        """Let go for all that hold it: who they were."""
        clients = [client for client, handles in self.holds.by_client().items() if handle in handles]
        for client in clients:
            self._release(client, [handle] * self.holds.times(handle))
        if clients:
            self.admit()
        return clients

    def _release(self, client: int, handles: Iterable[int]) -> None:
        if fewer := self.holds.release(client, handles):
            self.told(client, (), fewer, False)

    def _drop(self, key: Key) -> None:
        client, number = key
        self._queue.pop(key, None)
        tickets = self._tickets.get(client, {})
        tickets.pop(number, None)
        if not tickets:
            self._tickets.pop(client, None)

    def forget_client(self, client: int) -> None:
        """It is gone, with all that it held or waited for."""
        for number in self._tickets.pop(client, {}):
            self._queue.pop((client, number), None)
        self.holds.forget_client(client)
        self.admit()

    def restore(self, client: int, handles: Iterable[int]) -> None:
        """What it held under an earlier controller."""
        self.holds.restore(client, handles)
        self.told(client, self.holds.of(client), (), True)
        self.admit()

    def presume(self, handles: Iterable[int]) -> None:
        """Clients held these under an earlier controller; their places are theirs until all of them have spoken."""
        self._presumed.update(handles)
        self._update()

    # -- the queue

    def admit(self) -> None:
        """All whose turn it is: to be called when there may be room."""
        self._update()
        if self.paused:
            return
        now, first, giving_way = self.clock(), None, frozenset[int]()
        for key, ticket in self._in_order():
            try:
                handles = self._resolve(ticket)
            except LoraServerError as error:
                ticket.error = error
                del self._queue[key]
                continue
            wanted = set(handles)
            if self.room.unmeasured(wanted) is not None or (giving_way and not wanted <= self.room.in_use - giving_way):
                continue
            if not self.room.lacking(wanted):
                self._admit(key, ticket, handles, now)
            elif first is None:
                first = ticket
                giving_way = self._giving_way(ticket, wanted, now)
        if not self._queue:
            self._had.clear()
            self._now = 0.0

    def _in_order(self) -> list[tuple[Key, Ticket]]:
        waiting = list(self._queue.items())
        ends, begins = dict(self._had), dict[Key, float]()
        for key, ticket in waiting:
            begins[key] = ends[ticket.tenant]
            ends[ticket.tenant] += len(ticket.names) / ticket.weight
        return sorted(waiting, key=lambda one: begins[one[0]])  # of equals, who came first

    def _resolve(self, ticket: Ticket) -> list[int]:
        handles = self.resolve(ticket.names)
        if reason := self.room.too_large(set(handles)):
            raise AdapterLoadError(
                f"adapters {list(ticket.names)}: {reason}; put fewer adapters into a batch, or start the "
                "server with a larger --device-pool or more shards"
            )
        return handles

    def _giving_way(self, first: Ticket, wanted: Set[int], now: float) -> frozenset[int]:
        """Which of those in use do so to who is first."""
        if first.first_since is None:
            first.first_since = now
        turns = int((now - first.first_since) / self.first_seconds)
        if not turns:
            return frozenset()
        fewest = sorted(self.room.in_use - wanted, key=lambda handle: (self.holds.times(handle), handle))
        needed = 0
        while self.room.lacking(wanted, frozenset(fewest[:needed])) and needed < len(fewest):
            needed += 1
        return frozenset(fewest[: needed + turns - 1])

    def _admit(self, key: Key, ticket: Ticket, handles: list[int], now: float) -> None:
        del self._queue[key]
        self._now = max(self._now, self._had[ticket.tenant])
        self._had[ticket.tenant] += len(ticket.names) / ticket.weight
        ticket.handles = handles
        hits = sum(map(self.is_resident, handles))
        self.counters.hits += hits
        self.counters.misses += len(handles) - hits
        if more := self.holds.acquire(key[0], handles):
            self.told(key[0], more, (), False)
        if ticket.waited:
            self.counters.queued += 1
            self.counters.waits.add(int((now - ticket.since) * 1e9))
            telemetry.record("lora.admission", ticket.since, ticket.trace, adapters=", ".join(ticket.names))
        else:
            self.counters.immediate += 1
        self._update(ticket.trace)

    def _update(self, trace: Mapping[str, str] = telemetry.NOTHING) -> None:
        if not self.holds.anybody_unknown():
            self._presumed.clear()
        more, fewer = self.room.set_in_use(self.holds.handles() | self._presumed)
        if more or fewer:
            self.changed(more, fewer, trace)

    def _queued(self, key: Key, ticket: Ticket) -> Queued:
        position = [other for other, _ in self._in_order()].index(key) + 1
        if self.paused:
            return Queued(position, self.paused)
        handles = self.resolve(ticket.names)
        shard = self.room.unmeasured(handles)
        if shard is not None:
            return Queued(position, f"shard {shard} has not looked at its files yet")
        return Queued(position, self.room.lacking(set(handles)) or "those who came earlier go first")

    def names_waiting(self) -> set[str]:
        """Of all tickets that wait."""
        return {name for ticket in self._queue.values() for name in ticket.names}

    @property
    def num_queued(self) -> int:
        """Tickets that wait."""
        return len(self._queue)
