"""Seconds that a request waited, by what it waited for."""

from __future__ import annotations

import time
from collections.abc import Callable

from client_connector.serving.request_state import Phase
from lora_server.wire.waits import ENGINE, NAME, PLACE, WAITS, WEIGHTS

_STAGE_OF = {
    Phase.ASKING: NAME,  # the server's answer
    Phase.AWAY: NAME,
    Phase.QUEUED: PLACE,
    Phase.LOADING: WEIGHTS,
    Phase.HELD: ENGINE,  # until the engine's next pass
}


class RequestWaits:
    """The seconds of one request in each stage; begins in the first, at `began`. One thread at a time."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.seconds = dict.fromkeys(WAITS, 0.0)
        self.began = now()
        self._now, self._stage, self._since = now, NAME, self.began

    def enter(self, phase: Phase) -> None:
        """Note the request's next phase."""
        self._turn(_STAGE_OF.get(phase, ""))

    def scheduled(self) -> None:
        """Note that the request is in a pass."""
        if self._stage == ENGINE:
            self._turn("")

    def _turn(self, stage: str) -> None:
        now = self._now()
        if self._stage:
            self.seconds[self._stage] += now - self._since
        self._stage, self._since = stage, now
