"""Joining a running server: gRPC for the lease, shared memory or TCP for the steps."""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

import structlog
from typing_extensions import override

from client_connector.connect import (
    agreed_wire,
    check_transport,
    check_wire,
    connect,
    connect_world,
    gathered,
    place_in_world,
    tell_far,
)
from client_connector.holds import Answer, Holdings, HoldSender, LoadingAnswer, QueuedAnswer
from client_connector.lease import LeaseCalls, PrefetchSender
from client_connector.moves import Move, MoveSlot
from client_connector.reconnect import while_away
from client_connector.session import Server, Session
from client_connector.twins import Preference, TwinLinks
from lora_server import telemetry
from lora_server.errors import (
    LeaseError,
    LoraServerError,
    ServerUnavailableError,
    ShardUnavailableError,
)
from lora_server.placement import Layout, Placement
from lora_server.spec import ModelSpec
from lora_server.timings import DEFAULTS, Timings
from lora_server.transport.base import Link
from lora_server.wire import bounds
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire.credentials import Credentials
from lora_server.wire.messages import Hello
from lora_server.wire.proofs import lend
from lora_server.wire.terms import MAX_PREFETCHED, Held, Proof, Terms
from lora_server.wire.waits import WaitHistograms

JOIN_SECONDS = 30.0
log = structlog.get_logger()


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
        slo_class: str = "",
        merged: str = "",
    ) -> None:
        """Describe a server; `join` connects. Without `links` a session holds adapters, but cannot push steps.

        `credentials`: without them, those of the environment.
        `wire`: one of connect.WIRES, that the server must have.
        `served_names`: the engine's names of its base model; the server refuses adapters of such a name.
        `slo_class`: one of the server's --classes, for this engine's requests and steps.
        `merged`: the adapter version in the engine's base weights, which no drain takes from a session that holds it.
        """
        self.address, self.transport, self.links, self.device = address, check_transport(transport), links, device
        self.wire, self.credentials, self.timings = check_wire(wire), credentials, timings
        names = [name for name in served_names if bounds.fits(name)]  # no adapter can have another
        self.joins = pb.JoinRequest(served_names=names, slo_class=slo_class, pushes=links, merged=merged)
        self.waits = WaitHistograms()  # of requests of which no heartbeat has told the server
        telemetry.configure_from(os.environ, "lora-connector")

    @override
    def join(self, seconds: float = JOIN_SECONDS) -> RemoteSession:
        """Join; wait until all shards are up."""
        retry = while_away(seconds, ShardUnavailableError, LeaseError)
        with telemetry.span("lora.join", server=self.address):
            session: RemoteSession = retry(RemoteSession, self, time.monotonic() + seconds)
        return session

    def ask_terms(self, seconds: float = JOIN_SECONDS) -> Terms:
        """Return the terms of a session without joining for good: a place in NVSHMEM's world cannot be given back."""
        server = RemoteServer(self.address, links=False, credentials=self.credentials, timings=self.timings)
        session = server.join(seconds)
        session.leave()
        return session.terms

    @property
    def in_world(self) -> bool:
        """Whether sessions take a place in NVSHMEM's world."""
        return self.links and self.transport == "nvshmem"


class RemoteSession(Session):
    """A lease on a running server, kept alive by a heartbeat thread. It outlives the server's controller."""

    def __init__(self, server: RemoteServer, deadline: float) -> None:
        """Join once, by `deadline` (time.monotonic())."""
        self._server = server
        self.calls = LeaseCalls(server.address, server.credentials, server.timings)
        self._holdings = Holdings()
        self._sender = HoldSender(self.calls, self._holdings, server.timings)
        self._prefetches = PrefetchSender(self.calls.clients.Prefetch)
        self._tickets = itertools.count(1)
        self._left = threading.Event()
        self.links: list[Link] = []
        self.endpoints: list[pb.Endpoint] = []  # of the shards, when it joined
        self.moves, self._moved_to = MoveSlot(), 0  # the generation of the last one
        request = pb.JoinRequest(instance=f"{socket.gethostname()}:{os.getpid()}")
        request.MergeFrom(server.joins)
        try:
            if server.in_world:
                request.place.CopyFrom(place_in_world(server.device))
            lease: pb.Lease = self.calls.call(self.calls.clients.Join, request, self.calls.within(deadline))
        except BaseException:
            self._close()
            raise
        try:
            self._connect(lease, deadline)
        except BaseException:
            self.leave()
            raise

    def _connect(self, lease: pb.Lease, deadline: float) -> None:
        self.calls.proof = Proof(lease.client, lease.epoch, lease.key)  # first: `leave` shows it
        layout = Layout.parse(lease.layout, lease.replicas or 1)
        self.terms = Terms(
            lease.client,
            lease.epoch,
            Placement(ModelSpec.from_json(lease.spec_json), layout, lease.generation),
            lease.coordination,
            lease.max_step_rows,
            lease.server,
            tuple(lease.hidden_adapters),
            lease.adapters,
            agreed_wire(lease.wire, self._server.wire),
            lease.base_weights,
        )
        threading.Thread(target=self._heartbeat, args=(lease.lease_seconds,), name="heartbeat", daemon=True).start()
        if self._server.in_world:
            calls = self.calls
            place = gathered(lease.place, lambda: calls.place(deadline), lambda: calls.status().reason, deadline)
            self.links += connect_world(place, self.terms, self._server.device, lambda: self.calls.lost is None)
            return
        self.endpoints = list(lease.endpoints)
        if self._server.links:
            preference = Preference(lease.replica, lease.failover_us * 1e-6) if layout.replicas > 1 else None
            placed = self.terms.placement, preference
            self.twins = self._open_links(self.links, placed, lease.endpoints, deadline)  # heartbeats mend it

    def _open_links(
        self,
        links: list[Link],
        placed: tuple[Placement, Preference | None],
        endpoints: Iterable[pb.Endpoint],
        deadline: float,
    ) -> TwinLinks | None:
        """Add a link to each shard of a placement; with a preference, to one of twins at least, and return them."""
        (placement, preference), chosen = placed, sorted(endpoints, key=lambda endpoint: endpoint.shard)
        if self._server.transport == "auto":
            tell_far(chosen)
        open_link = partial(self._open_link, generation=placement.generation)
        if preference is None:
            for endpoint in chosen:
                links.append(open_link(endpoint, deadline))
            return None
        twins = TwinLinks(links, open_link, placement, preference)
        twins.join(chosen, deadline)
        return twins

    def _open_link(self, endpoint: pb.Endpoint, until: float, generation: int = 1) -> Link:
        server, (client, epoch, key) = self._server, self.calls.proof
        seconds = min(server.timings.handshake, self.calls.within(until))
        hello = Hello(client, epoch, key, generation=generation)
        return connect(endpoint, hello, server.transport, server.device, seconds, server.timings)

    def _offer_move(self, move: pb.Move, deadline: float) -> None:
        """Connect to the shards of another placement, for the client to go by it. An error leaves it where it is: the
        next heartbeat tries again."""
        layout, links = Layout.parse(move.layout, self.terms.layout.replicas), list[Link]()
        offered = Move(replace(self.terms, placement=Placement(self.terms.spec, layout, move.generation)), links)
        try:
            placed = offered.terms.placement, self.twins.preference if self.twins is not None else None
            offered = offered._replace(twins=self._open_links(links, placed, move.endpoints, deadline))
            if self.calls.holder is not None:
                self.borrow(self.calls.holder)  # the new shards do not know of it
        except LoraServerError as error:
            offered.drop()
            log.warning("cannot move to the shards of another layout yet", layout=move.layout, reason=str(error))
            return
        self.moves.offer(offered)
        self._moved_to = move.generation
        log.info("connected to the shards of another layout", layout=move.layout, generation=move.generation)

    def _heartbeat(self, lease_seconds: float) -> None:
        pause = usual = self._server.timings.heartbeat
        while not self._left.wait(min(lease_seconds / 4, pause)):
            pause = usual  # if this one is lost: the lease goes on ending
            try:
                (generation, twins), seconds = self._placed(), lease_seconds / 2
                reply = self._beat(seconds, generation, twins.lacking() if twins is not None else ())
                pause = max(usual, reply.pause)
                self._sender.report(restores=reply.forgot)
                if reply.HasField("move") and reply.move.generation > self._moved_to:  # else it was offered already
                    self._offer_move(reply.move, time.monotonic() + seconds / 2)
                if twins is not None and reply.endpoints:
                    if self.calls.holder is not None:
                        self.borrow(self.calls.holder)  # a shard that was restarted does not know of it
                    twins.mend(reply.endpoints, time.monotonic() + seconds / 2)
            except LeaseError as error:
                self.calls.lost = error
                return
            except LoraServerError:  # the controller may come back: only the server itself ends a lease
                continue

    def _placed(self) -> tuple[int, TwinLinks | None]:
        """Return the placement generation that all current and later steps use, and its twin links; 0 if this session
        has no links of its own."""
        if not self.links or self._server.in_world:
            return 0, None
        if (move := self.moves.next()) is not None:
            return move.terms.placement.generation, move.twins
        twins = self.twins  # read once: the thread of the steps may adopt a move meanwhile
        return (self.terms.placement.generation if twins is None else twins.generation), twins

    def _beat(self, seconds: float, generation: int, lacking: Sequence[int]) -> pb.HeartbeatReply:
        """Send a heartbeat; return its answer. If that is lost, the next one tells the same waits again."""
        waits = self._server.waits.messages()
        request = pb.HeartbeatRequest(lacking=lacking, waits=waits, generation=generation)
        reply = self._holdings.beat(self.calls, seconds, request)
        self._server.waits.merge(waits, -1)
        return reply

    @override
    def acquire(self, names: Sequence[str], deadline: float = 0.0, loaded: bool = False) -> list[Held]:
        ticket, pace = self.ticket(), 0.0 if loaded else None
        try:
            seconds = self.calls.within(deadline or float("inf"))
            while not isinstance(answer := self.ask(ticket, names, seconds, pace=pace), list):
                left = deadline - time.monotonic()
                if left <= 0 or (not self.wait([ticket], left) and time.monotonic() >= deadline):
                    raise answer.refusal(names)
            return answer
        except BaseException:
            self.cancel(ticket)
            raise

    def ticket(self) -> int:
        """Number a new request. A caller that asked with a ticket and got no final answer cancels it."""
        return next(self._tickets)

    def ask(
        self,
        ticket: int,
        names: Sequence[str],
        seconds: float | None = None,
        on_behalf_of: str = "",
        pace: float | None = None,
    ) -> list[Held] | QueuedAnswer | LoadingAnswer:
        """Acquire adapters or queue for them; ask again with the same ticket until the answer is final, a list.

        `on_behalf_of`: the tenant of the request. `pace`: a LoadingAnswer comes while they load for longer than these
        seconds; None: the answer is final once they have a place.
        """
        seconds = self._server.timings.call if seconds is None else seconds
        try:
            return self.ask_soon(ticket, names, on_behalf_of, pace).result(seconds)
        except TimeoutError:
            raise ServerUnavailableError(f"server {self.calls.address}: no answer within {seconds:g} s") from None

    def ask_soon(self, ticket: int, names: Sequence[str], on_behalf_of: str = "", pace: float | None = None) -> Answer:
        """Ask as `ask` does, without waiting for the answer. The future's callbacks must not block."""
        pace_us = None if pace is None else round(pace * 1e6)
        request = pb.AcquireRequest(names=names, ticket=ticket, on_behalf_of=on_behalf_of, pace_us=pace_us)
        return self._sender.acquire(request)

    def wait(self, tickets: Sequence[int], seconds: float) -> list[int]:
        """Return the tickets that are answered, as soon as there is one; none after `seconds`, or sooner."""
        began = time.monotonic()
        reply = self.calls.begin_wait(tickets, seconds).result()
        answered = [] if reply is None else list(reply.tickets)
        if not answered and time.monotonic() - began < self._server.timings.queue_look:
            self._left.wait(
                min(seconds, self._server.timings.queue_look)
            )  # the controller had no thread left to wait in
        return answered

    def cancel(self, ticket: int, *, waits: bool = True) -> None:
        """Cancel a ticket; a controller that is away hears of it later."""
        self._holdings.cancel(ticket)
        self._sender.report(seconds=self._server.timings.release if waits else 0.0)

    @property
    @override
    def proof(self) -> Proof:
        return self.calls.proof

    @override
    def borrow(self, holder: Proof) -> None:
        lent = lend(holder.key, self.proof.client, self.proof.epoch)
        lender = pb.Proof(client=holder.client, epoch=holder.epoch, mac=lent)
        self.calls.call(self.calls.clients.Borrow, pb.BorrowRequest(holder=lender))
        self.calls.holder = holder

    @override
    def release(self, handles: Sequence[int], *, waits: bool = True) -> None:
        """Release handles; a controller that is away hears of it later. A lease that is gone holds nothing."""
        self._holdings.release(handles)
        self._sender.report(seconds=self._server.timings.release if waits else 0.0)

    @override
    def prefetch(self, expected: Mapping[int, float]) -> None:
        first = islice(expected.items(), MAX_PREFETCHED)
        needs = [pb.Need(handle=handle, in_us=int(seconds * 1e6)) for handle, seconds in first]
        request = pb.PrefetchRequest(needs=needs)
        self.calls.sign(request)
        self._prefetches.send(request)

    @override
    def check(self) -> None:
        if self.calls.lost is not None:
            raise LeaseError(str(self.calls.lost))

    @override
    def leave(self) -> None:
        """Close the links, then give the lease back; a server that is away lets it expire."""
        if self._left.is_set():
            return
        self._left.set()
        if self.twins is not None:
            self.twins.close()
        self.moves.close()
        for link in self.links:
            link.close()
        request = pb.LeaveRequest(unanswered=any(link.unanswered for link in self.links))
        try:
            self.calls.call(self.calls.clients.Leave, request, self._server.timings.release)
        except LoraServerError as error:
            self.calls.lost = self.calls.lost or error
        self._close()

    def _close(self) -> None:
        self._left.set()
        self._sender.close()
        self._prefetches.close()
        self.calls.close()
