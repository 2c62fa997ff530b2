"""The processes of one node: forked by its fork server, watched, restarted, stopped.

A child gets its configuration as one JSON line on stdin. The node holds the other end, so stdin closes when
the node ends, for any reason, and the child stops then. On stdout the child reports once that it is up, or why not.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import IO

import msgspec
import structlog

from lora_server.config import ProcessConfig
from lora_server.daemon.forked import Piped
from lora_server.daemon.forks import ForkServer
from lora_server.errors import ConfigError, LoraServerError, ServerUnavailableError
from lora_server.timings import Timings

EXIT_FAILED, EXIT_REFUSED = 1, 78
MAX_FAILED_STARTS = 5  # of one that never was up
ASKED_TO_STOP = (0, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)
log = structlog.get_logger()


class Up(msgspec.Struct):
    """A child's one message on stdout: it is up, or why it cannot be."""

    refused: str = ""


def say(up: Up) -> None:
    """Send the message; called by the child."""
    sys.stdout.buffer.write(msgspec.json.encode(up) + b"\n")
    sys.stdout.buffer.flush()


class CurrentProcess:
    """The process of a child that runs now; none is started once the child stops. Thread-safe."""

    def __init__(self, name: str, module: str, forks: ForkServer) -> None:
        """`module`: with the main() that a process runs."""
        self._name, self._module, self._forks = name, module, forks
        self._lock = threading.Lock()
        self.stopping = threading.Event()
        self.process: Piped | None = None

    def start(self) -> Piped | None:
        """Start a process; None once the child stops. Raises ServerUnavailableError."""
        with self._lock:
            if self.stopping.is_set():
                return None
            self.process = self._forks.start(self._module)
            return self.process

    def terminate(self) -> None:
        """Ask the process to stop, and start no other."""
        with self._lock:
            self.stopping.set()
            if self.process is not None:
                self.process.terminate()

    def end(self, deadline: float) -> None:
        """Wait until the process has ended; kill it at the deadline (time.monotonic())."""
        process = self.process
        if process is not None:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                log.warning(f"{self._name} did not stop in time; killing it", pid=process.pid)
                process.kill()


class Child:
    """A child process that is restarted when it dies."""

    def __init__(
        self,
        name: str,
        module: str,
        forks: ForkServer,
        config: ProcessConfig,
        on_fatal: Callable[[LoraServerError], None],
        node_stops: threading.Event,
    ) -> None:
        self.name, self.config = name, config
        self._on_fatal, self._node_stops = on_fatal, node_stops
        self._current = CurrentProcess(name, module, forks)
        self.restarts = 0
        self._answered = threading.Event()
        self._up: Up | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start it in the background; see wait_up."""
        self._thread = threading.Thread(target=self._keep_alive, name=self.name, daemon=True)
        self._thread.start()

    def wait_up(self, seconds: float) -> None:
        """Wait until it was up once; raises ConfigError if it cannot be, ServerUnavailableError after `seconds`."""
        if not self._answered.wait(seconds):
            raise ServerUnavailableError(f"{self.name}: not up within {seconds:g} s; see the log above")
        if self._up is None or self._up.refused:
            raise ConfigError(self._up.refused if self._up is not None else f"{self.name}: died at its start")

    def _keep_alive(self) -> None:
        failed_starts, last_up, timings, stopping = 0, 0.0, self.config.timings, self._current.stopping
        while not stopping.is_set():
            started = time.monotonic()
            up, code = self._run_once()
            if stopping.is_set() or self._node_stops.wait(timings.stop_together if code in ASKED_TO_STOP else 0):
                return
            if up is not None and not up.refused:
                failed_starts, last_up = 0, time.monotonic()
            else:
                failed_starts += 1
            hopeless = code == EXIT_REFUSED or failed_starts >= MAX_FAILED_STARTS
            if failed_starts and (time.monotonic() - last_up > timings.restart_limit if last_up else hopeless):
                self._end(up.refused if up is not None else "", code, failed_starts)
                return
            if code in ASKED_TO_STOP:
                log.info(f"{self.name} was asked to stop; starting it again")
            else:
                log.error(f"{self.name} died: {_reason(code)}; restarting it")
            self.config = self.config.model_copy(update={"restarted": True})
            self.restarts += 1
            if time.monotonic() - started < timings.restart_pause:
                stopping.wait(timings.restart_pause)

    def _end(self, refused: str, code: int, failed_starts: int) -> None:
        """Give up: with the child's own reason if it said one, as a mistake of the configuration."""
        self._answered.set()
        if refused:
            self._on_fatal(ConfigError(f"{self.name}: {refused}"))
            return
        log.error(f"{self.name} died: {_reason(code)}")
        self._on_fatal(LoraServerError(f"{self.name}: failed {failed_starts} times to start; see the log above"))

    def _run_once(self) -> tuple[Up | None, int]:
        try:
            process = self._current.start()
        except ServerUnavailableError as error:
            log.error(f"{self.name} cannot be started", reason=str(error))
            return None, EXIT_FAILED
        if process is None:
            return None, 0
        with contextlib.suppress(BrokenPipeError):  # it died before it read its configuration
            process.stdin.write(self.config.model_dump_json().encode() + b"\n")
            process.stdin.flush()
        up = _first_words(process.stdout)
        if up is not None and self._up is None:
            self._up = up
            self._answered.set()
        code = process.wait()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.stdout.close()
        return up, code

    def terminate(self) -> None:
        """Ask it to stop, and restart it no more."""
        self._current.terminate()

    def join(self, deadline: float) -> None:
        """Wait for its end; kill it at the deadline (time.monotonic())."""
        self._current.end(deadline)
        if self._thread is not None:
            self._thread.join()


def _first_words(stream: IO[bytes]) -> Up | None:
    """Return a child's message, skipping lines that a library printed; None where the child ended first."""
    for line in stream:
        with contextlib.suppress(msgspec.MsgspecError):
            return msgspec.json.decode(line, type=Up)
    return None


def stop(children: list[Child], seconds: float = Timings.stop) -> None:
    """Stop children with SIGTERM, and those that are left after `seconds` with SIGKILL."""
    for child in children:
        child.terminate()
    deadline = time.monotonic() + seconds
    for child in children:
        child.join(deadline)


def _reason(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
