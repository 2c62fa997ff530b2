"""A shard whose kernel serves by itself: what is left for its host, in the place of the loop (shard.loop).

It launches the kernel, and again when it leaves; tells it who comes and goes; carries the steps of clients that a host
polls; hears what the kernel wants loaded and whom it refused; and ends the process when the kernel's heart stops.
"""

from __future__ import annotations

import heapq
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import ClassVar

import structlog

from lora_server.errors import LoraServerError
from lora_server.histogram import Histogram
from lora_server.logs import Repeats
from lora_server.memory.store import WeightStore
from lora_server.shard.loop import Counters
from lora_server.timings import DEFAULTS, Timings
from lora_server.transport.base import Connection, Port
from lora_server.transport.gpu.carrier import Carrier
from lora_server.transport.gpu.connection import GpuConnection
from lora_server.transport.gpu.kernel import KernelLostError, ServeKernel
from lora_server.transport.gpu.layout import MAX_LINKS, CommandKind, NoteKind, Refusal
from lora_server.transport.gpu.mailbox import Note
from lora_server.transport.gpu.world_link import WorldConnection

CARRY_SECONDS = 1e-4  # between two looks while a carried step is out
READY_SECONDS = 0.1  # between two looks whether to go on waiting
log = structlog.get_logger()


@dataclass(eq=False)
class _Seat:
    """A client's place among the kernel's links."""

    link: int
    connection: Connection
    end: GpuConnection | WorldConnection | Carrier
    leaving: int | None = None  # the command that it was revoked with
    held: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())  # own, and lent


@dataclass
class Pump:
    """One shard's. `run` is the one thread that talks to clients and launches; a second hears notes."""

    index: int
    port: Port
    store: WeightStore
    kernel: ServeKernel
    ready: Future[None] | None = None  # without it, the kernel may be launched at once
    timings: Timings = DEFAULTS
    counters: Counters = field(default_factory=Counters)
    phases: ClassVar[tuple[tuple[str, Histogram], ...]] = ()  # the kernel measures none
    _seats: dict[Connection, _Seat] = field(default_factory=dict)
    _at: dict[int, _Seat] = field(default_factory=dict)  # the same, by their links
    _leaving: list[_Seat] = field(default_factory=list)
    _complain: Repeats = field(default_factory=lambda: Repeats(log.warning))

    def __post_init__(self) -> None:
        self._free = list(range(MAX_LINKS))  # a heap: the poller looks at all up to the last that is taken
        self._closing = threading.Event()
        self._gone: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._carrying = set[Carrier]()  # those with steps on their way

    def run(self, stopped: Callable[[], bool]) -> None:
        """Serve until `stopped()`. Raises KernelLostError, after which the process must end."""
        hears = threading.Thread(target=self._hear, name="kernel-notes", daemon=True)
        hears.start()
        if self._is_ready(stopped):
            self.kernel.start()
        while not stopped():
            self._round()
        self.kernel.stop()
        self._closing.set()
        hears.join()
        for seat in (*self._seats.values(), *self._leaving):
            self._give_up(seat)

    def _is_ready(self, stopped: Callable[[], bool]) -> bool:
        while self.ready is not None and not stopped():
            try:
                self.ready.result(READY_SECONDS)
                return True
            except TimeoutError:
                continue
            except Exception as error:
                raise KernelLostError(str(error)) from error
        return self.ready is None

    def _round(self) -> None:
        self._follow_clients()
        self.kernel.look()
        self.counters.steps = self.kernel.mailbox.done
        for connection in self.port.rung():
            self._carry_for(connection)
        for carrier in list(self._carrying):
            carrier.carry(self.port.respond)
            if not carrier.waits:
                self._carrying.discard(carrier)
        self._complain.flush()
        self.port.wait(CARRY_SECONDS if self._carrying else self.timings.kernel_look)

    def _carry_for(self, connection: Connection) -> None:
        """It has pushed; nobody says so again before it was answered."""
        seat = self._seats.get(connection)
        if seat is None:  # it has none yet
            self.port.ring(connection)
        elif isinstance(seat.end, Carrier):
            if seat.end.is_wild:
                self._cut_off(connection, connection.requested())
            else:
                self._carrying.add(seat.end)

    # -- clients

    def _follow_clients(self) -> None:
        """Who came gets a link; who went has one until the kernel has given it up."""
        here = self.port.connections
        for connection in self._seats.keys() - here:
            seat = self._seats.pop(connection)
            del self._at[seat.link]
            if isinstance(seat.end, Carrier):
                self._carrying.discard(seat.end)
            seat.leaving = self._post(CommandKind.REVOKE, seat.link, [connection.epoch])
            self._leaving.append(seat)
            self._gone.put(connection.client)
        for seat in [one for one in self._leaving if self.kernel.mailbox.holds(one.leaving or 0)]:
            self._leaving.remove(seat)
            self._give_up(seat)
            self.kernel.hold(seat.link, frozenset())
            heapq.heappush(self._free, seat.link)
        for connection in here:
            if connection not in self._seats:
                self._seat(connection)
        for seat in self._seats.values():
            self._hold(seat)

    def _seat(self, connection: Connection) -> None:
        if not self._free:
            if not self._leaving:
                log.error("no link is free for another client", shard=self.index, most=MAX_LINKS)
                self._drop(connection)
            return
        try:
            end: GpuConnection | WorldConnection | Carrier
            if isinstance(connection, GpuConnection | WorldConnection):
                end = connection
            else:
                end = self.kernel.apart(lambda: Carrier(self.kernel.gpu, connection))  # it pins host memory
        except LoraServerError as error:
            log.error("a client's steps cannot be carried to the GPU", client=connection.client, error=str(error))
            self._drop(connection)
            return
        seat = self._seats[connection] = _Seat(heapq.heappop(self._free), connection, end)
        self._at[seat.link] = seat
        self.kernel.reserve_link(seat.link)
        self._hold(seat)
        words = self.kernel.connect_words(seat.link, end.words())
        self._post(CommandKind.CONNECT, seat.link, words)

    def _hold(self, seat: _Seat) -> None:
        """What its client holds now is what its steps may name."""
        own, lent = self.port.held(seat.connection.client)
        if own is not seat.held[0] or lent is not seat.held[1]:
            seat.held = own, lent
            self.kernel.hold(seat.link, own | lent)

    def _post(self, kind: CommandKind, link: int, words: list[int]) -> int:
        """A kernel that has left takes nothing until it is launched again, by this very thread."""
        while (number := self.kernel.mailbox.try_post(kind, link, words)) is None:
            self.kernel.look()
        return number

    def _give_up(self, seat: _Seat) -> None:
        seat.end.given_up.set()
        if isinstance(seat.end, Carrier):
            self.kernel.apart(seat.end.close)

    def _drop(self, connection: Connection) -> None:
        self.port.disconnect(connection)
        connection.close()

    def _cut_off(self, connection: Connection, seq: int) -> None:
        log.error("client signals steps beyond its slots: cut off", shard=self.index, client=connection.client, seq=seq)
        self._drop(connection)

    # -- the kernel's notes

    def _hear(self) -> None:
        """A thread of its own: whoever has the store's lock may be waiting for what the other one does."""
        while not self._closing.wait(self.timings.kernel_note):
            while not self._gone.empty():
                self.store.forget(self._gone.get())
            for note in self.kernel.mailbox.notes():
                self._heed(note)

    def _heed(self, note: Note) -> None:
        seat = self._at.get(note.link)
        if seat is None:  # its client went
            return
        client = seat.connection.client
        if note.kind is NoteKind.PREFETCH:
            until = time.monotonic() + self.timings.expected_step  # unless the step asks again
            self.store.prefetch([note.what], client, until)
        elif note.kind is NoteKind.REFUSED:
            self.counters.failed += 1
            why = Refusal(note.what).name.lower()
            self._complain((client, why), "step refused", shard=self.index, client=client, seq=note.seq, why=why)
        elif note.kind is NoteKind.CUT_OFF:
            self._cut_off(seat.connection, note.seq)
