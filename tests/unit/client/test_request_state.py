"""A request's state machine: its table is the documented one, and holds its promises for every phase and event."""

import itertools
import random
from pathlib import Path

import pytest

from client_connector.serving.plan import RETRY, Failure
from client_connector.serving.request_state import (
    MAX_RETRIED_STEPS,
    TRANSITIONS,
    Action,
    FailurePolicy,
    Phase,
    RequestEvent,
    RequestState,
)
from lora_server.wire.terms import Held

ARCHITECTURE = Path(__file__).parents[3] / "docs" / "architecture.md"
LAW, CODE = Held("law", 7, frozenset(), "v1"), Held("code", 8, frozenset(), "v2")
PASSING, LASTING = Failure("shard_unavailable", "away"), Failure("unknown_adapter", "no such")
EVERY_CELL = list(itertools.product(Phase, RequestEvent))
OVER = (Phase.FAILED, Phase.BASE_MODEL, Phase.ENDED)


def state_in(phase: Phase) -> RequestState:
    """A state as the machine leaves it in `phase`."""
    failure = PASSING if phase in (Phase.FAILED, Phase.BASE_MODEL) else None
    held, loading = LAW if phase is Phase.HELD else None, LAW if phase is Phase.LOADING else None
    return RequestState(phase, "v1", 3, held, loading, failure, deadline=5.0)


def documented() -> dict[tuple[Phase, RequestEvent], tuple[Phase, tuple[Action, ...]]]:
    """The table of docs/architecture.md, cell by cell."""
    text = ARCHITECTURE.read_text().partition("\n| event |")[2].partition("\n\n")[0]
    head, _, *rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in text.splitlines()]
    cells = {}
    for event, *row in rows:
        for phase, cell in zip(map(Phase, head), row, strict=True):
            words = [] if cell == "·" else cell.split(", ")
            moved = bool(words) and words[0] in {one.value for one in Phase}
            target = Phase(words[0]) if moved else phase
            cells[phase, RequestEvent(event)] = target, tuple(map(Action, words[moved:]))
    return cells


def test_the_documented_table_is_the_codes():
    cells = documented()
    assert set(cells) == set(EVERY_CELL) and set(TRANSITIONS) == set(RequestEvent)
    for (phase, event), expected in cells.items():
        assert tuple(TRANSITIONS[event].get(phase, (phase, ()))) == expected, (phase, event)


@pytest.mark.parametrize(("phase", "event"), EVERY_CELL, ids=lambda one: one.value)
def test_every_phase_takes_every_event(phase, event):
    """What is held and why it failed go with the phase; a handle is given back exactly when nothing holds it."""
    before = state_in(phase)
    held = CODE if event in (RequestEvent.GRANTED, RequestEvent.NO_WEIGHTS) else None
    after, actions, released = before.after(event, held=held, failure=LASTING, deadline=9.0)
    target = TRANSITIONS[event].get(phase)
    assert (after.phase, actions) == (tuple(target) if target else (phase, ()))
    assert (after.held is not None) == (after.phase is Phase.HELD)
    assert (after.loading is not None) == (after.phase is Phase.LOADING)
    assert (after.failure is not None) == (after.phase in (Phase.FAILED, Phase.BASE_MODEL)) or phase in OVER
    assert (after.version, after.start) == (before.version, before.start)
    granted = held if event is RequestEvent.GRANTED else None
    before_and_new = [one for one in (before.held, granted) if one is not None]
    kept = [one for one in (after.held, released) if one is not None]
    lost = before_and_new if event is RequestEvent.LEASE_LOST else []
    assert sorted(one.name for one in kept + lost) == sorted(one.name for one in before_and_new)
    assert (Action.RELEASE in actions) == (released is not None)
    assert after.deadline == (9.0 if after.phase is Phase.AWAY is not phase else 5.0)
    assert after.num_retried == (event is RequestEvent.STEP_RETRIED and target is not None)
    if after.waits and not before.waits:
        assert Action.POLL in actions, "the poller hears of every request that begins to wait"
    if phase in OVER:
        ends = event is RequestEvent.FINISHED
        assert after.phase in ({phase, Phase.ENDED} if ends else {phase}), "a failure and an end are never left"
    if phase is Phase.ENDED:
        assert after == before, "an ended request stays as it is"


@pytest.mark.parametrize("seed", range(50))
def test_in_any_order_of_events_every_grant_is_given_back_once(seed):
    """A lost lease gives back what is held under it."""
    chooser, state, grants, back = random.Random(seed), RequestState(), 0, 0
    for event in [*chooser.choices(list(RequestEvent), k=60), RequestEvent.FINISHED]:
        lost = event is RequestEvent.LEASE_LOST and state.held is not None
        grants += event is RequestEvent.GRANTED
        state, _, released = state.after(event, held=LAW, failure=PASSING)
        back += lost + (released is not None)
        assert grants - back == (state.held is not None), (seed, event)
    assert state.phase is Phase.ENDED and grants == back


def test_what_comes_first_explains_a_failure():
    failed = RequestState().after(RequestEvent.REFUSED, failure=LASTING).state
    assert failed.after(RequestEvent.FELL_BACK, failure=PASSING).state.failure is LASTING
    assert failed.after(RequestEvent.FINISHED).state.failure is LASTING, "an ended request can still be reported"


def test_a_failed_step_is_retried_so_often_and_then_fails():
    policy, state, seen = FailurePolicy(), state_in(Phase.HELD), []
    while state.phase is not Phase.FAILED:
        event = state.on_failed_step(PASSING, policy)
        seen.append(event)
        state = state.after(event, failure=PASSING).state
        assert state.void is PASSING
        if state.waits:
            again = state.on_failed_step(PASSING, policy)
            assert again is RequestEvent.STEP_VOID, "a step that was under way changes nothing"
            state = state.after(RequestEvent.GRANTED, held=LAW).state
    assert seen == [*[RequestEvent.STEP_RETRIED] * MAX_RETRIED_STEPS, RequestEvent.REFUSED]


@pytest.mark.parametrize(("falls_back", "failure", "step", "refusal"), [
    (False, PASSING, RequestEvent.STEP_RETRIED, RequestEvent.REFUSED),
    (False, LASTING, RequestEvent.REFUSED, RequestEvent.REFUSED),
    (True, PASSING, RequestEvent.FELL_BACK, RequestEvent.FELL_BACK),
    (True, LASTING, RequestEvent.FELL_BACK, RequestEvent.REFUSED),
])  # fmt: skip
def test_policies(falls_back, failure, step, refusal):
    policy = FailurePolicy(falls_back)
    assert state_in(Phase.HELD).on_failed_step(failure, policy) is step
    assert policy.on_refusal(failure) is refusal
    assert state_in(Phase.HELD).on_failed_step(Failure(RETRY, ""), policy) is RequestEvent.STEP_VOID


def test_a_request_waits_for_its_deadline_or_the_outages():
    state, policy = RequestState(Phase.AWAY, deadline=10.0), FailurePolicy(seconds=10.0)
    assert state.is_patient(9.9, is_up=False, outage_seconds=9.9, policy=policy)
    assert state.is_patient(9.9, is_up=True, outage_seconds=99.0, policy=policy), "a server that is back is asked"
    assert not state.is_patient(9.9, is_up=False, outage_seconds=10.0, policy=policy)
    assert not state.is_patient(10.0, is_up=True, outage_seconds=0.0, policy=policy)
