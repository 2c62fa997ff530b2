"""Requests that wait, for capacity, for weights or for a server that is away: one thread asks for them again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from client_connector.remote import RemoteSession
from client_connector.serving.request_state import Phase, RequestState
from client_connector.serving.waits import RequestWaits
from lora_server.errors import LoraServerError
from lora_server.timings import DEFAULTS, Timings
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire.rpc import PendingCall
from lora_server.wire.terms import Held


class AdmissionTicket(NamedTuple):
    """A request's place in the server's queue: a number in one session."""

    session: RemoteSession
    number: int


@dataclass(eq=False)
class AdapterRequest:
    """One request of the engine: what it asks for, where it stands, and the ticket of its newest ask."""

    request_id: str
    name: str
    tenant: str = ""  # the tenant that asks for the adapter
    prompt: Sequence[int] | None = None
    trace: Mapping[str, str] | None = None  # headers of the request's span
    pace: float | None = 0.0  # seconds that its adapter may still load when it is scheduled; None: any
    is_base: bool = False  # of the base model, whose rows need what is merged into the weights (name)
    state: RequestState = field(default_factory=RequestState)
    ticket: AdmissionTicket | None = None
    waits: RequestWaits = field(default_factory=RequestWaits)

    def held_in(self, session: RemoteSession) -> Held | None:
        """Return the adapter that the request holds under the lease of this session."""
        return self.state.held if self.ticket is not None and self.ticket.session is session else None


class AdmissionPoller:
    """Polls for requests that wait; thread-safe.

    `ask` asks once more, for all of these together, and returns those with a final answer. While the server is away,
    `is_up` says whether it is back, and `expire` may fail requests that have waited long enough. A request that no
    longer waits is dropped, and its ticket cancelled.
    """

    def __init__(
        self,
        ask: Callable[[Sequence[AdapterRequest]], list[AdapterRequest]],
        is_up: Callable[[], bool],
        expire: Callable[[AdapterRequest, bool], object],
        timings: Timings = DEFAULTS,
    ) -> None:
        self._ask, self._is_up, self._expire, self._timings = ask, is_up, expire, timings
        self._requests: list[AdapterRequest] = []
        self._wait: PendingCall[pb.AwaitReply] | None = None  # under way
        self._changed = threading.Condition()
        self._closed = False
        threading.Thread(target=self._run, name="lora-admission", daemon=True).start()

    def add(self, request: AdapterRequest) -> None:
        """Take a request over: from now on only this thread uses its ticket."""
        with self._changed:
            if request not in self._requests:
                self._requests.append(request)
                if self._wait is not None:  # the next wait includes this request
                    self._wait.cancel()
            self._changed.notify()

    def __len__(self) -> int:
        return len(self._requests)

    def close(self) -> None:
        """Stop; the session is left, so that tickets need no cancelling."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._requests or self._closed)
                requests = list(self._requests)
            if self._closed:
                return
            done = [request for request in requests if not request.state.waits]
            for request in done:
                if request.ticket is not None:
                    request.ticket.session.cancel(request.ticket.number)
            done += self._poll([request for request in requests if request not in done])
            with self._changed:
                self._requests = [one for one in self._requests if one not in done or one.state.waits]

    def _poll(self, requests: list[AdapterRequest]) -> list[AdapterRequest]:
        """Return the requests that have their answer."""
        away = [request for request in requests if request.state.phase is Phase.AWAY]
        if away:
            return self._poll_away(requests, away)
        ticket = requests[-1].ticket if requests else None
        if ticket is None:
            return []
        session = ticket.session
        numbers = [one.ticket.number for one in requests if one.ticket is not None and one.ticket.session is session]
        try:
            answered = self._await(session, numbers, requests)
        except LoraServerError:  # the ask below raises the reason
            answered = numbers
        pending = {AdmissionTicket(session, number) for number in set(numbers) - set(answered)}
        return self._ask([request for request in requests if request.ticket not in pending])

    def _await(self, session: RemoteSession, numbers: Sequence[int], requests: Sequence[AdapterRequest]) -> list[int]:
        """Wait until some of these tickets are answered; sooner if another request is added."""
        began = time.monotonic()
        with self._changed:
            if len(self._requests) > len(requests):
                return []
            self._wait = wait = session.calls.begin_wait(numbers, self._timings.queue_wait)
        try:
            reply = wait.result()
        finally:
            self._wait = None
        if reply is not None and not reply.tickets and time.monotonic() - began < self._timings.queue_look:
            with self._changed:  # the controller had no thread left to wait in
                more = len(requests)
                self._changed.wait_for(lambda: self._closed or len(self._requests) > more, self._timings.queue_look)
        return [] if reply is None else list(reply.tickets)

    def _poll_away(self, requests: list[AdapterRequest], away: list[AdapterRequest]) -> list[AdapterRequest]:
        with self._changed:
            self._changed.wait_for(lambda: self._closed, self._timings.away_look)
        is_up = self._is_up()
        for request in away:
            self._expire(request, is_up)
        return self._ask([request for request in requests if request.state.waits]) if is_up else []
