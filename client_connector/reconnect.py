"""The connector while a server is away: how long calls are repeated, and how a lost server is joined again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import structlog
import tenacity

from lora_server.errors import LoraServerError, ServerBusyError, ServerUnavailableError

LAST_SECONDS = 1.0
log = structlog.get_logger()


def while_away(seconds: float, *others: type[LoraServerError]) -> tenacity.Retrying:
    """Return a retrier: it repeats a call that raises ServerUnavailableError or one of `others`, for `seconds` at most.

    Then it raises the last error. The last attempt has LAST_SECONDS or a tenth of the time: one that is cut off at once
    would only say that there was no answer.
    """
    return _repeat(seconds, (ServerUnavailableError, *others))


def while_busy(seconds: float) -> tenacity.Retrying:
    """Return a retrier that repeats a call, for `seconds` at most, while the server is up but has no answer yet."""
    return _repeat(seconds, (ServerBusyError,))


def _repeat(seconds: float, errors: tuple[type[LoraServerError], ...]) -> tenacity.Retrying:
    return tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(errors),
        stop=tenacity.stop_before_delay(seconds - min(LAST_SECONDS, seconds / 10)),
        wait=tenacity.wait_random(0.1, 0.4),
        reraise=True,
    )


class Outage:
    """The time that a server has been away."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds since the outage began; 0 while the server is up."""
        since = self._since
        return 0.0 if since is None else self._clock() - since

    def begin(self) -> bool:
        """Note that the server is away; return whether that is news."""
        is_new = self._since is None
        if is_new:
            self._since = self._clock()
        return is_new

    def end(self) -> None:
        """Note that the server is up."""
        self._since = None


class Reconnector:
    """Joins a lost server again in a thread of its own, so that an engine goes on with requests of its base model.

    `attempt` joins once. It raises ServerUnavailableError at its own deadline and is then repeated; any other error
    makes joining hopeless. The log gets one line when an outage starts and one when it ends; `process` names the
    engine's process.
    """

    def __init__(self, attempt: Callable[[], object], process: str = "engine") -> None:
        self._attempt, self._process = attempt, process
        self._lock = threading.Lock()  # _thread
        self._thread: threading.Thread | None = None
        self._closed = self._waited = False
        self._outage = Outage()
        self.error: LoraServerError | None = None  # the newest failed attempt's

    def wait(self, seconds: float, *, once: bool = False) -> bool:
        """Start joining if needed, unless it is closed, and wait for it; return whether the server is joined.

        With `once` only the first call of an outage waits. Raises the error that makes joining hopeless.
        """
        if self._closed:
            return False
        with self._lock:
            # the thread of an earlier outage: the session that it joined is lost again
            stale = self._thread is not None and not self._thread.is_alive() and self.error is None
            if self._thread is None or stale:
                self.error, self._waited = None, False
                self._thread = threading.Thread(target=self._run, name="lora-reconnect", daemon=True)
                self._thread.start()
            thread = self._thread
        thread.join(0.0 if once and self._waited else seconds)
        if thread.is_alive():
            self._waited = True
            return False
        with self._lock:
            self._thread = None
        if self.error is not None:
            raise self.error
        return True

    def _run(self) -> None:
        if self._outage.begin():
            log.warning("LoRA server lost; joining it again", process=self._process)
        while not self._closed:
            try:
                self._attempt()
            except ServerUnavailableError as error:
                self.error = error
            except LoraServerError as error:  # the server has another base model, for example
                self.error = error
                return
            else:
                self.error = None
                log.warning("rejoined", process=self._process, away_seconds=round(self._outage.seconds, 1))
                self._outage.end()
                return

    @property
    def away_seconds(self) -> float:
        """Seconds since the server was lost; 0 while it is joined."""
        return self._outage.seconds

    def close(self) -> None:
        """Make no further attempts."""
        self._closed = True
