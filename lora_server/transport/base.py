"""The transport interface, and what a shard keeps of its clients whatever the backend.

Client side, one `Link` per shard:        Shard side, one `Port` with a `Connection` per client:
    fill link.region.request(seq)             scan port.connections for new request signals
    link.push(seq, nbytes)                    fill connection.region.response(seq)
    link.wait(seq, deadline)                  connection.respond(seq, nbytes)

A push is one-sided: payload, then signal; nobody is asked. seq counts from 1 per (client, shard).
"""

from __future__ import annotations

import hmac
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lora_server.errors import LeaseError, ShardUnavailableError, StepTimeoutError
from lora_server.transport.park import LocalParker, Parker
from lora_server.wire import slot
from lora_server.wire.messages import Hello
from lora_server.wire.region import Region, RegionLayout
from lora_server.wire.slot import RequestHeader

if TYPE_CHECKING:
    import torch


POLL_SECONDS = 200e-6


class Link(ABC):
    """A client's end of its region on one shard. One thread at a time."""

    region: Region
    epoch: int
    shard: int

    @abstractmethod
    def push(self, seq: int, nbytes: int) -> None:
        """Hand over the first `nbytes` of `region.request(seq)`. Does not block on the shard.

        The caller has consumed the response to seq - depth. Raises ShardUnavailableError.
        """

    @abstractmethod
    def wait(self, seq: int, deadline: float) -> None:
        """Block until `region.response(seq)` is there; deadline is time.monotonic().

        Raises StepTimeoutError at the deadline, ShardUnavailableError when the shard is gone.
        """

    @abstractmethod
    def check(self) -> None:
        """Raises ShardUnavailableError if the shard is known to be gone."""

    @abstractmethod
    def close(self) -> None:
        """Give the region up; idempotent."""

    def responded(self) -> int:
        """The newest seq whose response is there."""
        return slot.signalled_seq(self.region.response_signal[0], self.epoch)

    def _timeout(self, seq: int) -> StepTimeoutError:
        return StepTimeoutError(
            f"shard {self.shard} slot {seq % self.region.layout.depth} seq {seq}: no answer before the deadline "
            f"(last answered: seq {self.responded()}); is the shard overloaded or stopped?"
        )

    def _gone(self, seq: int) -> ShardUnavailableError:
        return ShardUnavailableError(
            f"shard {self.shard} slot {seq % self.region.layout.depth} seq {seq}: the shard closed the connection "
            "(it died, or it revoked this client's lease); the next request joins anew"
        )


class DeviceLink(Link):
    """A link whose rows stay in device memory; see transport.cuda_ipc."""

    @abstractmethod
    def put_rows(self, header: RequestHeader, x_TK: torch.Tensor, rows_M: torch.Tensor) -> None:
        """The next push sends rows `rows_M` of x, which nobody writes to until its answer was waited for."""


class Connection(ABC):
    """A shard's end of one client's region."""

    client: int
    epoch: int
    region: Region
    served: int = 0  # the newest seq that was answered
    polled: bool = False  # its signals come from a GPU, which rings no doorbell

    @abstractmethod
    def respond(self, seq: int, nbytes: int) -> None:
        """Push the first `nbytes` of `region.response(seq)`, then its signal. Never raises for a dead client."""

    def close(self) -> None:  # noqa: B027  (most backends hold nothing)
        """Let the client know that the region is given up; idempotent."""

    def requested(self) -> int:
        """The newest seq that the client has pushed."""
        return slot.signalled_seq(self.region.request_signal[0], self.epoch)


@dataclass(frozen=True)
class Grant:
    """What the controller lets a client do here."""

    client: int
    epoch: int
    key: bytes


class Port:
    """A shard's clients. Listeners add and remove from their threads; the shard loop only reads."""

    def __init__(self, layout: RegionLayout, on_gone: Callable[[int, int], None] | None = None) -> None:
        self.layout = layout
        self.connections: tuple[Connection, ...] = ()
        self._grants: dict[int, Grant] = {}
        self._lock = threading.Lock()
        self._on_gone = on_gone
        self._parker: Parker | LocalParker = LocalParker()

    def share_doorbell(self, memory: memoryview) -> None:
        """Take the doorbell page from memory that clients can map, before any client connects."""
        self._parker = Parker(memory[0:4])

    def grant(self, grant: Grant) -> None:
        """Let a client connect under this epoch; an older epoch of it is cut off."""
        self.revoke(grant.client)
        with self._lock:
            self._grants[grant.client] = grant

    def revoke(self, client: int) -> None:
        """Cut a client off; its late pushes land in memory that nobody reads."""
        with self._lock:
            self._grants.pop(client, None)
            gone = [connection for connection in self.connections if connection.client == client]
            self.connections = tuple(c for c in self.connections if c.client != client)
        for connection in gone:
            connection.close()

    def admit(self, hello: Hello) -> Grant:
        """The grant that a Hello names; raises LeaseError for any other."""
        with self._lock:
            grant = self._grants.get(hello.client)
        if grant is None or grant.epoch != hello.epoch or not hmac.compare_digest(grant.key, hello.key):
            raise LeaseError(f"client {hello.client} epoch {hello.epoch}: no such lease on this shard; join again")
        return grant

    def connect(self, connection: Connection) -> None:
        """A client has its region; the loop sees it from its next round on."""
        with self._lock:
            grant = self._grants.get(connection.client)
            if grant is None or grant.epoch != connection.epoch:
                raise LeaseError(f"client {connection.client}: its lease was revoked while it connected")
            replaced = [c for c in self.connections if c.client == connection.client]
            kept = tuple(c for c in self.connections if c.client != connection.client)
            self.connections = (*kept, connection)
        for older in replaced:
            older.close()

    def disconnect(self, connection: Connection) -> None:
        """A client closed, died, or broke the rules."""
        with self._lock:
            known = connection in self.connections
            self.connections = tuple(c for c in self.connections if c is not connection)
        if known and self._on_gone is not None:
            self._on_gone(connection.client, connection.epoch)

    def ring(self) -> None:
        """Wake the shard's loop."""
        self._parker.wake()

    def wait(self, ready: Callable[[], bool], seconds: float) -> bool:
        """The loop: wait until ready(), at most one bounded sleep; a short one while a client has to be polled."""
        if any(connection.polled for connection in self.connections):
            seconds = min(seconds, POLL_SECONDS)
        return self._parker.wait(ready, time.monotonic() + seconds)
