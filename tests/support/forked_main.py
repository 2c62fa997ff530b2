"""The main of a process that tests.support.forked forks: it becomes `python -m MODULE ARGUMENT...`."""

from __future__ import annotations

import atexit
import contextlib
import os
import runpy
import signal
import sys
import tempfile
import threading
import traceback
from pathlib import Path

import msgspec
import structlog

from lora_server.daemon.forks import call_myself
from lora_server.demo import children


def main() -> None:
    from tests.support.forked import Job

    with os.fdopen(3, "rb") as file:
        said = file.read()
    if not said:
        os._exit(1)  # its parent ended before it began
    job = msgspec.json.decode(said, type=Job)
    with contextlib.suppress(ProcessLookupError):
        if children.leave_keeper(job.parent):
            _become(job)
    os._exit(1)


def _become(job) -> None:
    """Replace all state of the fork server by the job's, run its module, and exit."""
    call_myself(Path(sys.executable).name)
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    structlog.reset_defaults()
    os.environ.clear()
    os.environ.update(job.environment)
    tempfile.tempdir = None
    os.chdir(job.directory)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.modules.pop(job.module, None)  # which is __main__ now
    sys.argv = [job.module, *job.arguments]
    sys.path[0] = job.directory
    os._exit(_end(_run(job.module)))


def _run(module: str) -> int:
    """Run a module as __main__ and return its exit code."""
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        traceback.print_exc()
        sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _end(code: int) -> int:
    """End like an interpreter, but do not tear down modules: that takes half a second and copies shared pages."""
    threading._shutdown()
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        return 120
    return code
