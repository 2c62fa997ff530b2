"""A client's lease as the controller sees it: calls that prove it, and what it holds."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from lora_server.errors import LeaseError, LoraServerError, ServerUnavailableError
from lora_server.timings import Timings
from lora_server.wire import bounds
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
        self._count = itertools.count(1)

    def call(self, method: Any, request: Any, seconds: float | None = None) -> Any:
        """Call with a proof; raises errors of ours."""
        self.sign(request)
        seconds = self._timings.call if seconds is None else seconds
        return call(method, request, server=self.address, seconds=seconds)

    def begin(self, method: Any, request: Any) -> PendingCall[Any]:
        """Begin a call with a proof, which another thread may cancel."""
        self.sign(request)
        return PendingCall(method, request, server=self.address, seconds=self._timings.call)

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


class Holdings:
    """Handles that a lease holds, and changes that the controller has not heard of. Thread-safe.

    A controller that is away hears of releases and cancelled tickets later; one that was restarted is told everything
    that is held.
    """

    def __init__(self, calls: LeaseCalls) -> None:
        self._calls = calls
        self._held: Counter[int] = Counter()  # handle -> times acquired and not released
        self._unreleased: list[int] = []  # released while the controller was away
        self._cancelled: list[int] = []  # tickets to cancel
        self._settled: list[int] = []  # tickets that the controller may forget
        self._lock = threading.Lock()  # these four
        self._reporting = threading.Lock()  # one report at a time

    def add(self, ticket: int, handles: Sequence[int]) -> None:
        """Note a ticket's final answer; without handles it was refused."""
        with self._lock:
            self._held.update(handles)
            self._settled.append(ticket)

    def release(self, handles: Sequence[int]) -> None:
        """Note handles to be released by the next report."""
        with self._lock:
            self._held.subtract(handles)
            self._held = +self._held
            self._unreleased += handles

    def cancel(self, ticket: int) -> None:
        """Note a ticket to be cancelled by the next report."""
        with self._lock:
            self._cancelled.append(ticket)

    def beat(self, seconds: float) -> bool:
        """Send a heartbeat; return whether the controller has forgotten the lease's holdings."""
        settled = self._settled[: bounds.TICKETS.items]
        reply = self._calls.call(self._calls.clients.Heartbeat, pb.HeartbeatRequest(settled=settled), seconds)
        with self._lock:
            del self._settled[: len(settled)]
        return bool(reply.forgot)

    def report(self, seconds: float, *, all_held: bool = False) -> None:
        """Send what the controller has not heard; with `all_held` what is held, too."""
        deadline = time.monotonic() + seconds
        if not self._reporting.acquire(timeout=seconds):
            raise ServerUnavailableError(f"server {self._calls.address}: an earlier call is not answered yet")
        try:
            self._report(deadline, all_held)
        finally:
            self._reporting.release()

    def try_report(self, seconds: float) -> None:
        """Report, or leave it to the next heartbeat if the controller is away."""
        try:
            self.report(seconds)
        except LeaseError as error:
            self._calls.lost = self._calls.lost or error
        except LoraServerError:
            return

    def _report(self, deadline: float, all_held: bool) -> None:
        calls = self._calls
        with self._lock:
            held, unreleased = list(self._held.elements()), [*self._unreleased]
            cancelled = self._cancelled[: bounds.TICKETS.items]
        if all_held:
            calls.call(calls.clients.Restore, pb.RestoreRequest(handles=held), calls.within(deadline))
        elif unreleased:
            calls.call(calls.clients.Release, pb.ReleaseRequest(handles=unreleased), calls.within(deadline))
        with self._lock:
            del self._unreleased[: len(unreleased)]
        if cancelled:
            calls.call(calls.clients.Cancel, pb.CancelRequest(tickets=cancelled), calls.within(deadline))
            with self._lock:
                del self._cancelled[: len(cancelled)]
                self._settled += cancelled
