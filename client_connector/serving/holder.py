"""The scheduler's side: adapters held for requests, from before a request is queued until it ends.

A session without links: workers push the steps, under handles that they get with each step's plan.
Holding talks to the server, so it happens in the thread that receives requests; letting go happens
in a thread of its own, and so does waiting: for a place, or for a server that is away. None is on a step's path.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice

from client_connector.serving.asking import Asking
from client_connector.serving.lookahead import MOST
from client_connector.serving.plan import Assigned, Failure, StepPlan
from client_connector.serving.settings import BASE_MODEL, whose
from client_connector.serving.waiting import Use
from lora_server import telemetry
from lora_server.errors import LoraServerError

MAX_VOID = 3  # steps of one request that may be computed in vain


class Holder(Asking):
    """Thread-safe."""

    # -- a request's life

    def hold(
        self, request_id: str, name: str, prompt: Sequence[int] | None, trace: Mapping[str, str] | None = None
    ) -> Use:
        """Acquire and prefetch for a new request, or queue it; a failure is in the Use, for the scheduler to end it
        with. `name` may be a tenant's, see settings.whose; `trace`: headers of the request's span."""
        tenant, own = whose(name)
        use = Use(own, prompt, request_id, trace, tenant=tenant)
        try:
            with telemetry.span("lora.acquire", trace, request=request_id, adapters=name):
                answered = self._ask(use)
            if answered and use.held is not None:
                self._lookahead.arrived(use.held.handle)
        except LoraServerError as error:
            self._let_go(use)
            self._fail(use, error)
        with self._lock:
            earlier = self._uses.get(request_id)  # the next part of a streamed prompt
            self._uses[request_id] = use
        if earlier is not None:
            self._let_go(earlier)
        return use

    def release(self, request_id: str) -> Use | None:
        """A request ended, however it did."""
        with self._lock:
            use = self._uses.pop(request_id, None)
        if use is not None:
            self._let_go(use)
            failed = use.failure.code if use.failure is not None else ""
            told = {"request": request_id, "adapters": use.name, "failure": failed}
            telemetry.record("lora.generation", use.began, use.trace, **told)
        return use

    def pause(self, request_id: str) -> None:
        """A request was preempted; it is held again when it is scheduled again."""
        use = self._uses.get(request_id)
        if use is not None and use.held is not None:
            self._let_go(use)

    def starts_over(self, request_id: str, failure: Failure) -> bool:
        """A step of the request failed: whether it is to be computed anew, once there is a server that can."""
        use = self._uses.get(request_id)
        if use is not None and use.queued:
            return True
        if use is None or use.num_void == MAX_VOID or not failure.passes or self._settings.on_failure == BASE_MODEL:
            return False
        self._let_go(use)
        use.void, use.num_void, self._suspect = failure, use.num_void + 1, True
        self._await_server(use)
        return True

    def fail(self, request_id: str, failure: Failure) -> Use | None:
        """A step of the request failed. Under policy base_model it goes on without its adapter."""
        use = self._uses.get(request_id)
        if use is not None:
            self._let_go(use)
            use.failure, self._suspect = failure, True
            use.falls_back = self._settings.on_failure == BASE_MODEL
        return use

    def use(self, request_id: str) -> Use | None:
        """What a request asked for; None for a base request."""
        return self._uses.get(request_id)

    def failed(self) -> list[tuple[str, Failure]]:
        """Requests that must end with an error."""
        with self._lock:
            uses = list(self._uses.items())
        return [(name, use.failure) for name, use in uses if use.failure is not None and not use.falls_back]

    def is_ready(self, request_id: str) -> bool:
        """Whether a request may be scheduled. One that was preempted is asked for again."""
        use = self._uses.get(request_id)
        if use is None or use.falls_back:
            return True
        if use.held is None and use.failure is None and not use.queued:
            self._resume(use)
        return use.held is not None or use.falls_back

    @property
    def num_queued(self) -> int:
        """Requests without a place."""
        return len(self._waiting)

    # -- a step

    def expect(self, waiting: Iterable[str]) -> None:
        """Requests that wait for their turn, in order; looked at now and then."""
        if self._lookahead.is_due():
            uses = (self._uses.get(name) for name in islice(waiting, MOST))
            held = [use.held for use in uses if use is not None]
            self._lookahead.follow(one.handle for one in held if one is not None)

    def plan(self, scheduled: Collection[str]) -> StepPlan:
        """For the requests of one step. One whose adapter cannot be held again gets no rows: void, or `failed`."""
        uses = [(name, self._uses[name]) for name in scheduled if name in self._uses]
        uses = [(name, use) for name, use in uses if use.failure is None]
        if uses and (self._suspect or self._session_lost()):
            self._check()
        for _, use in uses:
            if use.held is None and use.failure is None and not use.queued:
                self._resume(use)
        rows = {name: Assigned(use.held.handle, use.start) for name, use in uses if use.held is not None}
        held = {use.held.handle: use.held for _, use in uses if use.held is not None}
        new = tuple(one for handle, one in held.items() if handle not in self._known)
        in_use = {use.held.handle for use in list(self._uses.values()) if use.held is not None}
        gone = tuple(self._known - in_use)
        self._known = (self._known & in_use) | held.keys()
        void = tuple(name for name, use in uses if use.queued)  # it was held under a lease that is gone
        return StepPlan(self._session.terms.server, rows, new, gone, self._session.proof, void)

    def _resume(self, use: Use) -> None:
        try:
            self._ask(use)
        except LoraServerError as error:
            self._fail(use, error)
