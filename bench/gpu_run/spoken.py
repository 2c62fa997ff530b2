"""A child process that reports what happens to it: JSON objects with an "event", one per line of its stdout."""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from lora_server.demo import children

END_SECONDS = 5.0  # for the last of what it said


class Spoken:
    """`python -m MODULE ARGUMENTS`; it ends with this process. Its events come in order, each read with a deadline."""

    def __init__(self, module: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        command, own = [sys.executable, "-m", module, *arguments], environment and dict(environment)
        self.process = children.start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=own)
        self._events: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):  # libraries print too
                self._events.put(json.loads(line))
        self._events.put(None)

    def event(self, deadline: float, what: str) -> dict[str, Any]:
        """The next one, whatever it is; deadline is time.monotonic(). Raises TimeoutError, RuntimeError if it ended."""
        try:
            found = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise TimeoutError(f"process {self.process.pid}: no {what}") from None
        if found is None:
            self._events.put(None)
            raise RuntimeError(f"process {self.process.pid} ended with {self.process.wait()}; expected {what}")
        return found

    def next(self, event: str, seconds: float) -> dict[str, Any]:
        """The next of a kind; others before it are dropped. Raises as `event` does."""
        deadline = time.monotonic() + seconds
        while (found := self.event(deadline, f"event {event!r} within {seconds:g} s"))["event"] != event:
            continue
        return found

    def answer(self, event: str, seconds: float) -> dict[str, Any]:
        """Wait for its next event. Raises as `event` does, and RuntimeError for one of another kind."""
        found = self.event(time.monotonic() + seconds, f"{event!r} within {seconds:g} s")
        if found["event"] != event:
            raise RuntimeError(f"process {self.process.pid}: expected {event!r}, got {found}")
        return found

    def ask(self, event: str, seconds: float, **command: Any) -> dict[str, Any]:
        """Tell it a command, and wait for the answer as `answer` does."""
        self.tell(**command)
        return self.answer(event, seconds)

    def heard(self) -> list[dict[str, Any]]:
        """Return the events that have not been read yet; raise RuntimeError if one of them is the process's end."""
        found = []
        while not self._events.empty():
            found.append(self.event(time.monotonic(), "event"))
        return found

    def tell(self, **command: Any) -> None:
        """One line to its stdin."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def send(self, number: signal.Signals) -> None:
        """A signal, to the process alone."""
        self.process.send_signal(number)

    def end(self) -> None:
        """SIGKILL, which ends one that is stopped too. Idempotent."""
        self.process.kill()
        self.process.wait()
        self._reader.join(END_SECONDS)
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):  # it was told something that it never read
                if pipe is not None:
                    pipe.close()
