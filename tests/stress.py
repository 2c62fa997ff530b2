"""`make stress N=10`: every test N times in random orders, on a machine kept at a load of three times its cores;
prints each test that ever failed, and in which runs.

`ARGS` are pytest's: paths, -k, -m. Paths below tests/vllm and tests/sglang run in that engine's environment, two
processes at a time.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from lora_server.demo import children

LOAD, LOOK_SECONDS = 3, 0.1  # threads per core that run or could, with those of the tests
ENGINES = {Path(f"tests/{name}"): f".venv-{name}/bin/python" for name in ("vllm", "sglang")}
SPIN = "x = 1.0\nwhile True:\n    for _ in range(1000): x = x * 1.0000001 % 7.0"
PYTEST = [sys.executable, "-m", "pytest", "--dist", "loadfile", "--no-loadscope-reorder"]  # else xdist sorts files


def main() -> int:
    """The exit code: 0 where no test failed, 1 where one did."""
    parser = argparse.ArgumentParser(prog="python -m tests.stress", description=__doc__)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument(
        "--seed", type=int, default=random.SystemRandom().randrange(1, 10**6), help="of the first order"
    )
    parser.add_argument("-n", "--processes", default="4")
    given, rest = parser.parse_known_args()
    paths = [one for one in rest if one.startswith("tests/") or one == "tests"]
    options = [one for one in rest if one not in paths]
    suites = list(_suites(paths, given.processes))
    busy = [children.start([sys.executable, "-c", SPIN]) for _ in range(LOAD * (os.cpu_count() or 1))]
    over = threading.Event()
    keeping = threading.Thread(target=_keep_busy, args=(busy, over), daemon=True)
    keeping.start()
    failed, console = defaultdict[str, list[int]](list), Console()
    try:
        for seed in range(given.seed, given.seed + given.runs):
            for command in suites:
                console.print(f"[bold]order {seed}[/bold], load {os.getloadavg()[0]:.1f}: {' '.join(command[3:])}")
                for name in _failures([*command, *options], seed):
                    failed[name].append(seed)
    finally:
        over.set()
        keeping.join()
        for one in busy:
            one.send_signal(signal.SIGCONT)
            children.stop(one)
    _show(failed, given.runs, console)
    return 1 if failed else 0


def _suites(paths: list[str], processes: str) -> Iterator[list[str]]:
    """Yield a command for each environment that these paths need; without paths, for each that is there."""
    of_engines = {engine: [one for one in paths if engine in (Path(one), *Path(one).parents)] for engine in ENGINES}
    ours = [one for one in paths if not any(one in its for its in of_engines.values())]
    if ours or not paths:
        yield [*PYTEST, "-n", processes, *(ours or ["tests"])]
    for engine, python in ENGINES.items():
        if of_engines[engine] or (not paths and Path(python).exists()):
            options = ["-n", "2", "-c", f"{engine}/pytest.ini", "--rootdir=."]
            yield [python, *PYTEST[1:], *options, *(of_engines[engine] or [str(engine)])]


def _keep_busy(busy: list[subprocess.Popen[bytes]], over: threading.Event) -> None:
    """Have as many of these processes run as the rest of the machine leaves room for, until it is over."""
    going = len(busy)
    while not over.wait(LOOK_SECONDS):
        running = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
        wanted = min(max(0, len(busy) - (running - going)), len(busy))
        for number in range(min(going, wanted), max(going, wanted)):
            busy[number].send_signal(signal.SIGCONT if wanted > going else signal.SIGSTOP)
        going = wanted


def _failures(command: list[str], seed: int) -> list[str]:
    """Names of the tests that failed in one run; of the command, where it ended without a report."""
    with tempfile.TemporaryDirectory(prefix="stress-") as scratch:
        report = Path(scratch, "report.xml")
        command = [*command, "-p", "tests.shuffle", "--shuffle", str(seed), "-p", "no:cacheprovider"]
        code = children.start([*command, f"--junitxml={report}"], env={**os.environ, "PYTHONPATH": "."}).wait()
        if code == pytest.ExitCode.NO_TESTS_COLLECTED:  # -k or -m means the other suite
            return []
        if not report.exists() or code not in (0, 1):
            return [f"the run itself: exit code {code}"]
        cases = ElementTree.parse(report).getroot().iter("testcase")
        bad = [one for one in cases if one.find("failure") is not None or one.find("error") is not None]
        return sorted({f"{one.get('classname')}::{one.get('name')}" for one in bad})


def _show(failed: dict[str, list[int]], runs: int, console: Console) -> None:
    if not failed:
        console.print(f"no test failed in {runs} run{'s' * (runs > 1)}")
        return
    table = Table("test", "failed", "in the orders")
    for name, seeds in sorted(failed.items(), key=lambda one: -len(one[1])):
        table.add_row(name, f"{len(seeds)} of {runs}", ", ".join(map(str, seeds)))
    console.print(table)


if __name__ == "__main__":
    with children.ending_on_signals():
        sys.exit(main())
