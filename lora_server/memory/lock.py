"""The lock of a weight store."""

from __future__ import annotations

import threading
from types import TracebackType

from lora_server.memory.want import Answer


class StoreLock:
    """A condition whose holder may owe answers: each `done` is called as soon as the lock is released.

    `done` may thus wait for any other lock, of a thread that waits for this one. Threads may enter it again.
    """

    def __init__(self) -> None:
        self._condition, self._depth = threading.Condition(), 0
        self._owed: list[Answer] = []  # in the order in which they are to be called

    def owe(self, *answers: Answer) -> None:
        """Have each `done` called with its error after the release. The caller has the lock."""
        self._owed += answers

    def notify(self) -> None:
        """Wake the thread that waits. The caller has the lock."""
        self._condition.notify()

    def wait(self, timeout: float | None) -> None:
        """Wait to be notified, at most `timeout` seconds; return at once if answers are owed, to be released first.

        The caller has entered the lock once.
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
