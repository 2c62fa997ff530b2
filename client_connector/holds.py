"""Holds of a lease, and the calls that change them: one at a time, each with all that was asked for meanwhile.

A controller that is away hears of releases and cancelled tickets later; one that was restarted is told everything that
is held.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple, TypeAlias

from client_connector.lease import LeaseCalls
from lora_server import logs, telemetry
from lora_server.errors import (
    AdapterNotLoadedError,
    AdmissionError,
    LeaseError,
    LoraServerError,
    ProtocolError,
    ServerUnavailableError,
    rebuild,
)
from lora_server.spec import PROJECTIONS, Invocation, Site
from lora_server.timings import Timings
from lora_server.wire import bounds
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire.terms import Held

REPORTS = 2  # entries of a call that report changes
MOST_ASKS, MOST_NAMES = bounds.DEFAULT.items - REPORTS, bounds.DEFAULT.items  # of a call
MOST_KNOWN = 65_536  # adapters of earlier answers


class QueuedAnswer(NamedTuple):
    """A position in the server's queue; `held` is what a grant will give, unless the adapter is updated before."""

    position: int  # from 1 on
    reason: str
    held: list[Held]

    def refusal(self, names: Sequence[str]) -> AdmissionError:
        """Explain to a caller that cannot wait longer."""
        return AdmissionError(
            f"adapters {list(names)}: still queued, at position {self.position}: {self.reason}; wait longer "
            "(timeout_seconds), use fewer adapters at once, or start the server with a larger --device-pool"
        )


class LoadingAnswer(NamedTuple):
    """The adapters have a place and are loading; `held` is what a grant will give."""

    seconds: float | None  # expected until they are loaded; None: unknown
    held: list[Held]

    def refusal(self, names: Sequence[str]) -> AdapterNotLoadedError:
        """Explain to a caller that cannot wait longer."""
        expected = "" if self.seconds is None else f", for another {self.seconds:.2g} s as expected"
        return AdapterNotLoadedError(f"adapters {list(names)}: still loading{expected}; wait longer (timeout_seconds)")


Answer: TypeAlias = "Future[list[Held] | QueuedAnswer | LoadingAnswer]"


class Ask(NamedTuple):
    """An acquire that has no answer yet."""

    entry: pb.HoldEntry
    answer: Answer

    def fail(self, error: LoraServerError) -> None:
        """Answer with an error of its own, that names the request."""
        own = rebuild(error.code, str(error))
        own.request = self.entry.request
        self.answer.set_exception(own)


class HoldReport(NamedTuple):
    """A caller's wish that the controller hears of changes, with `restores` of all that is held; `reported` is set once
    it was told, or could not be reached. One that `hurries` waits for no others."""

    reported: threading.Event
    restores: bool
    hurries: bool


class Holdings:
    """Handles that a lease holds, and changes that the controller has not heard of. Thread-safe."""

    def __init__(self) -> None:
        self._held: Counter[int] = Counter()  # handle -> times acquired and not released
        self._released: list[int] = []
        self._cancelled: list[int] = []  # tickets
        self._settled: list[int] = []  # tickets that the controller may forget
        self._lock = threading.Lock()

    def answered(self, ticket: int, handles: Sequence[int]) -> None:
        """Note a ticket's final answer; without handles it was refused."""
        with self._lock:
            if ticket not in self._cancelled:
                self._held.update(handles)
                self._settled.append(ticket)

    def release(self, handles: Sequence[int]) -> None:
        """Note handles to be released by the next report."""
        with self._lock:
            self._held.subtract(handles)
            for handle in handles:
                if self._held[handle] <= 0:
                    del self._held[handle]
            self._released += handles

    def cancel(self, ticket: int) -> None:
        """Note a ticket to be cancelled by the next report."""
        with self._lock:
            self._cancelled.append(ticket)

    def changes(self) -> list[pb.HoldEntry]:
        """Return what the controller has not heard, as far as one call may say it."""
        with self._lock:
            released = pb.ReleaseRequest(handles=self._released[: bounds.HANDLES.items])
            cancelled = pb.CancelRequest(tickets=self._cancelled[: bounds.TICKETS.items])
        entries = [pb.HoldEntry(release=released)] if released.handles else []
        return [*entries, pb.HoldEntry(cancel=cancelled)] if cancelled.tickets else entries

    def reported(self, changes: Sequence[pb.HoldEntry]) -> None:
        """Forget what was reported."""
        with self._lock:
            for entry in changes:
                del self._released[: len(entry.release.handles)]
                del self._cancelled[: len(entry.cancel.tickets)]
                self._settled += entry.cancel.tickets

    @property
    def has_changes(self) -> bool:
        """Whether there is something to report."""
        return bool(self._released or self._cancelled)

    def restore(self, calls: LeaseCalls) -> None:
        """Tell a controller that was restarted what is held."""
        with self._lock:
            held, released = list(self._held.elements()), len(self._released)
        calls.call(calls.clients.Restore, pb.RestoreRequest(handles=held))
        with self._lock:
            del self._released[:released]

    def beat(self, calls: LeaseCalls, seconds: float, request: pb.HeartbeatRequest | None = None) -> pb.HeartbeatReply:
        """Send a heartbeat, with what the session says of itself in `request`; return the answer."""
        request = request or pb.HeartbeatRequest()
        settled = self._settled[: bounds.TICKETS.items]
        request.settled.extend(settled)
        reply: pb.HeartbeatReply = calls.call(calls.clients.Heartbeat, request, seconds)
        with self._lock:
            del self._settled[: len(settled)]
        return reply


class HoldSender:
    """Acquires and releases adapters under a lease, on a thread of its own. Thread-safe; blocks nowhere but in a
    `report` that waits.

    A request goes with the next call. A release waits for others, those of the engine's tick, unless its caller waits.
    """

    def __init__(self, calls: LeaseCalls, holdings: Holdings, timings: Timings) -> None:
        self._calls, self._holdings, self._timings = calls, holdings, timings
        self._asks: deque[Ask] = deque()
        self._reports: list[HoldReport] = []
        self._closed = False
        self._changed = threading.Condition()  # these
        self._thread: threading.Thread | None = None
        self._known: dict[int, Held] = {}

    def acquire(self, request: pb.AcquireRequest) -> Answer:
        """Ask for adapters. The future raises the server's error; ConfigError is raised at once."""
        request_id = logs.request_id()[: bounds.BOUNDS["HoldEntry.request"].length]
        entry = pb.HoldEntry(acquire=request, request=request_id if request_id.isprintable() else "")
        entry.traceparent = telemetry.headers().get("traceparent", "")
        bounds.check(entry)
        ask = Ask(entry, Future())
        with self._changed:
            if not self._closed:
                self._asks.append(ask)
                self._wake()
                return ask.answer
        ask.fail(self._left())
        return ask.answer

    def report(self, *, restores: bool = False, seconds: float = 0.0) -> None:
        """Report changes, with `restores` all that is held. Wait `seconds` until the controller has heard it, or could
        not be reached: then the next report repeats it."""
        reported = threading.Event()
        with self._changed:
            if self._closed or not (restores or self._holdings.has_changes):
                return
            self._reports.append(HoldReport(reported, restores, hurries=restores or seconds > 0))
            self._wake()
        reported.wait(seconds)

    def close(self) -> None:
        """Fail what has no answer yet; idempotent. The channel's end ends a call that is under way."""
        with self._changed:
            self._closed = True
            asks, reports = [*self._asks], self._reports
            self._asks, self._reports = deque(), []
            self._changed.notify()
        for ask in asks:
            ask.fail(self._left())
        for one in reports:
            one.reported.set()

    def _left(self) -> ServerUnavailableError:
        return ServerUnavailableError(f"server {self._calls.address}: this session was left; join again")

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="lora-holds", daemon=True)
            self._thread.start()
        self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._asks or self._reports or self._closed)
                self._changed.wait_for(self._is_urgent, self._timings.release_gap)
                if self._closed:
                    return
                asks, reports = self._take(), self._reports
                self._reports = []
            self._send(asks, any(one.restores for one in reports))
            for one in reports:
                one.reported.set()

    def _is_urgent(self) -> bool:
        return bool(self._asks) or self._closed or any(one.hurries for one in self._reports)

    def _take(self) -> list[Ask]:
        asks: list[Ask] = []
        names = 0
        for ask in itertools.islice(self._asks, MOST_ASKS):
            names += len(ask.entry.acquire.names)
            if names > MOST_NAMES:
                break
            asks.append(ask)
        for _ in asks:
            self._asks.popleft()
        return asks

    def _send(self, asks: Sequence[Ask], restores: bool) -> None:
        """Make one call, and answer these."""
        try:
            if restores:
                self._holdings.restore(self._calls)
            changes = self._holdings.changes()
            answers = self._call(
                [*changes, *(ask.entry for ask in asks)], self._timings.call if asks else self._timings.release
            )
        except LoraServerError as error:
            self._note(error)
            for ask in asks:
                ask.fail(error)
            return
        self._holdings.reported(changes)
        for ask, answer in zip(asks, answers[len(changes) :], strict=True):
            self._answer(ask, answer)

    def _call(self, entries: Sequence[pb.HoldEntry], seconds: float) -> Sequence[pb.HoldAnswer]:
        if not entries:
            return ()
        reply = self._calls.call(self._calls.clients.Hold, pb.HoldRequest(entries=entries), seconds)
        if len(reply.answers) != len(entries):
            raise ProtocolError(f"Hold: got {len(reply.answers)} answers, expected {len(entries)}; update the server")
        answers: Sequence[pb.HoldAnswer] = reply.answers
        return answers

    def _note(self, error: LoraServerError) -> None:
        if isinstance(error, LeaseError):
            self._calls.lost = self._calls.lost or error

    def _answer(self, ask: Ask, answer: pb.HoldAnswer) -> None:
        ticket = ask.entry.acquire.ticket
        if answer.code:
            error = rebuild(answer.code, answer.message)
            self._note(error)
            self._holdings.answered(ticket, ())
            ask.fail(error)
            return
        acquired = answer.acquired
        held = [self._held(one) for one in acquired.adapters]
        if acquired.position:
            ask.answer.set_result(QueuedAnswer(acquired.position, acquired.reason, held))
            return
        if acquired.loading:
            seconds = acquired.expected_us * 1e-6 if acquired.HasField("expected_us") else None
            ask.answer.set_result(LoadingAnswer(seconds, held))
            return
        self._holdings.answered(ticket, [one.handle for one in held])
        ask.answer.set_result(held)

    def _held(self, one: pb.HeldAdapter) -> Held:
        """Return an adapter of an answer. What a handle names never changes."""
        known = self._known.get(one.handle)
        if known is not None and known.name == one.name:
            return known
        invocation = None
        if one.HasField("invocation"):
            invocation = Invocation(tuple(one.invocation.tokens), one.invocation.text)
        held = Held(one.name, one.handle, frozenset(_site(code) for code in one.sites), one.version, invocation)
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
        self._known[one.handle] = held
        return held


def _site(code: int) -> Site:
    layer, projection = divmod(code, len(PROJECTIONS))
    return Site(layer, PROJECTIONS[projection])
