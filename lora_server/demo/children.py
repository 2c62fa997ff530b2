"""Children that end with their parent, however it ends: `children.start(command)`, or `own(command)` as a command line.

The command is started through this file, which leaves a keeper beside it and then becomes the command: same pid,
same descriptors, a process group of its own. The keeper waits until the parent or the command ends, and ends what
is left of the group then: SIGTERM, and later SIGKILL.

Why a keeper: PR_SET_PDEATHSIG comes when the *thread* that started the child ends, knows one signal, and does not
reach grandchildren (vLLM's engine core stays for ever without its API server). A pipe that the child reads needs
the child's help, which one that is stuck does not give. The keeper needs neither, and being in the group itself
it keeps the group's number from being used again.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from types import FrameType
from typing import Any

STOP_SECONDS = 15.0
REST_SECONDS = 1.0  # for what a command left behind
END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def own(command: Sequence[str]) -> list[str]:
    """Wrap a command line, so that it ends with this process, its parent; not for a shell's own."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def start(command: Sequence[str], **how: Any) -> subprocess.Popen[Any]:
    """Start a child that ends with this process; `how` is subprocess's."""
    return subprocess.Popen(own(command), **how)


def stop(process: subprocess.Popen[Any], seconds: float = STOP_SECONDS) -> int:
    """Send SIGTERM, then SIGKILL at the deadline; returns the exit code."""
    process.terminate()
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def cores(threads: int) -> tuple[list[int], list[int]]:
    """Return the cores of an engine, one for each thread, and those of its server: the others, or all where there are
    no others."""
    every = sorted(os.sched_getaffinity(0))
    return every[:threads], every[threads:] or every


@contextlib.contextmanager
def on_cores(some: Collection[int]) -> Iterator[None]:
    """Keep the processes and threads that the block starts to these cores, and this thread until its end."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, some)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def ending_on_signals() -> Iterator[None]:
    """Turn SIGINT, SIGTERM and SIGHUP in the block into SystemExit(128 + number), so that what it opened is closed.

    In the main thread only. A second signal changes nothing; one that was ignored before still is (nohup).
    """
    before = {number: signal.getsignal(number) for number in END_SIGNALS}
    ours = [number for number in END_SIGNALS if before[number] is not signal.SIG_IGN]

    def end(number: int, _: FrameType | None) -> None:
        for one in ours:
            signal.signal(one, lambda *_: None)
        raise SystemExit(128 + number)

    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, before[number])


def _become(parent: int, command: list[str]) -> None:
    """Leave a keeper, then be the command; return where the parent is gone already."""
    if not leave_keeper(parent):
        return
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and so would the command
    os.execvp(command[0], command)


def leave_keeper(parent: int) -> bool:
    """Make this process and its group end with its parent, by a keeper process; return False if the parent is gone."""
    alive = os.pidfd_open(parent)
    if os.getppid() != parent:
        return False
    group = os.getpid()
    if os.getpgrp() != group:
        os.setpgid(0, 0)
    middle = os.fork()
    if middle == 0:  # so that the keeper is not a child of the command, which waits for its own children only
        if os.fork() == 0:
            _keep(alive, group)
        os._exit(0)
    os.waitpid(middle, 0)
    return True


def _keep(parent: int, group: int) -> None:
    """Wait until the parent (a pidfd) or the command ends; then end every process of the group, this one included."""
    for number in END_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    os.dup2(parent, 0)
    os.closerange(1, os.sysconf("SC_OPEN_MAX"))  # a pipe of the command's must end with it
    with contextlib.suppress(ProcessLookupError):
        command = os.pidfd_open(group)
        select.select([0, command], [], [])
        os.killpg(group, signal.SIGTERM)
        select.select([command], [], [], STOP_SECONDS)
    time.sleep(REST_SECONDS)
    os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    with contextlib.suppress(ProcessLookupError):
        _become(int(sys.argv[1]), sys.argv[2:])
    sys.exit("its parent ended before it began")
