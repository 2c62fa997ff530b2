"""Joining a server anew in a thread of its own: while it is away, nobody waits long, and base rows not at all."""

from __future__ import annotations

import threading
from collections.abc import Callable

from lora_server.errors import LoraServerError, ServerUnavailableError


class Rejoin:
    """`attempt` joins, or raises ServerUnavailableError at its own deadline and is then called again."""

    def __init__(self, attempt: Callable[[], object]) -> None:
        self._attempt = attempt
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self.error: LoraServerError | None = None  # the newest reason why it did not work
        self.waited = False  # somebody waited for this outage already

    def wait(self, seconds: float) -> bool:
        """Start if need be, and wait so long; whether it is joined. Raises what makes joining hopeless."""
        with self._lock:
            stale = self._thread is not None and not self._thread.is_alive() and self.error is None
            if self._thread is None or stale:  # whoever waits is away: what was joined before is lost again
                self.error, self.waited = None, False
                self._thread = threading.Thread(target=self._run, name="lora-rejoin", daemon=True)
                self._thread.start()
            thread = self._thread
        thread.join(seconds)
        if thread.is_alive():
            self.waited = True
            return False
        with self._lock:
            self._thread = None
        if self.error is not None:
            raise self.error
        return True

    def _run(self) -> None:
        while not self._closed:
            try:
                self._attempt()
            except ServerUnavailableError as error:
                self.error = error
            except LoraServerError as error:  # another base model, say
                self.error = error
                return
            else:
                self.error = None
                return

    def close(self) -> None:
        """No further attempts."""
        self._closed = True
