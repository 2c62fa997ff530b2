"""Python processes of a test's own."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from lora_server.demo import children

ROOT = Path(__file__).parents[2]
HANG_SECONDS = 300.0


def python(*arguments, **environment):
    """Run this Python in the checkout; return what it said and its exit status."""
    options = {"cwd": ROOT, "env": os.environ | environment, "timeout": HANG_SECONDS, "check": False}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, **options)


def start(script, *arguments, pass_fds=()):
    """A python process of ours; it prints one line per thing that the test waits for."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    return subprocess.Popen(
        children.own(command), stdout=subprocess.PIPE, text=True, env=environment, pass_fds=pass_fds
    )


def line_of(process, seconds=60):
    """The next line, with a deadline."""
    timer = threading.Timer(seconds, kill, [process])
    timer.start()
    try:
        return process.stdout.readline().strip()
    finally:
        timer.cancel()


def kill(process):
    """Kill a process and all that it started, as those may hold its pipe."""
    if process.returncode is None:  # its process id cannot have been reused
        with contextlib.suppress(ProcessLookupError):  # it has no group of its own yet
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()


def end(process):
    kill(process)
    process.communicate(timeout=HANG_SECONDS)


@contextlib.contextmanager
def running(script, *arguments, pass_fds=()):
    """A process that `start` starts, for as long as the block."""
    process = start(script, *arguments, pass_fds=pass_fds)
    try:
        yield process
    finally:
        end(process)
