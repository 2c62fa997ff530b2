"""One-line sabotages of the device protocol, each caught by a case or a schedule: python -m tests.gpu_mutants.

A mutant that nothing catches is a test that is missing: the exit status says so.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from kernels_cuda.build import SOURCE
from lora_server.transport.gpu.source import FILES
from tests.gpu_sabotages import MUTANTS, Mutant

SCHEDULES = 150
SECONDS = 300.0  # of one mutant


def mutated(mutant: Mutant) -> dict[str, str]:
    """Its file as it would be. Raises ValueError for a sabotage whose place is gone."""
    text = FILES.get(mutant.file) or (SOURCE / mutant.file).read_text()
    if text.count(mutant.line) != 1:
        raise ValueError(f"{mutant.name}: {mutant.file} has its line {text.count(mutant.line)} times, expected once")
    return {mutant.file: text.replace(mutant.line, mutant.instead)}


def judge(mutant: Mutant) -> str:
    """In this process: what catches it first; "" if nothing does. A kernel that is wrong may take the process along."""
    from tests import gpu_cases, gpu_schedules, gpu_world

    library = gpu_world.load(mutated(mutant), mutant.nvshmem)
    for case in () if mutant.nvshmem else gpu_cases.CASES:
        print(f"{case.__name__}", file=sys.stderr, flush=True)
        try:
            case(library)
        except Exception as error:  # any: the world is not as it must be
            return f"{case.__name__} ({_short(error)})"
    for seed in range(SCHEDULES):
        print(f"schedule {seed}", file=sys.stderr, flush=True)
        try:
            gpu_schedules.play(seed, library)
        except Exception as error:  # any: the world is not as it must be
            return f"schedule {seed} ({_short(error)})"
    return ""


def _short(error: Exception) -> str:
    return f"{type(error).__name__} {error}".split("\n")[0].strip()[:70]


def apart(number: int) -> str:
    """The same in a process of its own: a crash and a kernel that never ends are caught too."""
    command = [sys.executable, "-m", "tests.gpu_mutants", "--judge", str(number)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired as late:
        said = (late.stderr or b"").decode().split("\n")
        return f"{[*filter(None, said)][-1] if any(said) else 'the build'} (it never ends)"
    if done.returncode not in (0, 1):
        last = next((one for one in reversed(done.stderr.splitlines()) if one.startswith(("schedule", *_names()))), "")
        return f"{last or done.stderr[-200:]} (the kernel crashed)"
    return done.stdout.strip()


def _names() -> tuple[str, ...]:
    from tests.gpu_cases import CASES

    return tuple(case.__name__ for case in CASES)


def main() -> int:
    """A line per mutant, then how many were caught."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--judge", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--only", default="", help="those whose names hold this")
    arguments = parser.parse_args()
    if arguments.judge is not None:
        caught = judge(MUTANTS[arguments.judge])
        print(caught)
        return 0 if caught else 1
    caught, chosen = 0, [i for i, one in enumerate(MUTANTS) if arguments.only in one.name]
    for i in chosen:
        began = time.monotonic()
        by = apart(i)
        caught += bool(by)
        print(f"{MUTANTS[i].name}: {by or 'NOT CAUGHT'} [{time.monotonic() - began:.0f} s]", flush=True)
    print(f"{caught} of {len(chosen)} mutants caught")
    return 0 if caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
