"""The wait of steps for weights that are loading."""

from __future__ import annotations

from dataclasses import dataclass, field

from lora_server.shard.schedule import PendingStep
from lora_server.timings import Timings
from lora_server.wire.slot import WAITS_FOR_WEIGHTS

REFUSED_AT = 0.9  # of a step's budget: the refusal reaches a client that waits for weights before its own deadline


@dataclass
class WeightsPatience:
    """Bounds the wait of a pass, one layer after the other: `seconds` for the steps of a client together, of which it
    regains what passes without a wait. A client that says that it waits may use a step's budget.
    """

    seconds: float = Timings.weights
    _waited: dict[int, tuple[int, int]] = field(default_factory=dict)  # by client: ns, and when it last waited

    def ends_ns(self, step: PendingStep) -> float:
        """Return when a blocked step is refused."""
        patience_ns = REFUSED_AT * (step.expires_ns - step.received_ns)
        if not step.header.flags & WAITS_FOR_WEIGHTS:
            patience_ns = min(patience_ns, self.seconds * 1e9 - self._used_ns(step))
        return step.received_ns + patience_ns

    def note(self, step: PendingStep, now_ns: int) -> None:
        """Account for the wait of a step that is not blocked any more."""
        used_ns, waited = self._used_ns(step), self._waited
        self._waited = {client: its for client, its in waited.items() if now_ns - its[1] < its[0]}
        self._waited[step.connection.grant.client] = used_ns + now_ns - step.received_ns, now_ns

    def _used_ns(self, step: PendingStep) -> int:
        waited_ns, at_ns = self._waited.get(step.connection.grant.client, (0, 0))
        return max(0, waited_ns - (step.received_ns - at_ns))
