"""Reasons to load an adapter: one want of each owner that needs it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from enum import Enum
from typing import NamedTuple

from lora_server.errors import LoraServerError
from lora_server.telemetry import NOTHING

Done = Callable[[LoraServerError | None], None]
Answer = tuple[Done, LoraServerError | None]
NEVER = float("inf")


class Reason(Enum):
    """Reason to load an adapter. The last three are no demand: they evict nothing."""

    STEP = "a step waits for one of its layers"
    PREFETCH = "a client announced steps that need it"
    PARTIAL = "a step read some of its layers, so the others follow"
    ACTIVE = "a client holds it"
    ADD = "`adapters add` waits for it"
    PIN = "`adapters pin` waits for it"
    FETCH = "its files have to be fetched before they can be measured"
    MEASURE = "its files have to be measured"
    PREWARM = "the controller loads it before a request needs it"
    PRELOAD = "it fills idle memory"

    @property
    def is_demand(self) -> bool:
        """Return whether other adapters are evicted for a want of this reason."""
        return self not in _BACKGROUND


_BACKGROUND = frozenset({Reason.MEASURE, Reason.PREWARM, Reason.PRELOAD})


class Want(NamedTuple):
    """One owner's reason. Times are time.monotonic(). An adapter has at most one want of each owner."""

    reason: Reason
    owner: Hashable  # a client, the `done` to call, or the reason itself
    due: float = NEVER  # when it is needed; for a step, when the step came
    until: float = NEVER  # when the want expires
    done: Done | None = None
    trace: Mapping[str, str] = NOTHING  # of the request that made an adapter active
