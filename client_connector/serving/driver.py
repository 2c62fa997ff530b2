"""Carries out what each request's state machine decides: asks the server, releases, prefetches, and waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from client_connector.alora import invocation_start, tokens_of
from client_connector.holds import Answer, LoadingAnswer, QueuedAnswer
from client_connector.serving.lookahead import Lookahead
from client_connector.serving.plan import Failure
from client_connector.serving.poller import AdapterRequest, AdmissionPoller
from client_connector.serving.request_state import NEVER, Action, FailurePolicy, Phase, RequestEvent
from client_connector.serving.scheduler_session import SchedulerSession
from client_connector.serving.settings import BASE_MODEL, Settings
from lora_server.errors import AdapterLoadError, ConfigError, LeaseError, LoraServerError, ServerUnavailableError
from lora_server.wire.terms import Held

_EVENTS = {list: RequestEvent.GRANTED, QueuedAnswer: RequestEvent.NO_CAPACITY, LoadingAnswer: RequestEvent.NO_WEIGHTS}


class RequestDriver:
    """The actions of requests' state machines. Thread-safe.

    One thread at a time asks the server for a given request: the poller while it waits, otherwise the engine's own,
    which does not wait for the answer.
    """

    def __init__(self, session: SchedulerSession, settings: Settings, tokenize: Callable[[str], Sequence[int]]) -> None:
        self._session, self._tokenize = session, tokenize
        self._policy = FailurePolicy(settings.on_failure == BASE_MODEL, settings.timeout_seconds)
        self._call_seconds = settings.timings.call
        self._lock = threading.Lock()  # states and tickets
        self.lookahead = Lookahead(lambda expected: session.current.prefetch(expected))
        self.poller = AdmissionPoller(self._ask_together, session.is_up, self._expire, settings.timings)

    def apply(
        self, request: AdapterRequest, event: RequestEvent, held: Held | None = None, failure: Failure | None = None
    ) -> None:
        """Change a request's state, and do what the state machine says; never blocks."""
        deadline = time.monotonic() + self._policy.seconds
        with self._lock:
            before = request.state
            request.state, actions, released = before.after(event, held=held, failure=failure, deadline=deadline)
            if request.state.phase is not before.phase:
                request.waits.enter(request.state.phase)
            if released is not None and request.ticket is not None and not request.is_base:
                request.ticket.session.release([released.handle], waits=False)
            if Action.NEW_TICKET in actions:
                request.ticket = None
        if Action.POLL in actions:
            self.poller.add(request)

    def begin(self, request: AdapterRequest, then: Callable[[BaseException | None], object] = lambda _: None) -> None:
        """Ask the server without waiting: the request stays in ASKING until the answer is here. `then` is called after
        that, with the error if it is one."""
        try:
            self._session.ask_soon(request).add_done_callback(partial(self._answered, request, then))
        except LoraServerError as error:
            self._fail_ask(request, error)
            then(error)

    def _answered(
        self, request: AdapterRequest, then: Callable[[BaseException | None], object], answer: Answer
    ) -> None:
        error = answer.exception()
        if error is None:
            self._take(request, answer.result())
        elif isinstance(error, LoraServerError):
            self._fail_ask(request, error)
        then(error)

    def _fail_ask(self, request: AdapterRequest, error: LoraServerError) -> None:
        if not isinstance(error, (LeaseError, ServerUnavailableError)):
            self.refuse(request, Failure.of(error))
            return
        self._session.seek()
        if request.ticket is not None:
            request.ticket.session.cancel(request.ticket.number, waits=False)  # it may be granted
        self.apply(request, RequestEvent.SERVER_AWAY)

    def ask(self, request: AdapterRequest) -> bool:
        """Ask the server and wait; return whether its answer is final. Raises the server's error about the adapter."""
        try:
            answer = self._session.ask(request)
        except (LeaseError, ServerUnavailableError):
            self.apply(request, RequestEvent.SERVER_AWAY)
            return False
        return self._take(request, answer)

    def _take(self, request: AdapterRequest, answer: list[Held] | QueuedAnswer | LoadingAnswer) -> bool:
        """Take note of an answer; return whether it is final."""
        (held,) = answer if isinstance(answer, list) else answer.held
        self._identify(request, held)
        self.apply(request, _EVENTS[type(answer)], held)
        return isinstance(answer, list)

    def resume(self, request: AdapterRequest, *, waits: bool = False) -> None:
        """Ask for a request that holds nothing any more: it was preempted, or its lease is gone. With `waits` wait for
        the answer."""
        if request.state.phase is Phase.HELD and request.held_in(self._session.current) is None:
            self.apply(request, RequestEvent.LEASE_LOST)
        if request.state.phase is Phase.PAUSED:
            self.apply(request, RequestEvent.RESUMED)
            (self._ask_again if waits else self.begin)(request)

    def refuse(self, request: AdapterRequest, failure: Failure) -> None:
        """Apply a failure outside a step; the policy decides whether the request ends or gets the base model."""
        self.apply(request, self._policy.on_refusal(failure), failure=failure)

    def fail_step(self, request: AdapterRequest, failure: Failure) -> None:
        """Apply a step's failure. If the adapter's step itself failed, have the lease checked, too."""
        event = request.state.on_failed_step(failure, self._policy)
        if event is not RequestEvent.STEP_VOID:
            self._session.revalidate()
        self.apply(request, event, failure=failure)

    def _ask_together(self, requests: Sequence[AdapterRequest]) -> list[AdapterRequest]:
        """Ask for requests in as few calls as possible, and wait; return those with a final answer."""
        answers: list[tuple[AdapterRequest, Answer | None]] = []
        for request in requests:
            try:
                answers.append((request, self._session.ask_soon(request)))
            except LoraServerError:  # the server is away: asking alone joins it again
                answers.append((request, None))
        return [request for request, answer in answers if self._ask_again(request, answer)]

    def _ask_again(self, request: AdapterRequest, answer: Answer | None = None) -> bool:
        """Take an answer, or ask where there is none, or none from a server that is there; return whether it is
        final. An error is."""
        try:
            if answer is not None:
                with suppress(LeaseError, ServerUnavailableError, TimeoutError):
                    return self._take(request, answer.result(self._call_seconds))
            return self.ask(request)
        except LoraServerError as error:
            self.refuse(request, Failure.of(error))
            return True

    def _identify(self, request: AdapterRequest, held: Held) -> None:
        """Note the first answer's version, and where an activated LoRA begins; later answers must have that version."""
        expected = request.state.version
        if expected and expected != held.version:
            message = (
                f"adapter {request.name!r}: version {expected[:12]} was replaced by {held.version[:12]} "
                "while the request waited; send it again"
            )
            self.refuse(request, Failure.of(AdapterLoadError(message)))
        if expected:
            return
        start: int | None = 0
        if held.invocation is not None:
            try:
                tokens = tokens_of(held.invocation, self._tokenize)
            except ConfigError as error:
                self.refuse(request, Failure.of(error))
            else:
                start = invocation_start(request.prompt or (), tokens)
        lacking = None
        if start is None:
            lacking = Failure(
                "not_invoked", f"adapter {request.name!r}: the prompt lacks its invocation {list(tokens)}"
            )
        goes_on = self._session.merged.record is not None  # rows of the base model need the server, as an adapter's do
        with self._lock:
            begins = NEVER if start is None else start
            request.state = request.state.identified(held.version, begins, lacking if goes_on else None)
        if lacking is not None and not goes_on:
            self.apply(request, RequestEvent.FELL_BACK, failure=lacking)

    def _expire(self, request: AdapterRequest, is_up: bool) -> None:
        """Fail a request that has waited for the server for too long."""
        state, outage = request.state, self._session.away_seconds
        if not state.is_patient(time.monotonic(), is_up=is_up, outage_seconds=outage, policy=self._policy):
            self.refuse(request, state.void or Failure.of(self._session.away_error()))
