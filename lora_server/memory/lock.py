"""The lock of a weight store."""

from __future__ import annotations

import threading
from types import TracebackType

from lora_server.memory.entry import Answer


class StoreLock:
    """A re-entrant lock with a condition, which defers answers until it is released.

    `done` is called without the lock, so it may take a lock whose holder waits for this one.
    """

    def __init__(self) -> None:
        self._condition, self._depth = threading.Condition(), 0
        self._owed: list[Answer] = []  # in the order in which they are to be called

    def owe(self, *answers: Answer) -> None:
        """Defer answers: after the release each `done` is called with its error. Call with the lock held."""
        self._owed += answers

    def notify(self) -> None:
        """Wake the thread in `wait`. Call with the lock held."""
        self._condition.notify()

    def wait(self, timeout: float | None) -> None:
        """Wait for `notify`, at most `timeout` seconds; with deferred answers return at once, for the lock's release.

        Call with the lock entered exactly once.
        """
        if not self._owed:
            self._depth = 0  # others enter meanwhile
            self._condition.wait(timeout)
            self._depth = 1

    def __enter__(self) -> None:
        self._condition.acquire()
        self._depth += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._depth -= 1
        owed: list[Answer] = []
        if self._depth == 0 and self._owed:
            owed, self._owed = self._owed, owed
        self._condition.release()
        for done, outcome in owed:
            done(outcome)
