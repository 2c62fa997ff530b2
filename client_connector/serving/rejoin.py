"""Joining a server anew in a thread of its own: while it is away, nobody waits long, and base rows not at all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import structlog

from lora_server.errors import LoraServerError, ServerUnavailableError

log = structlog.get_logger()


class Rejoin:
    """`attempt` joins, or raises ServerUnavailableError at its own deadline and is then called again.

    An outage is two lines in the log, its start and its end; `who` of an engine's processes is meant.
    """

    def __init__(self, attempt: Callable[[], object], who: str = "engine") -> None:
        self._attempt, self._who = attempt, who
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._away_since: float | None = None
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
        if self._away_since is None:
            self._away_since = time.monotonic()
            log.warning("LoRA server lost; joining it anew", who=self._who)
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
                log.warning("rejoined", who=self._who, away_seconds=round(time.monotonic() - self._away_since, 1))
                self._away_since = None
                return

    @property
    def away_seconds(self) -> float:
        """For how long the server has been away; 0 while it is there."""
        since = self._away_since
        return 0.0 if since is None else time.monotonic() - since

    def close(self) -> None:
        """No further attempts."""
        self._closed = True
