"""A forked child of this process, which subprocess does not know: signals to it, its end and its status."""

from __future__ import annotations

import os
import select
import signal
import threading
import weakref


class Forked:
    """A child process. Thread-safe."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._handle = os.pidfd_open(pid)
        self._lock = threading.Lock()
        weakref.finalize(self, os.close, self._handle)

    def poll(self) -> int | None:
        """Return the exit status, or minus the signal that ended it; None while it runs."""
        with self._lock:
            if self.returncode is None and self._has_ended(0):
                self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            return self.returncode

    def wait(self, seconds: float | None = None) -> int:
        """Wait for its end and return the status. Raises TimeoutError."""
        self._has_ended(seconds)
        code = self.poll()
        if code is None:
            raise TimeoutError(f"process {self.pid} did not end within {seconds} s")
        return code

    def _has_ended(self, seconds: float | None) -> bool:
        ended = select.poll()
        ended.register(self._handle, select.POLLIN)
        return bool(ended.poll(None if seconds is None else 1000 * seconds))

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless its end is known."""
        with self._lock:
            if self.returncode is None:
                signal.pidfd_send_signal(self._handle, number)

    def terminate(self) -> None:
        """Send SIGTERM to the child."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to the child."""
        self.send_signal(signal.SIGKILL)


class Piped(Forked):
    """A child with pipes for stdin and stdout; this process's ends."""

    def __init__(self, pid: int, stdin: int, stdout: int) -> None:
        super().__init__(pid)
        self.stdin, self.stdout = os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb")
