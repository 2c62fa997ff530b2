"""Coordination of the shards of a stage: each picks its own steps, or all follow a leader.

A shard needs nothing from its peers to serve a step, so by default each picks its own (Independent). In leader mode
(paper section 5.1) the first shard of each stage picks, and broadcasts (client, epoch, seq) to the others, which serve
in that order. Each still waits for its own signal: the leader's payload may arrive before theirs. If an order's step
does not arrive (its client died half-way), the order is kept until the client's deadline and delays no other. In leader
mode a step that was begun is finished; only independent shards let small ones pass it.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping

from typing_extensions import override

from lora_server.ports import ANY_PORT, TcpPort
from lora_server.shard.orders import OrderReceiver, OrderSender
from lora_server.shard.schedule import PendingStep, TenantShare, begun
from lora_server.timings import Timings
from lora_server.transport.tls import ShardCertificate
from lora_server.wire import messages
from lora_server.wire.messages import Order


def new_badge() -> bytes:
    """Return a new secret of a leader; its followers' badges are derived from it."""
    return secrets.token_bytes(messages.NONCE_BYTES)


class StageRole:
    """Role of a shard in its stage. In leader mode one shard has an address and a badge, and the others follow it, each
    with a badge of its own."""

    address: str = ""
    badge: bytes = b""

    @property
    def followers(self) -> int:
        """Return the number of connected followers."""
        return 0

    def follow(self, address: str, badge: bytes, certificate: bytes = b"") -> None:
        """Follow this leader, with this shard's own badge. Called on followers only."""

    def close(self) -> None:
        """Close sockets."""


class Coordinator(StageRole, ABC):
    """Picks the next step among each client's oldest."""

    @abstractmethod
    def next(self, pending: Mapping[int, PendingStep]) -> PendingStep | None:
        """Return the step to serve now, or to go on with, or None."""


class Independent(Coordinator):
    """Picks by the shard's own schedule."""

    def __init__(self) -> None:
        self._rule = TenantShare()

    @override
    def next(self, pending: Mapping[int, PendingStep]) -> PendingStep | None:
        return self._rule.pick(pending)


class Leader(Coordinator):
    """Picks, and sends the order to the followers of its stage, which know its badge."""

    def __init__(
        self,
        host: str,
        advertise: str = "",
        port: TcpPort = ANY_PORT,
        certificate: ShardCertificate | None = None,
        handshake_seconds: float = Timings.handshake,
    ) -> None:
        self._rule = TenantShare()
        self.badge = new_badge()
        self._orders = OrderSender(self.badge, host, advertise, port, certificate, handshake_seconds)
        self.address = self._orders.address

    @property
    @override
    def followers(self) -> int:
        return self._orders.followers

    @override
    def next(self, pending: Mapping[int, PendingStep]) -> PendingStep | None:
        """Send the order before the step is served, or refused: its client waits for the followers' parts, too."""
        under_way = begun(pending.values())
        if under_way:
            return under_way[0]
        picked = self._rule.pick(pending)
        if picked is not None:
            client, epoch = picked.connection.grant.client, picked.connection.grant.epoch
            self._orders.send(Order(client, epoch, picked.seq, picked.header.budget_us))
        return picked

    @override
    def close(self) -> None:
        self._orders.close()


class Follower(Coordinator):
    """Serves in the leader's order, which a thread receives; it wakes the shard's loop.

    `depth`: steps that a client may have in flight. Older orders of that client are for steps that never came.
    """

    def __init__(
        self, shard: int, ring: Callable[[], None], depth: int, handshake_seconds: float = Timings.handshake
    ) -> None:
        self._shard, self._ring, self._depth, self._handshake_seconds = shard, ring, depth, handshake_seconds
        self._queue: deque[tuple[Order, int]] = deque()
        self._leader = "", b"", b""
        self._orders: OrderReceiver | None = None

    @override
    def follow(self, address: str, badge: bytes, certificate: bytes = b"") -> None:
        """Follow this leader, and forget the orders of another one."""
        leader = address, badge, certificate
        if leader == self._leader:  # the badge differs where a restarted leader has the same port
            return
        self.close()
        self._queue, self._leader = deque(), leader
        self._orders = OrderReceiver(address, self._shard, badge, self._take, certificate, self._handshake_seconds)

    def _take(self, order: Order) -> None:
        self._queue.append((order, time.monotonic_ns() + order.budget_us * 1000))
        self._ring()

    def next(self, pending: Mapping[int, PendingStep]) -> PendingStep | None:
        """Return the first ordered step that has arrived; one that is blocked or late keeps its place.

        A refused step waits for no order: its order may have expired.
        """
        first = next((one for one in pending.values() if one.work is not None or one.refusal is not None), None)
        if first is not None:
            return first
        queue, now = self._queue, time.monotonic_ns()
        orders = tuple(queue)
        newest = {(order.client, order.epoch): order.seq for order, _ in orders}
        for order, expires_ns in orders:
            step = pending.get(order.client)
            if step is not None and step.connection.grant.epoch == order.epoch:
                if step.seq == order.seq and not step.blocked:
                    queue.remove((order, expires_ns))
                    return step
                passed = step.seq > order.seq
            else:
                passed = False
            if passed or now > expires_ns or order.seq <= newest[order.client, order.epoch] - self._depth:
                queue.remove((order, expires_ns))
        return None

    @override
    def close(self) -> None:
        if self._orders is not None:
            self._orders.close()
            self._orders = None
