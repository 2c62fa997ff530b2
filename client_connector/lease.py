"""A client's calls to the controller, which prove its lease, and its prefetches, which nothing waits for."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from typing import Any

from lora_server.errors import LoraServerError
from lora_server.timings import Timings
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire import lora_server_pb2_grpc as rpc
from lora_server.wire.credentials import Credentials
from lora_server.wire.proofs import sign
from lora_server.wire.rpc import PendingCall, call, open_channel
from lora_server.wire.terms import Proof

MIN_SECONDS = 0.05


class LeaseCalls:
    """Calls of a client to the controller. `proof` is set with the answer to Join. Thread-safe."""

    def __init__(self, address: str, credentials: Credentials | None, timings: Timings) -> None:
        self.address, self._timings = address, timings
        self._channel = open_channel(address, credentials)
        self.clients = rpc.ClientsStub(self._channel)
        self.proof = Proof(0, 0, b"")
        self.lost: LoraServerError | None = None  # why the lease is known to be gone
        self.holder: Proof | None = None  # the client that this one borrows from
        self._count = itertools.count(1)

    def call(self, method: Any, request: Any, seconds: float | None = None) -> Any:
        """Call with a proof; raises errors of ours."""
        self.sign(request)
        seconds = self._timings.call if seconds is None else seconds
        return call(method, request, server=self.address, seconds=seconds)

    def begin_wait(self, tickets: Sequence[int], seconds: float) -> PendingCall[pb.AwaitReply]:
        """Begin to wait until one of these tickets is answered; another thread may cancel the wait."""
        request = pb.AwaitRequest(tickets=tickets, seconds=min(seconds, self._timings.call))
        self.sign(request)
        return PendingCall(self.clients.Await, request, server=self.address, seconds=self._timings.call)

    def sign(self, request: Any) -> None:
        """Prove the lease where the message has room for a proof; each message is signed anew."""
        if "proof" in request.DESCRIPTOR.fields_by_name:
            client, epoch, key = self.proof
            sign(request, pb.Proof(client=client, epoch=epoch, count=next(self._count)), key)

    def within(self, deadline: float) -> float:
        """Return the timeout of a call that ends by `deadline` (time.monotonic()): never too short for a refusal."""
        return min(self._timings.call, max(deadline - time.monotonic(), MIN_SECONDS))

    def status(self) -> pb.StatusReply:
        """Ask for the server's status."""
        method = rpc.ServerStub(self._channel).Status
        reply: pb.StatusReply = self.call(method, pb.StatusRequest(), self._timings.release)
        return reply

    def place(self, deadline: float) -> pb.Place:
        """Ask for the client's place in NVSHMEM's world."""
        place: pb.Place = self.call(self.clients.World, pb.WorldRequest(), self.within(deadline))
        return place

    def close(self) -> None:
        """Close the channel; idempotent."""
        self._channel.close()


PREFETCH_SECONDS = 5.0


class PrefetchSender:
    """Thread-safe; never blocks. `method` is Clients.Prefetch of a stub."""

    def __init__(self, method: Any) -> None:
        self._method = method
        self._lock = threading.RLock()  # a call that has ended already calls back at once
        self._busy = self._closed = False
        self._next: pb.PrefetchRequest | None = None

    def send(self, request: pb.PrefetchRequest) -> None:
        """Send a hint; if it is lost, the step itself asks for the weights."""
        with self._lock:
            self._next = request
            if not self._busy and not self._closed:
                self._start()

    def _start(self) -> None:
        request, self._next, self._busy = self._next, None, True
        try:
            self._method.future(request, timeout=PREFETCH_SECONDS).add_done_callback(self._ended)
        except ValueError:  # the channel was closed
            self._closed = True

    def _ended(self, _: Any) -> None:
        with self._lock:
            self._busy = False
            if self._next is not None and not self._closed:
                self._start()

    def close(self) -> None:
        """Stop before the channel closes; idempotent."""
        with self._lock:
            self._closed = True
