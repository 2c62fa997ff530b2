"""The scheduler's side: the adapters that requests hold, from before a request is queued until it ends.

Asking and releasing do not wait: the session's own thread calls the server, with all that is wanted meanwhile. Waiting
for capacity, or for a server that is away, has another thread. None of them is on a step's path. Workers push the
steps, under handles that they get with each step's plan.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice

from client_connector.remote import RemoteSession
from client_connector.serving.driver import RequestDriver
from client_connector.serving.lookahead import MOST
from client_connector.serving.pace import PassPace
from client_connector.serving.plan import Assigned, Failure, StepPlan
from client_connector.serving.poller import AdapterRequest
from client_connector.serving.request_state import Phase, RequestEvent, RequestState
from client_connector.serving.scheduler_session import SchedulerSession
from client_connector.serving.settings import Settings, tenant_and_name
from lora_server import telemetry
from lora_server.merged import MergedRecord


class AdapterLeases:
    """Thread-safe. `tokenize` turns a legacy invocation string into tokens. The engine tells `pace` of its passes."""

    def __init__(
        self, settings: Settings, tokenize: Callable[[str], Sequence[int]], record: MergedRecord | None = None
    ) -> None:
        """Join the server; raises what SchedulerSession raises. `record`: what is merged into the engine's weights."""
        self._session, self._record = SchedulerSession(settings, record), record
        self._driver = RequestDriver(self._session, settings, tokenize)
        self.pace = PassPace(settings.timings.weights)
        self._requests: dict[str, AdapterRequest] = {}
        self._lock = threading.Lock()  # _requests
        self._known: tuple[RemoteSession | None, frozenset[int]] = None, frozenset()  # handles that workers know

    # -- a request's life

    def hold(
        self, request_id: str, name: str, prompt: Sequence[int] | None, trace: Mapping[str, str] | None = None
    ) -> RequestState:
        """Ask for the adapter of a new request; does not wait for the answer.

        A failure is in the state then, for the scheduler to end the request with. `name` may have a tenant in front,
        see settings.tenant_and_name; `trace`: headers of the request's span.
        """
        tenant, own = tenant_and_name(name)
        pace = self.pace.of(len(prompt or ()))
        return self._begin(AdapterRequest(request_id, own, tenant, prompt, trace, pace=pace), name, trace)

    def hold_base(self, request_id: str, trace: Mapping[str, str] | None = None) -> None:
        """Take a new request of the base model: if an adapter is merged into the weights, its rows need the server."""
        if self._record is not None:
            request = AdapterRequest(request_id, self._record.name, trace=trace, is_base=True)
            self._begin(request, "", trace)

    def is_in_weights(self, version: str) -> bool:
        """Return whether an adapter of this version is merged into the weights: its requests need no server."""
        return self._record is not None and version == self._record.version

    def _begin(self, request: AdapterRequest, name: str, trace: Mapping[str, str] | None) -> RequestState:
        request_id = request.request_id
        with telemetry.begun("lora.acquire", trace, request=request_id, adapters=name) as end:
            self._driver.begin(request, end)
        with self._lock:
            earlier = self._requests.get(request_id)  # of a streamed prompt's previous part
            self._requests[request_id] = request
        if earlier is not None:
            self._driver.apply(earlier, RequestEvent.FINISHED)
        return request.state

    def release(self, request_id: str) -> None:
        """Forget a request that ended, however it did."""
        with self._lock:
            request = self._requests.pop(request_id, None)
        if request is None:
            return
        failure = request.state.failure or request.state.not_invoked
        self._driver.apply(request, RequestEvent.FINISHED)
        if not request.is_base:
            self._session.waits.add(request.waits.seconds)
        attributes = {"request": request_id, "adapters": request.name, "failure": failure.code if failure else ""}
        waited = {f"wait_{stage}": seconds for stage, seconds in request.waits.seconds.items()}
        telemetry.record("lora.generation", request.waits.began, request.trace, **attributes, **waited)

    def pause(self, request_id: str) -> None:
        """Give the adapter of a preempted request back; it is asked for again by `is_ready`, or by the step's plan."""
        request = self._requests.get(request_id)
        if request is not None:
            self._driver.apply(request, RequestEvent.PREEMPTED)

    def fail_step(self, request_id: str, failure: Failure) -> RequestState | None:
        """Take note of a failed step. The state says what the engine does, see RequestState.on_failed_step."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        self._driver.fail_step(request, failure)
        return request.state

    def state(self, request_id: str) -> RequestState | None:
        """Return a request's state; None for a request of the base model."""
        request = self._requests.get(request_id)
        return None if request is None else request.state

    def failed(self) -> list[tuple[str, Failure]]:
        """List the requests that the engine must end with an error."""
        with self._lock:
            states = [(request_id, request.state) for request_id, request in self._requests.items()]
        return [(one, state.failure) for one, state in states if state.phase is Phase.FAILED and state.failure]

    def is_ready(self, request_id: str) -> bool:
        """Return whether a request may be scheduled; a preempted one is asked for again."""
        request = self._requests.get(request_id)
        if request is None:
            return True
        self._driver.resume(request)
        return request.state.is_ready

    @property
    def num_waiting(self) -> int:
        """The number of requests that wait for capacity, for weights or for the server's answer."""
        with self._lock:
            return sum(request.state.is_undecided for request in self._requests.values())

    def close(self) -> None:
        """Leave the server; idempotent."""
        self._driver.poller.close()
        self._session.close()

    # -- a step

    def expect(self, waiting: Iterable[str]) -> None:
        """Prefetch for requests that wait for their turn, in order; cheap to call at every step."""
        if self._driver.lookahead.is_due():
            states = [self.state(request_id) for request_id in islice(waiting, MOST)]
            adapters = [state.adapter for state in states if state is not None]
            self._driver.lookahead.follow(one.handle for one in adapters if one is not None)

    def plan(self, scheduled: Collection[str]) -> StepPlan:
        """Plan a step of these requests. A request without a held adapter gets no rows: it is void, or has failed."""
        requests = {name: self._requests[name] for name in scheduled if name in self._requests}
        requests = {name: request for name, request in requests.items() if request.state.failure is None}
        if requests:
            self._session.check()
        for request in requests.values():
            self._driver.resume(request, waits=True)
        session = self._session.current
        merged = self._session.merged.held_in(session)
        if merged is None and self._record is not None:
            return StepPlan(void=tuple(requests))
        held = {name: one for name, request in requests.items() if (one := request.held_in(session)) is not None}
        rows = {
            name: Assigned(one.handle, requests[name].state.start, requests[name].is_base) for name, one in held.items()
        }
        for name in held:
            requests[name].waits.scheduled()
        void = tuple(name for name in requests if name not in rows and requests[name].state.failure is None)
        known = self._known[1] if self._known[0] is session else frozenset()
        with self._lock:
            in_use = {one.handle for request in self._requests.values() if (one := request.held_in(session))}
        now = {one.handle: one for one in held.values()}
        if merged is not None:
            in_use, now = in_use | {merged.handle}, now | {merged.handle: merged}
        self._known = session, (known & in_use) | now.keys()
        new = tuple(one for handle, one in now.items() if handle not in known)
        gone, subtracted = tuple(known - in_use), 0 if merged is None else merged.handle
        return StepPlan(session.terms.server, rows, new, gone, session.proof, void, subtracted)
