"""`python -m tests.chaos`; the exit code says whether everything holds."""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import track

from lora_server.demo.launch import running_server
from tests.chaos import changes, faults, floods, fuzz
from tests.chaos.report import Held, Line, show
from tests.support.workload import workload

TRANSPORTS, MODES = ("shm", "tcp"), ("independent", "leader")
PARTS = ("fuzz", "floods", "faults", "changes")


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--short", action="store_true", help="a few of each, for CI, where p99 is shown and no bar")
    parser.add_argument("--seed", type=int, default=20261122, help="of everything (default: %(default)s)")
    parser.add_argument("--only", choices=PARTS, action="append", help="this part, and others that are named so")
    given = parser.parse_args()
    times, inputs = (1, 300) if given.short else (20, 12_000)
    lines, held, load = list[Line](), list[Held](), workload("mixtral")
    setups = [("shm", "leader")] if given.short else list(itertools.product(TRANSPORTS, MODES))
    with tempfile.TemporaryDirectory(prefix="chaos-") as scratch:
        for part in track(given.only or PARTS, "harming", console=Console(stderr=True)):
            dice = random.Random(f"{given.seed} {part}")
            if part == "fuzz":
                lines += _fuzz(Path(scratch), inputs, dice)
            for transport in TRANSPORTS[: 1 if given.short else 2] if part == "floods" else ():
                more, one = floods.play(_made(scratch, part, transport), transport, given.short)
                lines, held = [*lines, *more], [*held, one]
            if part == "changes":
                more, one = changes.play(_made(scratch, part), load, given.short, dice)
                lines, held = [*lines, *more], [*held, one]
            for transport, mode in setups if part == "faults" else ():
                more, one = faults.play(_made(scratch, transport, mode), load, transport, mode, times, dice)
                lines, held = [*lines, *more], [*held, one]
    return 0 if show(lines, held, given.seed) else 1


def _made(scratch: str, *names: str) -> Path:
    path = Path(scratch, *names)
    path.mkdir(parents=True)
    return path


def _fuzz(scratch: Path, inputs: int, dice: random.Random) -> list[Line]:
    load = workload("mixtral")
    lines = [fuzz.slots(load.paths["fused"], inputs, dice), fuzz.control_messages(inputs, dice)]
    lines.append(fuzz.adapter_files(load, scratch, inputs, dice))
    with running_server(scratch / "log", ["--base-model", str(load.base)]) as server:
        port = int(server.http.rpartition(":")[2])
        return [*lines, fuzz.http(port, inputs, dice, lambda: server.get("/livez")[0] == 200)]


if __name__ == "__main__":
    sys.exit(main())
