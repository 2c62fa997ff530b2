"""Ends a process when its main loop hangs, so that its node starts another."""

from __future__ import annotations

import faulthandler
import os
import threading
from collections.abc import Callable

import structlog

CHECKS = 20  # within the limit: a process that was suspended by a signal resumes with one failed check, not with all
log = structlog.get_logger()


class LoopWatchdog:
    """Counts a loop's iterations. A thread calls `run`, which ends the process when none begins for `seconds`.

    Before the first iteration there is no limit.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self._iterations = seconds, 0

    def counting(self, stopped: Callable[[], bool]) -> Callable[[], bool]:
        """Wrap the condition by which a loop ends: each call counts as an iteration."""

        def counted() -> bool:
            self._iterations += 1
            return stopped()

        return counted

    def run(self, stopping: threading.Event) -> None:
        """Check until `stopping`; after CHECKS checks without an iteration dump all threads' stacks and exit with 1."""
        seen, failed = self._iterations, 0
        while not stopping.wait(self._seconds / CHECKS):
            failed = failed + 1 if self._iterations == seen else 0
            seen = self._iterations
            if seen and failed >= CHECKS:
                log.critical("the loop hangs; where its threads are follows", seconds=self._seconds)
                faulthandler.dump_traceback()
                os._exit(1)
