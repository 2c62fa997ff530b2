"""Joining a running server: gRPC for the lease, shared memory or ZeroMQ for the steps."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Sequence

import grpc
import tenacity
import zmq
from typing_extensions import override

from lora_server.errors import LeaseError, LoraServerError, ServerUnavailableError, ShardUnavailableError
from lora_server.placement import Layout
from lora_server.spec import PROJECTIONS, Invocation, ModelSpec, Site
from lora_server.transport.base import Link
from lora_server.transport.connect import check_transport, connect
from lora_server.transport.session import Held, Server, Session, Terms
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire import lora_server_pb2_grpc as rpc
from lora_server.wire import messages
from lora_server.wire.messages import Hello, Prefetch
from lora_server.wire.rpc import call

JOIN_SECONDS = 30.0
CALL_SECONDS = 10.0


class RemoteServer(Server):
    """A server at HOST:PORT; `transport` is one of connect.TRANSPORTS."""

    def __init__(self, address: str, transport: str = "auto", links: bool = True, device: str = "cpu") -> None:
        """Without `links` a session holds adapters, but cannot push steps. `device`: where activations are."""
        self.address, self.transport, self.links, self.device = address, check_transport(transport), links, device

    @override
    def join(self, seconds: float = JOIN_SECONDS) -> Session:
        """Tries until all shards are up."""
        retry = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type((ServerUnavailableError, ShardUnavailableError, LeaseError)),
            stop=tenacity.stop_after_delay(seconds),
            wait=tenacity.wait_random(0.1, 0.4),
            reraise=True,
        )
        session: Session = retry(RemoteSession, self, min(CALL_SECONDS, seconds))
        return session


class RemoteSession(Session):
    """A lease on a running server, kept alive by a heartbeat thread."""

    def __init__(self, server: RemoteServer, seconds: float) -> None:
        """One attempt; a call takes at most `seconds`."""
        self._server = server
        self._channel = grpc.insecure_channel(server.address)
        self._clients = rpc.ClientsStub(self._channel)
        self._left = threading.Event()
        self._lost: LoraServerError | None = None
        self.links: list[Link] = []
        request = pb.JoinRequest(instance=f"{socket.gethostname()}:{os.getpid()}")
        try:
            lease: pb.Lease = call(self._clients.Join, request, server=server.address, seconds=seconds)
        except BaseException:
            self._close()
            raise
        try:
            self._connect(lease)
        except BaseException:
            self.leave()
            raise
        threading.Thread(target=self._heartbeat, args=(lease.lease_seconds,), name="heartbeat", daemon=True).start()

    def _connect(self, lease: pb.Lease) -> None:
        spec = ModelSpec.from_json(lease.spec_json)
        layout = Layout.parse(lease.layout)
        coordination, rows = lease.coordination, lease.max_step_rows
        self.terms = Terms(lease.client, lease.epoch, spec, layout, coordination, rows, lease.server)
        hello = Hello(lease.client, lease.epoch, lease.key)
        endpoints = sorted(lease.endpoints, key=lambda endpoint: endpoint.shard)
        for endpoint in endpoints if self._server.links else ():
            self.links.append(connect(endpoint, hello, self._server.transport, self._server.device))
        self._prefetches: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._prefetches.setsockopt(zmq.LINGER, 0)
        self._prefetches.connect(lease.prefetch_address)
        self._prefetch_lock = threading.Lock()

    def _heartbeat(self, lease_seconds: float) -> None:
        last_answer = time.monotonic()
        beat = pb.HeartbeatRequest(client=self.terms.client, epoch=self.terms.epoch)
        while not self._left.wait(lease_seconds / 4):
            try:
                call(self._clients.Heartbeat, beat, server=self._server.address, seconds=lease_seconds / 2)
                last_answer = time.monotonic()
            except LeaseError as error:
                self._lost = error
                return
            except ValueError:  # left in this moment: the channel is closed
                return
            except LoraServerError as error:
                if time.monotonic() - last_answer > lease_seconds:
                    self._lost = LeaseError(f"client {self.terms.client}: no heartbeat got through: {error}")
                    return

    @override
    def acquire(self, names: Sequence[str]) -> list[Held]:
        request = pb.AcquireRequest(client=self.terms.client, epoch=self.terms.epoch, names=names)
        try:
            reply = call(self._clients.Acquire, request, server=self._server.address, seconds=CALL_SECONDS)
        except LeaseError as error:
            self._lost = error
            raise
        return [_held(one) for one in reply.adapters]

    @override
    def release(self, handles: Sequence[int]) -> None:
        """A lease that is gone holds nothing."""
        request = pb.ReleaseRequest(client=self.terms.client, epoch=self.terms.epoch, handles=handles)
        try:
            call(self._clients.Release, request, server=self._server.address, seconds=CALL_SECONDS)
        except (LeaseError, ServerUnavailableError) as error:
            self._lost = self._lost or error

    @override
    def prefetch(self, handles: Sequence[int]) -> None:
        message = messages.encode(Prefetch(list(handles)))
        with self._prefetch_lock:
            try:
                self._prefetches.send(message, zmq.DONTWAIT)
            except zmq.Again:
                return  # a hint: the step itself asks again

    @override
    def check(self) -> None:
        if self._lost is not None:
            raise LeaseError(str(self._lost))

    @override
    def leave(self) -> None:
        if self._left.is_set():
            return
        request = pb.LeaveRequest(client=self.terms.client, epoch=self.terms.epoch)
        try:
            call(self._clients.Leave, request, server=self._server.address, seconds=CALL_SECONDS)
        except LoraServerError as error:
            self._lost = self._lost or error  # the server is gone: so is the lease
        self._close()

    def _close(self) -> None:
        self._left.set()
        for link in self.links:
            link.close()
        prefetches = getattr(self, "_prefetches", None)
        if prefetches is not None:
            prefetches.close()
        self._channel.close()


def _held(one: pb.HeldAdapter) -> Held:
    invocation = None
    if one.HasField("invocation"):
        invocation = Invocation(tuple(one.invocation.tokens), one.invocation.text)
    return Held(one.name, one.handle, frozenset(_site(code) for code in one.sites), one.version, invocation)


def _site(code: int) -> Site:
    layer, projection = divmod(code, len(PROJECTIONS))
    return Site(layer, PROJECTIONS[projection])
