"""Processes of one module, and one in reserve that has its imports behind it: they are most of what a start takes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading


class Spare:
    """Thread-safe. A process waits for its configuration on stdin; if that closes first, it ends."""

    def __init__(self, module: str, threads: int) -> None:
        self._module, self._threads = module, str(threads)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def prepare(self) -> None:
        """Have one, from now on until it is taken."""
        with self._lock:
            if not self._closed and (self._process is None or self._process.poll() is not None):
                self._discard()
                self._process = self._start()

    def take(self) -> subprocess.Popen[bytes]:
        """The one in reserve if it lives, else a new one: the caller's."""
        with self._lock:
            process = self._process
            if process is None or process.poll() is not None:
                self._discard()
                return self._start()
            self._process = None
            return process

    def _start(self) -> subprocess.Popen[bytes]:
        environment = os.environ | {"OMP_NUM_THREADS": self._threads, "MKL_NUM_THREADS": self._threads}
        command = [sys.executable, "-m", self._module]
        # a group of its own: Ctrl-C goes to the parent, which stops its children in order
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, process_group=0
        )

    def close(self) -> None:
        """The one in reserve is not needed; none comes any more."""
        with self._lock:
            self._closed = True
            self._discard()

    def _discard(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
