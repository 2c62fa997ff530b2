"""Joining a running server: gRPC for the lease, shared memory or TCP for the steps."""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from typing_extensions import override

from client_connector.prefetch import PrefetchSender
from client_connector.retry import while_away
from lora_server import telemetry
from lora_server.errors import (
    AdmissionError,
    LeaseError,
    LoraServerError,
    ServerUnavailableError,
    ShardUnavailableError,
)
from lora_server.placement import Layout
from lora_server.spec import PROJECTIONS, Invocation, ModelSpec, Site
from lora_server.timings import DEFAULTS, Timings
from lora_server.transport.base import Link
from lora_server.transport.connect import agreed_wire, check_transport, check_wire, connect, tell_far
from lora_server.transport.session import MAX_PREFETCHED, Held, Proof, Server, Session, Terms
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire import lora_server_pb2_grpc as rpc
from lora_server.wire.credentials import Credentials
from lora_server.wire.messages import Hello
from lora_server.wire.rpc import call, open_channel

JOIN_SECONDS = 30.0
LEAST_SECONDS = 0.05


class Queued(NamedTuple):
    """No place yet; `held` is what was asked for, as it will be if nobody replaces it."""

    position: int  # from 1 on
    reason: str
    held: list[Held]

    def refusal(self, names: Sequence[str]) -> str:
        """What to say to who cannot wait any longer."""
        return (
            f"adapters {list(names)}: still queued, at position {self.position}: {self.reason}; wait longer "
            "(timeout_seconds), use fewer adapters at once, or start the server with a larger --device-pool"
        )


class RemoteServer(Server):
    """A server at HOST:PORT; `transport` is one of connect.TRANSPORTS."""

    def __init__(
        self,
        address: str,
        transport: str = "auto",
        links: bool = True,
        device: str = "cpu",
        served_names: Sequence[str] = (),
        wire: str = "any",
        credentials: Credentials | None = None,
        timings: Timings = DEFAULTS,
    ) -> None:
        """Without `links` a session holds adapters, but cannot push steps. `device`: where activations are.

        `credentials`: what the server is shown; without them, those of the environment.
        `wire`: one of connect.WIRES, that the server must have.
        `served_names`: under which the engine answers from its base model; the server refuses adapters of such a name.
        """
        self.address, self.transport, self.links, self.device = address, check_transport(transport), links, device
        self.served_names, self.wire, self.credentials = served_names, check_wire(wire), credentials
        self.timings = timings
        telemetry.configure_from(os.environ, "lora-connector")

    @override
    def join(self, seconds: float = JOIN_SECONDS) -> RemoteSession:
        """Tries until all shards are up."""
        retry = while_away(seconds, ShardUnavailableError, LeaseError)
        with telemetry.span("lora.join", server=self.address):
            session: RemoteSession = retry(RemoteSession, self, time.monotonic() + seconds)
        return session

    def ask_terms(self, seconds: float = JOIN_SECONDS) -> Terms:
        """What a session would have, before one takes a place that it could not give back."""
        session = RemoteServer(self.address, links=False, credentials=self.credentials, timings=self.timings).join(
            seconds
        )
        session.leave()
        return session.terms


class RemoteSession(Session):
    """A lease on a running server, kept alive by a heartbeat thread. It outlives the server's controller: while
    that is away steps go on, and one that was restarted is told what is held here."""

    def __init__(self, server: RemoteServer, deadline: float) -> None:
        """One attempt, until `deadline` (time.monotonic()) at most."""
        self._server, self._timings = server, server.timings
        self._channel = open_channel(server.address, server.credentials)
        self._clients = rpc.ClientsStub(self._channel)
        self._left = threading.Event()
        self._lost: LoraServerError | None = None
        self._prefetches = PrefetchSender(self._clients.Prefetch)
        self._holding: Counter[int] = Counter()  # handle -> times acquired and not released
        self._unreleased: list[int] = []  # let go while the controller was away
        self._tickets = itertools.count(1)
        self._cancelled: list[int] = []  # tickets that the controller still has to hear of
        self._settled: list[int] = []  # tickets that it may forget
        self._lock = threading.Lock()  # these five
        self._telling = threading.Lock()  # one at a time
        self.links: list[Link] = []
        instance = f"{socket.gethostname()}:{os.getpid()}"
        request = pb.JoinRequest(instance=instance, served_names=server.served_names)
        try:
            if self._in_world:
                from client_connector import world

                world.check(server.device)
                request.place.CopyFrom(world.wanted())
            lease: pb.Lease = self._call(self._clients.Join, request, self._seconds(deadline))
        except BaseException:
            self._close()
            raise
        try:
            self._connect(lease, deadline)
        except BaseException:
            self.leave()
            raise

    @property
    def _in_world(self) -> bool:
        return self._server.links and self._server.transport == "nvshmem"

    def _connect(self, lease: pb.Lease, deadline: float) -> None:
        self._proof = pb.Proof(client=lease.client, epoch=lease.epoch, key=lease.key)  # first: `leave` shows it
        spec = ModelSpec.from_json(lease.spec_json)
        layout = Layout.parse(lease.layout)
        coordination, rows = lease.coordination, lease.max_step_rows
        hidden = tuple(lease.hidden_adapters)
        wire = agreed_wire(lease.wire, self._server.wire)
        self.terms = Terms(
            lease.client, lease.epoch, spec, layout, coordination, rows, lease.server, hidden, lease.adapters, wire
        )
        threading.Thread(target=self._heartbeat, args=(lease.lease_seconds,), name="heartbeat", daemon=True).start()
        if self._in_world:
            self._connect_world(lease, deadline)
            return
        hello = Hello(lease.client, lease.epoch, lease.key)
        endpoints = sorted(lease.endpoints, key=lambda endpoint: endpoint.shard) if self._server.links else []
        if self._server.transport == "auto":
            tell_far(endpoints)
        transport, device = self._server.transport, self._server.device
        for endpoint in endpoints:
            seconds = min(self._timings.handshake, self._seconds(deadline))
            self.links.append(connect(endpoint, hello, transport, device, seconds, self._timings))

    def _connect_world(self, lease: pb.Lease, deadline: float) -> None:
        from client_connector import world

        request = pb.WorldRequest(proof=self._proof)

        def ask() -> pb.Place:
            place: pb.Place = self._call(self._clients.World, request, self._seconds(deadline))
            return place

        def missing() -> str:
            status = rpc.ServerStub(self._channel).Status
            return str(self._call(status, pb.StatusRequest(), self._timings.release).reason)

        place = world.gathered(lease.place, ask, missing, deadline)
        entered = world.enter(place, self.terms, self._server.device)
        for link in world.links(entered, lease, lambda: self._lost is None):
            self.links.append(link)

    def _call(self, method: Any, request: Any, seconds: float | None = None) -> Any:
        seconds = self._timings.call if seconds is None else seconds
        return call(method, request, server=self._server.address, seconds=seconds)

    def _seconds(self, deadline: float) -> float:
        """Seconds for a call that has to end by then, and soon anyway; some, so that the server can say why it
        cannot."""
        return min(self._timings.call, max(deadline - time.monotonic(), LEAST_SECONDS))

    def _heartbeat(self, lease_seconds: float) -> None:
        while not self._left.wait(min(lease_seconds / 4, self._timings.heartbeat)):
            try:
                settled = list(self._settled)
                beat = pb.HeartbeatRequest(proof=self._proof, settled=settled)
                reply = self._call(self._clients.Heartbeat, beat, lease_seconds / 2)
                self._tell(reply.forgot, self._timings.call)
                with self._lock:
                    del self._settled[: len(settled)]
            except LeaseError as error:
                self._lost = error
                return
            except LoraServerError:  # it may come back: only the server itself ends a lease
                continue

    def _tell(self, forgot: bool, seconds: float) -> None:
        """What is held, to a controller that does not know; what was let go or cancelled, to one that was away."""
        deadline = time.monotonic() + seconds
        if not self._telling.acquire(timeout=seconds):
            raise ServerUnavailableError(f"server {self._server.address}: an earlier call is not answered yet")
        try:
            with self._lock:
                holding, unreleased, cancelled = list(self._holding.elements()), [*self._unreleased], [*self._cancelled]
            if forgot:
                restore = pb.RestoreRequest(proof=self._proof, handles=holding)
                self._call(self._clients.Restore, restore, self._seconds(deadline))
            elif unreleased:
                release = pb.ReleaseRequest(proof=self._proof, handles=unreleased)
                self._call(self._clients.Release, release, self._seconds(deadline))
            with self._lock:
                del self._unreleased[: len(unreleased)]
            if cancelled:
                cancel = pb.CancelRequest(proof=self._proof, tickets=cancelled)
                self._call(self._clients.Cancel, cancel, self._seconds(deadline))
                with self._lock:
                    del self._cancelled[: len(cancelled)]
                    self._settled += cancelled
        finally:
            self._telling.release()

    @override
    def acquire(self, names: Sequence[str], deadline: float = 0.0) -> list[Held]:
        ticket = self.ticket()
        try:
            seconds = self._seconds(deadline or float("inf"))
            while isinstance(answer := self.ask(ticket, names, seconds), Queued):
                left = deadline - time.monotonic()
                if left <= 0 or (not self.wait([ticket], left) and time.monotonic() >= deadline):
                    raise AdmissionError(answer.refusal(names))
            return answer
        except BaseException:
            self.cancel(ticket)
            raise

    def ticket(self) -> int:
        """For a new request; whoever asked with it and did not get an answer cancels it."""
        return next(self._tickets)

    def ask(
        self, ticket: int, names: Sequence[str], seconds: float | None = None, on_behalf_of: str = ""
    ) -> list[Held] | Queued:
        """Hold adapters, or be queued for them; to be asked again with the same ticket until it is not queued.

        `on_behalf_of`: the tenant whose request it is.
        """
        request = pb.AcquireRequest(proof=self._proof, names=names, ticket=ticket, on_behalf_of=on_behalf_of)
        try:
            reply = self._call(self._clients.Acquire, request, seconds)
        except LeaseError as error:
            self._lost = error
            raise
        except ServerUnavailableError:
            raise
        except LoraServerError:
            with self._lock:
                self._settled.append(ticket)
            raise
        held = [_held(one) for one in reply.adapters]
        if reply.position:
            return Queued(reply.position, reply.reason, held)
        with self._lock:
            self._holding.update(one.handle for one in held)
            self._settled.append(ticket)
        return held

    def wait(self, tickets: Sequence[int], seconds: float) -> list[int]:
        """Those of these that are not queued any more, as soon as there is one; none after a while."""
        began = time.monotonic()
        request = pb.AwaitRequest(proof=self._proof, tickets=tickets, seconds=seconds)
        reply = self._call(self._clients.Await, request)
        if (
            not reply.tickets and time.monotonic() - began < self._timings.queue_look
        ):  # more clients wait than it has threads for
            self._left.wait(min(seconds, self._timings.queue_look))
        return list(reply.tickets)

    def cancel(self, ticket: int) -> None:
        """Nobody waits for this ticket's answer; a controller that is away is told later."""
        if self._left.is_set():
            return
        with self._lock:
            self._cancelled.append(ticket)
        self._try_to_tell()

    @property
    @override
    def proof(self) -> Proof:
        return Proof(self._proof.client, self._proof.epoch, self._proof.key)

    @override
    def borrow(self, holder: Proof) -> None:
        lender = pb.Proof(client=holder.client, epoch=holder.epoch, key=holder.key)
        self._call(self._clients.Borrow, pb.BorrowRequest(proof=self._proof, holder=lender))

    @override
    def release(self, handles: Sequence[int]) -> None:
        """A lease that is gone holds nothing; a controller that is away is told later."""
        if self._left.is_set():
            return
        with self._lock:
            self._holding.subtract(handles)
            self._holding = +self._holding
            self._unreleased += handles
        self._try_to_tell()

    def _try_to_tell(self) -> None:
        try:
            self._tell(forgot=False, seconds=self._timings.release)
        except LeaseError as error:
            self._lost = self._lost or error
        except LoraServerError:
            return  # the next heartbeat tells it

    @override
    def prefetch(self, expected: Mapping[int, float]) -> None:
        first = islice(expected.items(), MAX_PREFETCHED)
        needs = [pb.Need(handle=handle, in_us=int(seconds * 1e6)) for handle, seconds in first]
        self._prefetches.send(pb.PrefetchRequest(proof=self._proof, needs=needs))

    @override
    def check(self) -> None:
        if self._lost is not None:
            raise LeaseError(str(self._lost))

    @override
    def leave(self) -> None:
        """Gives up what is here first; a server that is away notices by itself."""
        if self._left.is_set():
            return
        self._left.set()
        for link in self.links:
            link.close()
        unanswered = any(link.unanswered for link in self.links)
        request = pb.LeaveRequest(proof=self._proof, unanswered=unanswered)
        try:
            self._call(self._clients.Leave, request, self._timings.release)
        except LoraServerError as error:
            self._lost = self._lost or error
        self._close()

    def _close(self) -> None:
        self._left.set()
        self._prefetches.close()
        self._channel.close()


def _held(one: pb.HeldAdapter) -> Held:
    invocation = None
    if one.HasField("invocation"):
        invocation = Invocation(tuple(one.invocation.tokens), one.invocation.text)
    return Held(one.name, one.handle, frozenset(_site(code) for code in one.sites), one.version, invocation)


def _site(code: int) -> Site:
    layer, projection = divmod(code, len(PROJECTIONS))
    return Site(layer, PROJECTIONS[projection])
