"""One stage as a process: it ends by itself, at its deadline, or with the runner; nothing of it stays."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import psutil

from bench.gpu_run import record
from bench.gpu_run.stage import EXIT_UNABLE
from bench.gpu_run.stages import Stage
from bench.gpu_run.state import ROOT, Ending, Outcome, Results
from lora_server.demo import children

KILL_SECONDS = 5.0  # for what was killed to be gone
LOG_CHARS, REASON_CHARS = 4000, 400


def run(
    stage: Stage, results: Results, environment: Mapping[str, str], code: str, more: tuple[str, ...] = ()
) -> Outcome:
    """The stage, to its end. Its outcome is on disk when this returns."""
    if results.ended(stage.name) or not stage.resumes:
        results.forget(stage.name)
    command = [sys.executable, "-m", stage.module, *stage.arguments, *more]
    command += ["--record", str(results.record(stage.name).resolve())]
    began, began_at = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
    status = _status(command, stage.seconds, results, stage.name, environment)
    seconds = time.monotonic() - began
    log = results.log(stage.name).read_text(errors="replace")
    lines = record.read(results.record(stage.name))
    ending, reason = _ending(status, stage, lines, log)
    outcome = Outcome(
        stage.name, ending, reason, round(seconds, 1), began_at, shlex.join(["python", *command[1:-2]]), code,
        lines, log[-LOG_CHARS:],
    )  # fmt: skip
    results.save(outcome)
    return outcome


def _status(
    command: list[str], seconds: float, results: Results, stage: str, environment: Mapping[str, str]
) -> int | None:
    """Run a command to its end. Returns its exit status; None if it was killed at the deadline."""
    with results.log(stage).open("ab") as log:
        process = subprocess.Popen(
            children.own(command), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=dict(environment), cwd=ROOT
        )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        kill(process)


def kill(process: subprocess.Popen[Any]) -> None:
    """Kill a process and its descendants (also stopped ones, and those in other process groups); wait for their end."""
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for one in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    psutil.wait_procs(family, timeout=KILL_SECONDS)
    process.wait()


def _ending(status: int | None, stage: Stage, lines: list[dict[str, Any]], log: str) -> tuple[Ending, str]:
    said = [line["reason"] for line in lines if line["kind"] in ("unable", "broke")]
    if status is None:
        return "cut", f"not done within {stage.seconds:g} s"
    if status == 0:
        return "passed", ""
    if status == EXIT_UNABLE and said:
        return "unable", said[-1]
    bad = [line for line in lines if line.get("good") is False]
    if bad:
        return "failed", f"{len(bad)} of {sum('good' in line for line in lines)} not as expected: {_name(bad[0])}"
    last = log.strip().splitlines()[-1:] or ["it said nothing"]
    how = f"ended by {signal.Signals(-status).name}" if status < 0 else f"ended with {status}"
    return "failed", (said[-1] if said else f"{how}: {last[0]}")[:REASON_CHARS]


def _name(line: dict[str, Any]) -> str:
    what = line.get("name", line["kind"])
    return f"{what} ({line['reason']})"[:REASON_CHARS] if "reason" in line else str(what)
