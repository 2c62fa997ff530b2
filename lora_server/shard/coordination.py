"""In which order the shards of a stage serve: each for itself, or as its leader says.

A shard needs nothing from its peers to serve a step, so by default each picks its own (Independent).
In leader mode (paper section 5.1) the first shard of each stage picks, and broadcasts (client, epoch,
seq) to the others, which serve in that order; each still waits for its own signal, because the
leader's payload having arrived says nothing of theirs. An order whose step does not arrive (its
client died half-way) is kept until the client's own deadline, and holds nobody up.
"""

from __future__ import annotations

import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping

import zmq
from typing_extensions import override

from lora_server.ports import ANY_PORT, TcpPort
from lora_server.shard.schedule import FairShare, PendingStep
from lora_server.transport.address import bind, heartbeat
from lora_server.wire import messages
from lora_server.wire.messages import Order

STOP_POLL_MS = 100


class Coordinator(ABC):
    """Picks the next step among each client's oldest."""

    @abstractmethod
    def next(self, pending: Mapping[int, PendingStep]) -> PendingStep | None:
        """The step to serve now, or None."""

    def refused(self, client: int, epoch: int, seq: int, budget_us: int) -> None:  # noqa: B027
        """A step was answered with an error without ever being picked; Independent tells nobody."""

    def close(self) -> None:  # noqa: B027  (Independent holds nothing)
        """Give up sockets."""


class Independent(Coordinator):
    """Each shard for itself."""

    def __init__(self) -> None:
        self._rule = FairShare()

    @override
    def next(self, pending: Mapping[int, PendingStep]) -> PendingStep | None:
        return self._rule.pick(pending.values())


class Leader(Coordinator):
    """Picks, and tells the followers of its stage. `followers` counts those that listen now: they show its badge, and
    what anybody else sends counts for nothing."""

    def __init__(self, host: str, advertise: str = "", port: TcpPort = ANY_PORT) -> None:
        self._rule = FairShare()
        self._orders: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.XPUB)
        self._orders.set_hwm(0)
        self._orders.setsockopt(zmq.LINGER, 0)
        self._orders.setsockopt(zmq.XPUB_VERBOSER, 1)  # tell of every follower, not only of the first and last
        self._orders.setsockopt(zmq.MAXMSGSIZE, messages.MAX_MESSAGE_BYTES)
        self.address = bind(self._orders, host, advertise, port)
        self.badge, self.followers = secrets.token_bytes(16), 0

    @override
    def next(self, pending: Mapping[int, PendingStep]) -> PendingStep | None:
        """The order goes out before the step is served."""
        step = self._rule.pick(pending.values())
        if step is not None:
            self._order(step.connection.client, step.connection.epoch, step.seq, step.header.budget_us)
        self._count_followers()
        return step

    def refused(self, client: int, epoch: int, seq: int, budget_us: int) -> None:
        """The followers serve their part of it: the client waits for each."""
        self._order(client, epoch, seq, budget_us)

    def _order(self, client: int, epoch: int, seq: int, budget_us: int) -> None:
        self._orders.send(messages.encode(Order(client, epoch, seq, budget_us)))

    def _count_followers(self) -> None:
        while self._orders.poll(0):
            sign, topic = (said := self._orders.recv())[:1], said[1:]
            if topic == self.badge and sign in (b"\x00", b"\x01"):
                self.followers += 1 if sign == b"\x01" else -1

    @override
    def close(self) -> None:
        self._orders.close()


class Follower(Coordinator):
    """Serves in the leader's order; a thread listens to it and wakes the shard's loop.

    `depth`: steps that a client may have outstanding; orders of more of them are of steps that never came.
    """

    def __init__(self, ring: Callable[[], None], depth: int) -> None:
        self._ring, self._depth = ring, depth
        self._queue: deque[tuple[Order, int]] = deque()
        self._fresh = False  # an order came since the last look
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._leader, self._badge = "", b""

    def follow(self, address: str, badge: bytes) -> None:
        """Listen to this leader from now on, and forget what another one said."""
        if (address, badge) == (self._leader, self._badge):  # one that was restarted may have the same port
            return
        self.close()
        self._queue, self._fresh, self._leader, self._badge = deque(), False, address, badge
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._listen, args=(self._queue, self._stop), daemon=True, name="orders")
        self._thread.start()

    def _listen(self, queue: deque[tuple[Order, int]], stop: threading.Event) -> None:
        orders: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        orders.set_hwm(0)
        heartbeat(orders)
        orders.subscribe(b"")
        orders.subscribe(self._badge)  # after it: who is counted hears everything
        orders.setsockopt(zmq.IPV6, int("[" in self._leader))
        orders.connect(self._leader)
        while not stop.is_set():
            if orders.poll(STOP_POLL_MS):
                order = messages.decode(orders.recv(), Order)
                queue.append((order, time.monotonic_ns() + order.budget_us * 1000))
                self._fresh = True
                self._ring()
        orders.close(linger=0)

    def next(self, pending: Mapping[int, PendingStep]) -> PendingStep | None:
        """The first ordered step that has arrived here; what is blocked or late keeps its place."""
        self._fresh = False
        queue, now = self._queue, time.monotonic_ns()
        orders = tuple(queue)
        newest = {(order.client, order.epoch): order.seq for order, _ in orders}
        for order, expires_ns in orders:
            step = pending.get(order.client)
            if step is not None and step.connection.epoch == order.epoch:
                if step.seq == order.seq and not step.blocked:
                    queue.remove((order, expires_ns))
                    return step
                passed = step.seq > order.seq
            else:
                passed = False
            if passed or now > expires_ns or order.seq <= newest[order.client, order.epoch] - self._depth:
                queue.remove((order, expires_ns))
        return None

    def anything_new(self) -> bool:
        """Whether the leader spoke."""
        return self._fresh

    @override
    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
