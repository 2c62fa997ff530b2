"""Joining a running server: gRPC for the lease, shared memory or ZeroMQ for the steps."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Sequence

import grpc
import zmq

from lora_server.errors import ConfigError, LeaseError, LoraServerError, ServerUnavailableError
from lora_server.placement import Layout
from lora_server.spec import PROJECTIONS, ModelSpec, Site
from lora_server.transport.base import Link
from lora_server.transport.session import Held, Session, Terms
from lora_server.transport.shm import ShmLink
from lora_server.transport.zmq import ZmqLink
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire import lora_server_pb2_grpc as rpc
from lora_server.wire import messages
from lora_server.wire.host import host_identity
from lora_server.wire.messages import Hello, Prefetch
from lora_server.wire.rpc import call

TRANSPORTS = ("auto", "shm", "zmq")
JOIN_SECONDS = 60.0
CALL_SECONDS = 10.0


class RemoteServer:
    """A server at HOST:PORT; `transport` is one of TRANSPORTS. Implements transport.session.Server."""

    def __init__(self, address: str, transport: str = "auto", join_seconds: float = JOIN_SECONDS) -> None:
        if transport not in TRANSPORTS:
            raise ConfigError(f"transport: got {transport!r}, expected one of {', '.join(TRANSPORTS)}")
        self.address, self.transport, self.join_seconds = address, transport, join_seconds

    def join(self, replaces: int = 0) -> Session:
        """See transport.session.Server; waits until all shards are up, at most `join_seconds`."""
        return RemoteSession(self, replaces)


class RemoteSession(Session):
    """A lease on a running server, kept alive by a heartbeat thread."""

    def __init__(self, server: RemoteServer, replaces: int) -> None:
        self._server = server
        self._channel = grpc.insecure_channel(server.address)
        self._clients = rpc.ClientsStub(self._channel)
        self._left = threading.Event()
        self._lost: LoraServerError | None = None
        self.links: list[Link] = []
        try:
            lease = self._join(replaces)
            self._connect(lease)
        except BaseException:
            self._close()
            raise
        threading.Thread(target=self._heartbeat, args=(lease.lease_seconds,), name="heartbeat", daemon=True).start()

    def _join(self, replaces: int) -> pb.Lease:
        instance = f"{socket.gethostname()}:{os.getpid()}"
        deadline = time.monotonic() + self._server.join_seconds
        while True:
            left = max(0.1, deadline - time.monotonic())
            request = pb.JoinRequest(instance=instance, wait_seconds=left, replaces=replaces)
            try:
                lease: pb.Lease = call(self._clients.Join, request, server=self._server.address, seconds=left + 1)
                return lease
            except ServerUnavailableError:
                if time.monotonic() + 0.2 >= deadline or self._left.wait(0.2):
                    raise

    def _connect(self, lease: pb.Lease) -> None:
        spec = ModelSpec.from_json(lease.spec_json)
        layout = Layout.parse(lease.layout)
        self.terms = Terms(lease.client, lease.epoch, spec, layout, lease.coordination, lease.max_step_rows)
        hello = Hello(lease.client, lease.epoch, lease.key)
        endpoints = sorted(lease.endpoints, key=lambda endpoint: endpoint.shard)
        for endpoint in endpoints:
            self.links.append(self._link(endpoint, hello))
        self._prefetches: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._prefetches.setsockopt(zmq.LINGER, 0)
        self._prefetches.connect(lease.prefetch_address)
        self._prefetch_lock = threading.Lock()

    def _link(self, endpoint: pb.Endpoint, hello: Hello) -> Link:
        wanted = self._server.transport
        near = endpoint.host == host_identity() and os.path.exists(endpoint.shm)  # noqa: PTH110
        if wanted == "shm" or (wanted == "auto" and near):
            return ShmLink(endpoint.shm, hello, endpoint.shard)
        return ZmqLink(endpoint.zmq, hello, endpoint.shard)

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
            except LoraServerError as error:
                if time.monotonic() - last_answer > lease_seconds:
                    self._lost = LeaseError(f"client {self.terms.client}: no heartbeat got through: {error}")
                    return

    def acquire(self, names: Sequence[str]) -> list[Held]:
        """See Session."""
        request = pb.AcquireRequest(client=self.terms.client, epoch=self.terms.epoch, names=names)
        reply = call(self._clients.Acquire, request, server=self._server.address, seconds=CALL_SECONDS)
        return [Held(one.name, one.handle, frozenset(_site(code) for code in one.sites)) for one in reply.adapters]

    def release(self, handles: Sequence[int]) -> None:
        """See Session. A lease that is gone holds nothing."""
        request = pb.ReleaseRequest(client=self.terms.client, epoch=self.terms.epoch, handles=handles)
        try:
            call(self._clients.Release, request, server=self._server.address, seconds=CALL_SECONDS)
        except (LeaseError, ServerUnavailableError) as error:
            self._lost = self._lost or error

    def prefetch(self, handles: Sequence[int]) -> None:
        """See Session."""
        message = messages.encode(Prefetch(self.terms.client, list(handles)))
        with self._prefetch_lock:
            try:
                self._prefetches.send(message, zmq.DONTWAIT)
            except zmq.Again:
                return  # a hint: the step itself asks again

    def check(self) -> None:
        """See Session."""
        if self._lost is not None:
            raise LeaseError(str(self._lost))

    def leave(self) -> None:
        """See Session."""
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


def _site(code: int) -> Site:
    layer, projection = divmod(code, len(PROJECTIONS))
    return Site(layer, PROJECTIONS[projection])
