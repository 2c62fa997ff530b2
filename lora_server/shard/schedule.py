"""Which step a shard serves next: fair queueing between clients, whatever they call their steps.

A step costs its rows, and STEP_ROWS for being one. Each client has a time of its own: a step starts where the one
before it finished, but not before the shard's time, and finishes its cost later. The least finish is served first, the
oldest of equals; the shard's time is the least start of those that are ready. So small steps pass large ones, a client
with many or large ones is passed by all that had less, nobody saves up for later, and nobody waits for more than
each other client's share of what its own step costs.

Steps of one client are served in the order it pushed them, so a client is represented here by its oldest unanswered
step alone. A GPU does the same with a warp: transport/gpu/poller.cuh.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lora_server.transport.base import Connection
from lora_server.wire.slot import RequestHeader

STEP_ROWS = 8
MOST_ROWS = 65536  # that a step may claim; how many it may have is checked when it is served


@dataclass
class PendingStep:
    """A client's oldest unanswered step. Times are time.monotonic_ns() of this host, but start and finish."""

    connection: Connection
    seq: int
    header: RequestHeader
    received_ns: int
    expires_ns: int
    handles: frozenset[int] = frozenset()
    pin: int | None = None  # on its weights, from the moment on at which all are here, and its client may use them
    start: int = -1  # of its share, once it is ready
    finish: int = -1

    @property
    def blocked(self) -> bool:
        """Its weights are not here yet."""
        return self.pin is None


class FairShare:
    """The rule above; what each client has had is kept with its connection."""

    def __init__(self) -> None:
        self._now = 0

    def pick(self, pending: Iterable[PendingStep]) -> PendingStep | None:
        """The step to serve now, among those whose weights are here; None if there is none."""
        ready = [step for step in pending if not step.blocked]
        if not ready:
            return None
        for step in ready:
            if step.start < 0:
                step.start = max(self._now, step.connection.finish)
                step.finish = step.start + cost(step.header)
        self._now = min(step.start for step in ready)
        picked = min(ready, key=_order)
        picked.connection.finish = picked.finish
        return picked


def cost(header: RequestHeader) -> int:
    """In rows."""
    return STEP_ROWS + min(max(header.num_rows, header.num_entries, header.num_out_rows), MOST_ROWS)


def _order(step: PendingStep) -> tuple[int, int]:
    return step.finish, step.received_ns
