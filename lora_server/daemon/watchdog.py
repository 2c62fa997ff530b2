"""Ends a process whose loop has stopped, so that its node starts another."""

from __future__ import annotations

import faulthandler
import os
import threading
from collections.abc import Callable

import structlog

LOOKS = 20  # that find no turn; a process that was stopped by a signal, and goes on, loses one of them
log = structlog.get_logger()


class LoopWatchdog:
    """Counts the turns of a loop. A thread calls `run`, which ends the process when the loop makes none for `seconds`.

    It may take as long as it likes to begin.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self._turns = seconds, 0

    def turning(self, stopped: Callable[[], bool]) -> Callable[[], bool]:
        """Wrap a loop's `stopped`: each call counts as a turn."""

        def turn() -> bool:
            self._turns += 1
            return stopped()

        return turn

    def run(self, stopping: threading.Event) -> None:
        """Look LOOKS times in `seconds`; at the last look in vain write the stacks of all threads, and exit with 1."""
        seen, in_vain = self._turns, 0
        while not stopping.wait(self._seconds / LOOKS):
            in_vain = in_vain + 1 if self._turns == seen else 0
            seen = self._turns
            if seen and in_vain >= LOOKS:
                log.critical("the loop hangs; where its threads are follows", seconds=self._seconds)
                faulthandler.dump_traceback()
                os._exit(1)
