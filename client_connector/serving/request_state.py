"""A request at an engine, from the moment it names an adapter until it ends: a pure, table-driven state machine.

Every serving engine drives this machine through `AdapterLeases`. For a phase and an event, `TRANSITIONS` gives the next
phase and the actions that `RequestDriver` carries out; a missing entry leaves the request as it is. The machine does no
I/O and reads no clock. docs/architecture.md prints the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from client_connector.serving.plan import RETRY, Failure
from lora_server.wire.terms import Held

MAX_RETRIED_STEPS = 3  # of one request
NEVER = 1 << 62  # the start of an activated LoRA whose invocation the prompt lacks


class Phase(Enum):
    """The phase of a request. The poller alone uses the ticket of a request in QUEUED, LOADING or AWAY."""

    ASKING = "asking"  # the server's first answer is outstanding
    QUEUED = "queued"  # the server has no capacity for the adapter yet
    LOADING = "loading"  # the adapter has a place, and takes longer to load than a step
    AWAY = "away"  # the server cannot be asked; `deadline` ends the wait
    HELD = "held"  # the engine may schedule the request
    PAUSED = "paused"  # preempted, or the lease is gone: asked for again before it is scheduled
    FAILED = "failed"  # the engine ends the request with `failure`
    BASE_MODEL = "base_model"  # the base model answers from now on, and the answer says so
    ENDED = "ended"


class RequestEvent(Enum):
    """An event in a request's life."""

    RESUMED = "resumed"  # the engine wants to schedule it
    GRANTED = "granted"  # the server's answer: the adapter is held
    NO_CAPACITY = "no_capacity"  # the server's answer: a position in its queue
    NO_WEIGHTS = "no_weights"  # the server's answer: the adapter has a place, and is loading
    SERVER_AWAY = "server_away"  # no answer: the server or the lease is gone
    REFUSED = "refused"  # an error that ends the request
    FELL_BACK = "fell_back"  # an error after which the base model answers
    PREEMPTED = "preempted"  # the engine takes the request off its batch
    LEASE_LOST = "lease_lost"  # the session in which the adapter was held is gone
    STEP_VOID = "step_void"  # a step must be computed again, through no fault of this request
    STEP_RETRIED = "step_retried"  # a step failed, and may succeed once a server is up
    FINISHED = "finished"  # the engine ended the request


class Action(Enum):
    """An action that `RequestDriver` carries out, in the order given."""

    RELEASE = "release"  # give the handle back
    NEW_TICKET = "new_ticket"  # the next ask is a new one to the server
    POLL = "poll"  # hand it to the poller, which asks again while the request waits, and else cancels the ticket


class PhaseChange(NamedTuple):
    """The next phase, and what is to be done."""

    phase: Phase
    actions: tuple[Action, ...] = ()


WAITING = (Phase.QUEUED, Phase.LOADING, Phase.AWAY)
_ASKED = (Phase.ASKING, *WAITING)
_UNASKED = tuple(phase for phase in Phase if phase not in _ASKED)


def _ending(phase: Phase) -> dict[Phase, PhaseChange]:
    return {
        **dict.fromkeys((*_ASKED, Phase.PAUSED), PhaseChange(phase)),
        Phase.HELD: PhaseChange(phase, (Action.RELEASE,)),
    }


def _kept(phases: Iterable[Phase], *actions: Action) -> dict[Phase, PhaseChange]:
    return {phase: PhaseChange(phase, actions) for phase in phases}


TRANSITIONS: Mapping[RequestEvent, Mapping[Phase, PhaseChange]] = {
    RequestEvent.RESUMED: {Phase.PAUSED: PhaseChange(Phase.ASKING, (Action.NEW_TICKET,))},
    RequestEvent.GRANTED: {
        **dict.fromkeys(_ASKED, PhaseChange(Phase.HELD)),
        **_kept(_UNASKED, Action.RELEASE),
    },
    RequestEvent.NO_CAPACITY: {
        **dict.fromkeys(_ASKED, PhaseChange(Phase.QUEUED, (Action.POLL,))),
        **_kept(_UNASKED, Action.POLL),
    },
    RequestEvent.NO_WEIGHTS: {
        **dict.fromkeys(_ASKED, PhaseChange(Phase.LOADING, (Action.POLL,))),
        **_kept(_UNASKED, Action.POLL),
    },
    RequestEvent.SERVER_AWAY: {
        Phase.ASKING: PhaseChange(Phase.AWAY, (Action.NEW_TICKET, Action.POLL)),
        **dict.fromkeys(WAITING, PhaseChange(Phase.AWAY, (Action.POLL,))),
    },
    RequestEvent.REFUSED: _ending(Phase.FAILED),
    RequestEvent.FELL_BACK: _ending(Phase.BASE_MODEL),
    RequestEvent.PREEMPTED: {Phase.HELD: PhaseChange(Phase.PAUSED, (Action.RELEASE,))},
    RequestEvent.LEASE_LOST: {Phase.HELD: PhaseChange(Phase.PAUSED)},
    RequestEvent.STEP_VOID: {},
    RequestEvent.STEP_RETRIED: {
        Phase.HELD: PhaseChange(Phase.AWAY, (Action.RELEASE, Action.NEW_TICKET, Action.POLL)),
        Phase.PAUSED: PhaseChange(Phase.AWAY, (Action.NEW_TICKET, Action.POLL)),
    },
    RequestEvent.FINISHED: {
        **_ending(Phase.ENDED),
        **dict.fromkeys((Phase.FAILED, Phase.BASE_MODEL), PhaseChange(Phase.ENDED)),
    },
}


@dataclass(frozen=True)
class FailurePolicy:
    """`falls_back`: if its adapter fails, the base model answers a request. `seconds` bounds a wait for the server."""

    falls_back: bool = False
    seconds: float = 10.0

    def on_refusal(self, failure: Failure) -> RequestEvent:
        """Choose the event of a failure outside a step. Failures that will not pass never fall back."""
        return RequestEvent.FELL_BACK if self.falls_back and failure.passes else RequestEvent.REFUSED


class Transition(NamedTuple):
    """The outcome of an event. `released` is the adapter of the action RELEASE."""

    state: RequestState
    actions: tuple[Action, ...]
    released: Held | None


@dataclass(frozen=True)
class RequestState:
    """One request's adapter, as far as the engine is concerned. `version` and `start` are known with the first answer.

    `held` is set in HELD alone, `loading` in LOADING: what a grant will give;
    `failure` in FAILED and BASE_MODEL, and kept in ENDED; `deadline` counts in AWAY. `not_invoked`: all rows are the
    base model's, and need the server since an adapter is merged into the weights, so the request goes on as any other.
    """

    phase: Phase = Phase.ASKING
    version: str = ""
    start: int = 0  # rows of earlier positions are the base model's
    held: Held | None = None
    loading: Held | None = None
    failure: Failure | None = None
    not_invoked: Failure | None = None
    deadline: float = 0.0
    void: Failure | None = None  # of the newest step that is retried
    num_retried: int = 0

    @property
    def waits(self) -> bool:
        """Whether the poller is to ask for it."""
        return self.phase in WAITING

    @property
    def adapter(self) -> Held | None:
        """The adapter that the server keeps a place for."""
        return self.held or self.loading

    @property
    def is_undecided(self) -> bool:
        """Whether the server's final answer is outstanding."""
        return self.phase in _ASKED

    @property
    def is_ready(self) -> bool:
        """Whether the engine may schedule the request."""
        return self.phase in (Phase.HELD, Phase.BASE_MODEL)

    @property
    def falls_back(self) -> bool:
        """Whether the base model answers from now on."""
        return self.phase is Phase.BASE_MODEL

    @property
    def base_model_reason(self) -> Failure | None:
        """Why the base model answers; None: it does not."""
        return self.failure if self.falls_back else self.not_invoked

    def after(
        self, event: RequestEvent, *, held: Held | None = None, failure: Failure | None = None, deadline: float = 0.0
    ) -> Transition:
        """Apply an event. `held` comes with GRANTED and NO_WEIGHTS, `failure` with REFUSED, FELL_BACK and STEP_RETRIED;
        `deadline` is that of a request that goes AWAY now."""
        target = TRANSITIONS[event].get(self.phase)
        if target is None:
            return Transition(self, (), None)
        phase, actions = target
        released = (held if event is RequestEvent.GRANTED else self.held) if Action.RELEASE in actions else None
        if phase is self.phase:
            return Transition(self, actions, released)
        held_now, loading = held if phase is Phase.HELD else None, held if phase is Phase.LOADING else None
        state = replace(self, phase=phase, held=held_now, loading=loading)
        if phase in (Phase.FAILED, Phase.BASE_MODEL):
            state = replace(state, failure=failure)
        elif phase is Phase.AWAY:
            state = replace(state, deadline=deadline)
        if event is RequestEvent.STEP_RETRIED:
            state = replace(state, void=failure, num_retried=self.num_retried + 1)
        return Transition(state, actions, released)

    def on_failed_step(self, failure: Failure, policy: FailurePolicy) -> RequestEvent:
        """Choose the event of a failed step.

        Afterwards the engine discards what the step computed. It ends a request in FAILED, and computes any other
        again from its text so far, in BASE_MODEL without the adapter.
        """
        if failure.code == RETRY or self.waits:
            return RequestEvent.STEP_VOID
        if policy.falls_back:
            return RequestEvent.FELL_BACK
        may_pass = failure.passes and self.num_retried < MAX_RETRIED_STEPS
        return RequestEvent.STEP_RETRIED if may_pass else RequestEvent.REFUSED

    def is_patient(self, now: float, *, is_up: bool, outage_seconds: float, policy: FailurePolicy) -> bool:
        """Return whether a request in AWAY waits on. An outage has the policy's seconds for all requests together."""
        return now < self.deadline and (is_up or outage_seconds < policy.seconds)

    def identified(self, version: str, start: int, not_invoked: Failure | None = None) -> RequestState:
        """Note what the first answer says: the adapter's version, and where in the prompt it begins to act."""
        return replace(self, version=version, start=start, not_invoked=not_invoked)
