"""In which order the shards of a stage serve: each for itself, or as its leader says.

A shard needs nothing from its peers to serve a step, so by default each picks its own (Independent).
In leader mode (paper section 5.1) the first shard of each stage picks, and broadcasts (client, epoch,
seq) to the others, which serve in that order; each still waits for its own signal, because the
leader's payload having arrived says nothing of theirs. A step that never arrives at a follower (its
client died half-way) is skipped after a bounded wait.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping

import zmq

from lora_server.wire import messages
from lora_server.wire.messages import Order
from lora_server.worker.schedule import DecodeFirst, Pending

FOLLOWER_PATIENCE_NS = 1_000_000_000
STOP_POLL_MS = 100


class Coordinator(ABC):
    """Picks the next step among each client's oldest."""

    @abstractmethod
    def next(self, pending: Mapping[int, Pending]) -> Pending | None:
        """The step to serve now, or None."""

    def anything_new(self) -> bool:
        """Whether `next` may say something else than before, apart from new signals."""
        return False

    def refused(self, client: int, epoch: int, seq: int) -> None:  # noqa: B027  (Independent tells nobody)
        """A step that was answered with an error without ever being picked."""

    def close(self) -> None:  # noqa: B027  (Independent holds nothing)
        """Give up sockets."""


class Independent(Coordinator):
    """Each shard for itself."""

    def __init__(self) -> None:
        self._rule = DecodeFirst()

    def next(self, pending: Mapping[int, Pending]) -> Pending | None:
        """See Coordinator."""
        return self._rule.pick(pending.values())


class Leader(Coordinator):
    """Picks, and tells the followers of its stage. `followers` counts those that listen now."""

    def __init__(self, host: str) -> None:
        self._rule = DecodeFirst()
        self._orders: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.XPUB)
        self._orders.set_hwm(0)
        self._orders.setsockopt(zmq.LINGER, 0)
        self._orders.setsockopt(zmq.XPUB_VERBOSER, 1)  # tell of every follower, not only of the first and last
        self.address = f"tcp://{host}:{self._orders.bind_to_random_port(f'tcp://{host}')}"
        self.followers = 0

    def next(self, pending: Mapping[int, Pending]) -> Pending | None:
        """See Coordinator; the order goes out before the step is served."""
        step = self._rule.pick(pending.values())
        if step is not None:
            self._order(step.connection.client, step.connection.epoch, step.seq)
        return step

    def refused(self, client: int, epoch: int, seq: int) -> None:
        """The followers serve their part of it: the client waits for each."""
        self._order(client, epoch, seq)

    def _order(self, client: int, epoch: int, seq: int) -> None:
        self._orders.send(messages.encode(Order(client, epoch, seq)))

    def anything_new(self) -> bool:
        """Counts followers that came or went."""
        while self._orders.poll(0):
            subscription: bytes = self._orders.recv()
            self.followers += 1 if subscription.startswith(b"\x01") else -1
        return False

    def close(self) -> None:
        """See Coordinator."""
        self._orders.close()


class Follower(Coordinator):
    """Serves in the leader's order; a thread listens to it and rings the shard's doorbell."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._queue: deque[tuple[Order, int]] = deque()
        self._fresh = False  # an order came since the last look
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def follow(self, address: str) -> None:
        """Listen to this leader from now on, and forget what another one said."""
        self.close()
        self._queue.clear()
        self._fresh = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._listen, args=(address, self._stop), daemon=True, name="orders")
        self._thread.start()

    def _listen(self, address: str, stop: threading.Event) -> None:
        orders: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        orders.set_hwm(0)
        orders.subscribe(b"")
        orders.connect(address)
        while not stop.is_set():
            if orders.poll(STOP_POLL_MS):
                order = messages.decode(orders.recv(), Order)
                self._queue.append((order, time.monotonic_ns()))
                self._fresh = True
                self._ring()
        orders.close(linger=0)

    def next(self, pending: Mapping[int, Pending]) -> Pending | None:
        """The first ordered step that has arrived here; what is blocked or late keeps its place."""
        self._fresh = False
        now = time.monotonic_ns()
        for order, ordered_ns in tuple(self._queue):
            step = pending.get(order.client)
            arrived = step is not None and (step.connection.epoch, step.seq) == (order.epoch, order.seq)
            if arrived and step is not None and not step.blocked:
                self._queue.remove((order, ordered_ns))
                return step
            if not arrived and now - ordered_ns > FOLLOWER_PATIENCE_NS:
                self._queue.remove((order, ordered_ns))
        return None

    def anything_new(self) -> bool:
        """Whether the leader spoke."""
        return self._fresh

    def close(self) -> None:
        """See Coordinator."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
