"""The scheduler's plan of each step for the workers, and their answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from lora_server.errors import (
    BY_CODE,
    AdapterNotLoadedError,
    AdmissionError,
    LeaseError,
    LoraServerError,
    PermissionDeniedError,
    ServerUnavailableError,
    StepError,
)
from lora_server.wire.terms import Held, Proof

PLAN = "lora_server_plan"  # attribute of an engine's scheduler output that carries a StepPlan
FAILURES = "lora_server_failures"  # attribute of its runner's output that carries Failures by request
FLAG = "lora-server"  # first word of the stop_reason of a request that did not get what it asked for
RETRY = "retry"  # code of a request whose step is void through no fault of its own adapter
# an outage, too many at once, or weights that are loading: the same request may succeed after it
PASSING = (
    AdapterNotLoadedError,
    AdmissionError,
    LeaseError,
    PermissionDeniedError,
    ServerUnavailableError,
    StepError,
)


class Assigned(NamedTuple):
    """A request's adapter; rows of positions before `start` are the base model's.

    `is_base`: all rows are, and `handle` is what is merged into its weights.
    """

    handle: int
    start: int
    is_base: bool = False


@dataclass(frozen=True)
class StepPlan:
    """A plan, pickled with the step. `new`: adapters that workers do not know; `gone`: those they may forget; `holder`:
    proof of the lease that holds them. `void`: requests that lost their adapter; their results are discarded.
    `merged`: the adapter in the base weights; 0: none.

    Handles belong to one run of the server; workers with a session of another run must not use them.
    """

    server: str = ""
    rows: dict[str, Assigned] = field(default_factory=dict)  # request id -> its adapter
    new: tuple[Held, ...] = ()
    gone: tuple[int, ...] = ()
    holder: Proof | None = None
    void: tuple[str, ...] = ()
    merged: int = 0


NO_PLAN = StepPlan()


class Failure(NamedTuple):
    """The reason why a request did not get its adapter."""

    code: str
    message: str

    @classmethod
    def of(cls, error: LoraServerError) -> Failure:
        """Make a failure from an error of ours."""
        return cls(error.code, str(error))

    @property
    def passes(self) -> bool:
        """Whether the same request may succeed later."""
        return issubclass(BY_CODE.get(self.code, LoraServerError), PASSING)

    def flag(self, outcome: str) -> str:
        """Format a request's stop reason; `outcome` is one word, `error` or `base_model`."""
        return f"{FLAG}: {outcome}: {self.code}: {self.message}"


def parse_flag(stop_reason: object) -> tuple[str, str, str] | None:
    """Parse a stop_reason that `flag` made into (outcome, code, message); None for any other."""
    if not isinstance(stop_reason, str) or not stop_reason.startswith(f"{FLAG}: "):
        return None
    outcome, code, message = stop_reason.removeprefix(f"{FLAG}: ").split(": ", 2)
    return outcome, code, message
