"""Host of a shard that is served by a GPU kernel; it replaces the loop (shard.loop).

It launches the kernel, and again when the kernel returns; connects and revokes clients; carries the steps of clients
without a link to the GPU; passes the kernel's notes on; and ends the process when the kernel's heartbeat stops.
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

from lora_server.device.host.carrier import Carrier
from lora_server.device.host.connection import GpuConnection
from lora_server.device.host.kernel import KernelLostError, ServeKernel
from lora_server.device.host.mailbox import Note
from lora_server.device.host.world_connection import WorldConnection
from lora_server.device.protocol import layout
from lora_server.device.protocol.codes import MAX_LINKS, MAX_TENANTS, CommandKind, NoteKind, Refusal
from lora_server.errors import LoraServerError
from lora_server.histogram import Histogram
from lora_server.logs import Repeats
from lora_server.memory.store import WeightStore
from lora_server.per_tenant import PerTenant
from lora_server.shard.loop import StepCounters
from lora_server.timings import DEFAULTS, Timings
from lora_server.transport.base import Connection, Port

CARRY_SECONDS = 1e-4  # between two looks while a carried step is out
READY_SECONDS = 0.1  # between two checks whether to go on waiting
log = structlog.get_logger()


@dataclass(eq=False)
class KernelSeat:
    """A client's place among the kernel's links."""

    link: int
    connection: Connection
    end: GpuConnection | WorldConnection | Carrier
    leaving: int | None = None  # the command that revoked it
    held: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())  # own, and lent


class KernelClients:
    """Gives each connection a link of the kernel. Not thread-safe, but for `at` and `gone`: the host's thread."""

    def __init__(self, index: int, port: Port, kernel: ServeKernel) -> None:
        self._index, self._port, self._kernel = index, port, kernel
        self.seats: dict[Connection, KernelSeat] = {}
        self.at: dict[int, KernelSeat] = {}  # by link
        self.leaving: list[KernelSeat] = []
        self.free = list(range(MAX_LINKS))  # a heap: the poller looks at all links up to the last that is taken
        self.gone: queue.SimpleQueue[int] = queue.SimpleQueue()  # clients that disconnected
        self.carrying = set[Carrier]()  # those with steps on their way
        self._tenants: dict[str, int] = {}  # by name: where the kernel has its share

    def update(self) -> None:
        """Connect clients that came, and revoke those that went: a link is free once the kernel has given it up."""
        here = self._port.connections
        for connection in self.seats.keys() - here:
            seat = self.seats.pop(connection)
            del self.at[seat.link]
            if isinstance(seat.end, Carrier):
                self.carrying.discard(seat.end)
            seat.leaving = self._post(CommandKind.REVOKE, seat.link, [connection.grant.epoch])
            self.leaving.append(seat)
            self.gone.put(connection.grant.client)
        for seat in [one for one in self.leaving if self._kernel.mailbox.holds(one.leaving or 0)]:
            self.leaving.remove(seat)
            self._give_up(seat)
            self._kernel.arguments.holds.hold(seat.link, frozenset())
            heapq.heappush(self.free, seat.link)
        for connection in here:
            if connection not in self.seats:
                self._connect(connection)
        for seat in self.seats.values():
            self._hold(seat)

    def carry(self, connection: Connection) -> None:
        """Carry a step that the client has pushed. The port names the connection once per step."""
        seat = self.seats.get(connection)
        if seat is None:  # it has no link yet
            self._port.ring(connection)
        elif isinstance(seat.end, Carrier):
            if seat.end.is_wild:
                self.cut_off(connection, connection.requested())
            else:
                self.carrying.add(seat.end)

    def cut_off(self, connection: Connection, seq: int) -> None:
        """Disconnect a client that breaks the protocol."""
        client = connection.grant.client
        log.error("client signals steps beyond its slots: cut off", shard=self._index, client=client, seq=seq)
        self._disconnect(connection)

    def close(self) -> None:
        """Give all links up, once the kernel has stopped."""
        for seat in (*self.seats.values(), *self.leaving):
            self._give_up(seat)

    def _connect(self, connection: Connection) -> None:
        if not self.free:
            if not self.leaving:
                log.error("no link is free for another client", shard=self._index, most=MAX_LINKS)
                self._disconnect(connection)
            return
        try:
            end: GpuConnection | WorldConnection | Carrier
            if isinstance(connection, GpuConnection | WorldConnection):
                end = connection
            else:
                end = self._kernel.apart(lambda: Carrier(self._kernel.gpu, connection))  # it pins host memory
        except LoraServerError as error:
            log.error("a client's steps cannot be carried to the GPU", client=connection.grant.client, error=str(error))
            self._disconnect(connection)
            return
        seat = self.seats[connection] = KernelSeat(heapq.heappop(self.free), connection, end)
        self.at[seat.link] = seat
        self._kernel.reserve_link(seat.link)
        self._hold(seat)
        words = end.words | self._share(connection)
        self._post(CommandKind.CONNECT, seat.link, self._kernel.arguments.connect_words(seat.link, words))

    def _share(self, connection: Connection) -> dict[str, int]:
        """Return CONNECT's words about the client's tenant, and about its SLO class."""
        grant = connection.grant
        tenant = self._tenants.setdefault(grant.tenant, min(len(self._tenants), MAX_TENANTS - 1))
        return layout.share_words(tenant, grant.weight, grant.step_us)

    def _hold(self, seat: KernelSeat) -> None:
        """Tell the kernel which handles the client's steps may name."""
        own, lent = self._port.held(seat.connection.grant.client)
        if own is not seat.held[0] or lent is not seat.held[1]:
            seat.held = own, lent
            self._kernel.arguments.holds.hold(seat.link, own | lent)

    def _post(self, kind: CommandKind, link: int, words: list[int]) -> int:
        """Post a command. A kernel that has left takes none until this thread has launched it again."""
        while (number := self._kernel.mailbox.try_post(kind, link, words)) is None:
            self._kernel.look()
        return number

    def _give_up(self, seat: KernelSeat) -> None:
        seat.end.given_up.set()
        if isinstance(seat.end, Carrier):
            self._kernel.apart(seat.end.close)

    def _disconnect(self, connection: Connection) -> None:
        self._port.disconnect(connection)
        connection.close()


@dataclass
class KernelNotes:
    """Passes the kernel's notes on, in a thread of its own: the holder of the store's lock may wait for the host."""

    index: int
    store: WeightStore
    kernel: ServeKernel
    clients: KernelClients
    counters: StepCounters
    timings: Timings
    complain: Repeats = field(default_factory=lambda: Repeats(log.warning))

    def run(self, closing: threading.Event) -> None:
        """Read notes until the event is set."""
        while not closing.wait(self.timings.kernel_note):
            while not self.clients.gone.empty():
                self.store.forget(self.clients.gone.get())
            for note in self.kernel.mailbox.notes():
                self._heed(note)

    def _heed(self, note: Note) -> None:
        seat = self.clients.at.get(note.link)
        if seat is None:  # its client went
            return
        client = seat.connection.grant.client
        if note.kind is NoteKind.PREFETCH:
            until = time.monotonic() + self.timings.expected_step  # unless the step asks again
            self.store.prefetch([note.what], client, until)
        elif note.kind is NoteKind.REFUSED:
            self.counters.failed += 1
            why = Refusal(note.what).name.lower()
            self.complain((client, why), "step refused", shard=self.index, client=client, seq=note.seq, why=why)
        elif note.kind is NoteKind.CUT_OFF:
            self.clients.cut_off(seat.connection, note.seq)


@dataclass
class DeviceShardHost:
    """Serves one shard. The thread of `run` talks to clients and launches the kernel; a second one reads notes."""

    index: int
    port: Port
    store: WeightStore
    kernel: ServeKernel
    ready: Future[None] | None = None  # without it, the kernel may be launched at once
    timings: Timings = DEFAULTS
    counters: StepCounters = field(default_factory=StepCounters)
    phases: ClassVar[tuple[tuple[str, Histogram], ...]] = ()  # the kernel measures none
    by_tenant: ClassVar[PerTenant[StepCounters]] = PerTenant(StepCounters)  # nor does it tell tenants apart

    def __post_init__(self) -> None:
        self.clients = KernelClients(self.index, self.port, self.kernel)

    def run(self, stopped: Callable[[], bool]) -> None:
        """Serve until `stopped()`. Raises KernelLostError, after which the process must end."""
        notes = KernelNotes(self.index, self.store, self.kernel, self.clients, self.counters, self.timings)
        closing = threading.Event()
        reader = threading.Thread(target=notes.run, args=(closing,), name="kernel-notes", daemon=True)
        reader.start()
        if self._is_ready(stopped):
            self.kernel.start()
        while not stopped():
            self._round()
            notes.complain.flush()
            self.port.wait(CARRY_SECONDS if self.clients.carrying else self.timings.kernel_look)
        self.kernel.stop()
        closing.set()
        reader.join()
        self.clients.close()

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
        self.clients.update()
        self.kernel.look()
        self.counters.steps = self.kernel.mailbox.done
        for connection in self.port.rung():
            self.clients.carry(connection)
        carrying = self.clients.carrying
        for carrier in list(carrying):
            carrier.carry(self.port.respond)
            if not carrier.waits:
                carrying.discard(carrier)
