"""One-line sabotages of the device protocol, each caught by a case or a schedule: `make mutants`.

All take an hour of a CPU; --short, some of each kind, some minutes. A mutant that nothing catches is a test that is
missing: the exit status says so.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from kernels_cuda.build import SOURCE
from lora_server.transport.gpu.source import FILES
from tests.support.gpu.gpu_sabotages import MUTANTS, SHORT, Mutant

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
    from tests.support.gpu import gpu_cases, gpu_codes, gpu_led, gpu_schedules, gpu_world

    library = gpu_world.load(mutated(mutant), mutant.nvshmem, mutant.in_codes)
    cases = gpu_codes.CASES if mutant.in_codes else gpu_led.CASES if mutant.led else gpu_cases.CASES
    play = gpu_led.play if mutant.led else gpu_schedules.play
    for case in gpu_cases.NETWORK_CASES if mutant.nvshmem else cases:
        print(f"{case.__name__}", file=sys.stderr, flush=True)
        try:
            case(library)
        except Exception as error:  # any: the world is not as it must be
            return f"{case.__name__} ({_short(error)})"
    for seed in range(SCHEDULES):
        print(f"schedule {seed}", file=sys.stderr, flush=True)
        try:
            play(seed, library)
        except Exception as error:  # any: the world is not as it must be
            return f"schedule {seed} ({_short(error)})"
    return ""


def _short(error: Exception) -> str:
    return f"{type(error).__name__} {error}".split("\n")[0].strip()[:70]


def apart(number: int) -> str:
    """The same in a process of its own: a crash and a kernel that never ends are caught too. Says so in a line."""
    command = [sys.executable, "-m", "tests.support.gpu.gpu_mutants", "--judge", str(number)]
    began = time.monotonic()
    by = _caught(command)
    print(f"{MUTANTS[number].name}: {by or 'NOT CAUGHT'} [{time.monotonic() - began:.0f} s]", flush=True)
    return by


def _caught(command: list[str]) -> str:
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
    from tests.support.gpu.gpu_cases import CASES, NETWORK_CASES
    from tests.support.gpu.gpu_codes import CASES as IN_CODES
    from tests.support.gpu.gpu_led import CASES as LED

    return tuple(case.__name__ for case in (*CASES, *NETWORK_CASES, *IN_CODES, *LED))


def main() -> int:
    """A line per mutant, then how many were caught."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--judge", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--only", default="", help="those whose names hold this")
    parser.add_argument("--short", action="store_true", help="some of each kind, that are caught soon")
    arguments = parser.parse_args()
    if arguments.judge is not None:
        caught = judge(MUTANTS[arguments.judge])
        print(caught)
        return 0 if caught else 1
    names = SHORT if arguments.short else [one.name for one in MUTANTS]
    chosen = [i for i, one in enumerate(MUTANTS) if one.name in names and arguments.only in one.name]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        caught = sum(map(bool, pool.map(apart, chosen)))
    print(f"{caught} of {len(chosen)} mutants caught")
    return 0 if caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
