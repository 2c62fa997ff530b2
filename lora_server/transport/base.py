"""The transport interface, and a shard's table of clients, for every backend.

Client side, one `Link` per shard:        Shard side, one `Port` with a `Connection` per client:
    fill link.region.request(seq)             take what port.rung() says
    link.put_rows(header, x, rows)            read connection.rows.request(header)
    link.push(seq, nbytes)                    fill connection.rows.response(header), then the header before it
    link.wait(seq, deadline)                  port.respond(connection, seq, nbytes)
    read link.rows.deltas(header, x)

A push is one-sided, without permission: payload, then signal. seq counts from 1 per (client, shard).
"""

from __future__ import annotations

import hmac
import math
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

from lora_server.errors import LeaseError, ProtocolError, ShardUnavailableError, StepTimeoutError
from lora_server.transport.bells import MAX_WATCHED, Bell, Bells
from lora_server.wire import slot
from lora_server.wire.messages import Hello
from lora_server.wire.region import Region, RegionLayout
from lora_server.wire.slot import RequestHeader

if TYPE_CHECKING:
    import torch

    from kernels_cuda.routing import Choice, Route
    from lora_server.transport.rows import Rows


_NOTHING: frozenset[int] = frozenset()


def _slot_rows(end: Link | Connection) -> Rows:
    from lora_server.transport.rows import SlotRows  # torch: a client that only holds adapters needs none

    return SlotRows(end.region)


class Link(ABC):
    """A client's end of its region on one shard. One thread at a time."""

    region: Region
    rows = cached_property(_slot_rows)  # of the region's steps
    epoch: int
    shard: int
    transport: str  # the chosen one, if `auto` was asked for
    host = ""  # of the shard, where a network lies between
    device: torch.device | None = None  # activations on this device need not pass through the host
    unanswered = False  # of a closed link: a pushed step may still arrive
    why_gone = "the shard closed the connection (it died, or it revoked this client's lease)"

    def put_rows(self, header: RequestHeader, x_TK: torch.Tensor, rows_M: torch.Tensor) -> None:
        """Copy rows `rows_M` (int64 on the host, or int32 where x is) of x into a request. Raises ProtocolError.

        The caller must not write to x before it has waited for the answer.
        """
        self.rows.fill(header, x_TK, rows_M)

    def put_routed(self, header: RequestHeader, x_TK: torch.Tensor, choice: Choice, by_entry: bool) -> None:
        """Do what `put_rows` does for a step that `device` routes, and complete header and tables there.

        Only links with a device can; raises ProtocolError otherwise.

        `by_entry`: a row per entry, weighted and summed per token, instead of a row per token.
        """
        raise ProtocolError(f"shard {self.shard}: this link routes nothing; give it rows")

    def routed(self, seq: int) -> Route:
        """Return how a step of `put_routed` was routed, on `device`, once its answer is there."""
        raise ProtocolError(f"shard {self.shard}: this link routes nothing")

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

    def consumed(self, request_bytes: int, response_bytes: int, idle: bool) -> None:  # noqa: B027
        """Note that a step of so many bytes is done; `idle`: no other is outstanding on this link."""

    @abstractmethod
    def check(self) -> None:
        """Raise ShardUnavailableError if the shard is known to be gone."""

    @abstractmethod
    def close(self) -> None:
        """Give the region up; idempotent."""

    def responded(self) -> int:
        """Return the newest seq that was answered."""
        return slot.signalled_seq(self.region.response_signal[0], self.epoch)

    def _timeout(self, seq: int) -> StepTimeoutError:
        return StepTimeoutError(
            f"shard {self.shard} slot {seq % self.region.layout.depth} seq {seq}: no answer before the deadline "
            f"(last answered: seq {self.responded()}); is the shard overloaded or stopped?"
        )

    def _gone(self, seq: int) -> ShardUnavailableError:
        return ShardUnavailableError(
            f"shard {self.shard} slot {seq % self.region.layout.depth} seq {seq}: {self.why_gone}; the next request "
            "joins anew"
        )


class Connection(ABC):
    """A shard's end of one client's region."""

    region: Region
    rows = cached_property(_slot_rows)  # of the region's steps
    transport: str  # as a client asks for it, or tls: tcp that is encrypted
    grant: Grant
    served: int = 0  # the newest seq that was answered
    finish = 0  # of its share of the loop, see shard.schedule
    gone = False  # the client does not wait for answers any more
    rings: ClassVar[bool] = True  # when it has pushed, unless the loop looks at its signal
    bell: Bell | None = None  # in the client's own hands

    @abstractmethod
    def respond(self, seq: int, nbytes: int) -> None:
        """Push the first `nbytes` of `region.response(seq)`, then its signal. Never raises for a dead client."""

    def close(self) -> None:  # noqa: B027
        """Let the client know that the region is given up; idempotent."""

    def requested(self) -> int:
        """Return the newest seq that the client has pushed."""
        return slot.signalled_seq(self.region.request_signal[0], self.grant.epoch)

    def pause(self) -> float:
        """Return for how many seconds the loop need not check this client's signal: any number, if it rings."""
        return math.inf


class Mirror(Protocol):
    """Device memory for the rows of one client, allocated by its shard."""

    rows: Rows
    kind: Literal["fd", "ipc", "slots"]  # how a client finds it; slots: by `fd`, whole slots instead of rows
    handle: bytes
    fd: int

    def free(self) -> bool:
        """Free the memory once no step uses it; return False while the client could still access it."""
        ...


class DeviceMemory(Protocol):
    """Device memory that a shard on a GPU gives its clients. Thread-safe. `slots`: its mirrors are slots."""

    slots: ClassVar[bool]

    def mirror(self, layout: RegionLayout, pid: int) -> Mirror:
        """Allocate a mirror for a client's process; raises ShardUnavailableError if that cannot be done."""
        ...

    def pin(self, memory: memoryview) -> Callable[[], None]:
        """Let the GPU copy from and to host memory at full speed, until the result (which keeps nothing) is called."""
        ...


def pin(connection: Connection, device: DeviceMemory | None) -> None:
    """Pin the slots of a connection for as long as the connection is referenced, by the loop for example."""
    if device is not None:
        weakref.finalize(connection, device.pin(connection.region.memory)).atexit = False


@dataclass(frozen=True)
class Grant:
    """The controller's permission for a client to push steps to this shard."""

    client: int
    epoch: int
    key: bytes
    tenant: str = ""  # the operator
    weight: float = 1.0  # of the tenant, beside others
    pe: int = 0  # in NVSHMEM's world; 0, a shard's: none
    generation: int = 1  # of the placement that the client was told
    step_us: int = 0  # each step's part of its SLO class's TPOT; 0: it has no class

    def require(self, generation: int) -> None:
        """Raise LeaseError for a client that shows another generation: its rows may belong to other shards."""
        if generation != self.generation:
            raise LeaseError(
                f"client {self.client}: got placement generation {generation}, expected {self.generation}; join again"
            )


class GrantTable:
    """The grants of all clients. Thread-safe."""

    def __init__(self) -> None:
        self._grants: dict[int, Grant] = {}

    def put(self, grant: Grant) -> None:
        """Keep a client's grant, in place of an earlier one."""
        self._grants[grant.client] = grant

    def drop(self, client: int) -> None:
        """Forget a client's grant; idempotent."""
        self._grants.pop(client, None)

    def get(self, client: int, epoch: int) -> Grant | None:
        """Return a client's grant of this epoch. The caller still has to check that it talks to that client."""
        grant = self._grants.get(client)
        return grant if grant is not None and grant.epoch == epoch else None

    def admit(self, hello: Hello) -> Grant:
        """Return the grant that a Hello proves; raises LeaseError for any other."""
        grant = self.get(hello.client, hello.epoch)
        if grant is None or not hmac.compare_digest(grant.key, hello.key):
            raise LeaseError(f"client {hello.client} epoch {hello.epoch}: no such lease on this shard; join again")
        grant.require(hello.generation)
        return grant


class Port:
    """A shard's clients. Listeners add and remove from their threads; the shard loop only reads."""

    def __init__(
        self,
        layout: RegionLayout,
        on_gone: Callable[[int, int], None] | None = None,
        max_watched: int = MAX_WATCHED,
    ) -> None:
        self.layout = layout
        self.connections: tuple[Connection, ...] = ()
        self.grants = GrantTable()
        self._holds: dict[int, frozenset[int]] = {}  # by client
        self._lenders: dict[int, int] = {}  # by client that borrows
        self._lock = threading.Lock()
        self._on_gone = on_gone
        self._bells = Bells[Connection](max_watched)

    def grant(self, grant: Grant) -> None:
        """Let a client connect under this epoch; cut its older epoch off, or its older placement. A grant that is
        repeated changes nothing."""
        known = self.grants.get(grant.client, grant.epoch)
        if known is None or known.generation != grant.generation:
            self.revoke(grant.client)
        self.grants.put(grant)
        for connection in self.connections:
            if connection.grant.client == grant.client:
                connection.grant = grant

    def revoke(self, client: int) -> None:
        """Cut a client off; its late pushes land in memory that is not read any more."""
        with self._lock:
            self.grants.drop(client)
            self._holds.pop(client, None)
            self._lenders.pop(client, None)
            gone = [connection for connection in self.connections if connection.grant.client == client]
            self.connections = tuple(c for c in self.connections if c.grant.client != client)
        for connection in gone:
            self._part(connection)
            connection.close()

    def hold(self, client: int, more: Iterable[int], fewer: Iterable[int] = (), anew: bool = False) -> None:
        """Add and remove handles that a client holds; `anew`: `more` is the whole set."""
        with self._lock:
            before = _NOTHING if anew else self._holds.get(client, _NOTHING)
            self._holds[client] = (before - set(fewer)) | set(more)
        self.ring()

    def borrow(self, client: int, holder: int) -> None:
        """Let a client use what another client holds, too."""
        with self._lock:
            self._lenders[client] = holder
        self.ring()

    def held(self, client: int) -> tuple[frozenset[int], frozenset[int]]:
        """Return the handles that a client holds, and those lent to it: the same objects until they change."""
        return self._holds.get(client, _NOTHING), self._holds.get(self._lenders.get(client, 0), _NOTHING)

    def not_held(self, client: int, handles: frozenset[int]) -> frozenset[int]:
        """Return the handles that neither the client nor its lender holds."""
        lacking = handles - self._holds.get(client, _NOTHING)
        return lacking - self._holds.get(self._lenders.get(client, 0), _NOTHING) if lacking else lacking

    def connect(self, connection: Connection) -> None:
        """Add a client's connection; the loop serves it from its next round on. Raises LeaseError."""
        with self._lock:
            grant = self.grants.get(connection.grant.client, connection.grant.epoch)
            if grant is None:
                raise LeaseError(f"client {connection.grant.client}: its lease was revoked while it connected")
            connection.grant = grant
            replaced = [c for c in self.connections if c.grant.client == connection.grant.client]
            kept = tuple(c for c in self.connections if c.grant.client != connection.grant.client)
            self.connections = (*kept, connection)
            self._bells.add(connection)
        for older in replaced:
            self._part(older)
            older.close()

    def disconnect(self, connection: Connection) -> None:
        """Remove the connection of a client that closed it, died, or broke the protocol."""
        with self._lock:
            known = connection in self.connections
            self.connections = tuple(c for c in self.connections if c is not connection)
        if known:
            self._part(connection)
            if self._on_gone is not None:
                self._on_gone(connection.grant.client, connection.grant.epoch)

    def _part(self, connection: Connection) -> None:
        connection.gone = True
        self._bells.drop(connection)

    def ring(self, connection: Connection | None = None) -> None:
        """Wake the shard's loop; with a connection, to check whether that client pushed."""
        self._bells.call(connection)

    # -- the loop's

    def rung(self) -> list[Connection]:
        """Return clients with a new step. Each is returned once per step, except after a ring without a push."""
        return self._bells.rung()

    def respond(self, connection: Connection, seq: int, nbytes: int) -> None:
        """Answer a step, after which `rung` may return the client's next one."""
        connection.served = seq
        connection.respond(seq, nbytes)
        self._bells.answered(connection)

    def wait(self, seconds: float) -> None:
        """Wait until a client rang or pushed since `rung`: at most one bounded sleep."""
        self._bells.wait(seconds)
