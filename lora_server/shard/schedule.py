"""Which step a shard serves next.

Decode goes before prefill; within a class, first come first served. So that a flood of decoding
never starves a prompt, one prefill step is taken after PATIENCE decode steps that passed it.

Steps of one client are served in the order it pushed them, so a client is represented here by its
oldest unanswered step alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lora_server.transport.base import Connection
from lora_server.wire import slot
from lora_server.wire.slot import RequestHeader

PATIENCE = 8


@dataclass
class PendingStep:
    """A client's oldest unanswered step. Times are time.monotonic_ns() of this host."""

    connection: Connection
    seq: int
    header: RequestHeader
    received_ns: int
    expires_ns: int
    handles: frozenset[int] = frozenset()
    pin: int | None = None  # on its weights, from the moment on at which all are here, and its client may use them

    @property
    def blocked(self) -> bool:
        """Its weights are not here yet."""
        return self.pin is None


class DecodeFirst:
    """The rule above; the only state is how many decode steps passed a waiting prefill."""

    def __init__(self) -> None:
        self._passed = 0

    def pick(self, pending: Iterable[PendingStep]) -> PendingStep | None:
        """The step to serve now, among those whose weights are here; None if there is none."""
        ready = [step for step in pending if not step.blocked]
        if not ready:
            return None
        oldest = {
            step_class: min((s for s in ready if s.header.step_class == step_class), key=_age, default=None)
            for step_class in (slot.DECODE, slot.PREFILL)
        }
        decode, prefill = oldest[slot.DECODE], oldest[slot.PREFILL]
        if prefill is None:
            return decode
        if decode is None or self._passed >= PATIENCE:
            self._passed = 0
            return prefill
        self._passed += 1
        return decode


def _age(step: PendingStep) -> int:
    return step.received_ns
