"""Watches shards while kernels of an engine wait for them: the host is busy with the rest of the pass."""

from __future__ import annotations

import threading
from collections.abc import Callable

LOOK_SECONDS = 0.005


class Watchdog:
    """Calls `look` again and again while it is awake, in a thread of its own."""

    def __init__(self, look: Callable[[], None]) -> None:
        self._look, self._awake, self._closed = look, threading.Event(), threading.Event()
        self._looking = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="lora-watchdog", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Begin a pass."""
        self._awake.set()

    def sleep(self) -> None:
        """End a pass; returns after the last look."""
        self._awake.clear()
        with self._looking:
            return

    def _run(self) -> None:
        while self._awake.wait() and not self._closed.is_set():
            with self._looking:
                if self._awake.is_set():
                    self._look()
            self._closed.wait(LOOK_SECONDS)

    def close(self) -> None:
        """Stop watching; idempotent."""
        self.sleep()
        self._closed.set()
        self._awake.set()
        self._thread.join()
