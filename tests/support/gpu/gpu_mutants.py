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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from kernels_cuda.build import SOURCE
from lora_server.transport.gpu.source import FILES
from tests.support.gpu.gpu_sabotages import MUTANTS, Mutant

SCHEDULES = 150
SECONDS = 300.0  # of one mutant


def mutated(mutant: Mutant) -> dict[str, str]:
    """Its file as it would be. Raises ValueError for a sabotage whose place is gone."""
    text = FILES.get(mutant.file) or (SOURCE / mutant.file).read_text()
    if text.count(mutant.line) != 1:
        raise ValueError(f"{mutant.name}: {mutant.file} has its line {text.count(mutant.line)} times, expected once")
    return {mutant.file: text.replace(mutant.line, mutant.instead)}


def plays(mutant: Mutant) -> tuple[Sequence[Callable], Callable]:
    """The cases that a mutant may be caught by, and what plays a schedule."""
    from tests.support.gpu import gpu_cases, gpu_led, gpu_schedules

    if mutant.led:
        return gpu_led.CASES, gpu_led.play
    if mutant.nvshmem:
        return gpu_cases.NETWORK_CASES, gpu_schedules.play
    return gpu_cases.CASES_IN_CODES if mutant.in_codes else gpu_cases.CASES, gpu_schedules.play


def judge(mutant: Mutant) -> str:
    """In this process: what catches it first; "" if nothing does. A kernel that is wrong may take the process along."""
    from tests.support.gpu import gpu_world

    library, (cases, play) = gpu_world.load(mutated(mutant), mutant.nvshmem, mutant.in_codes), plays(mutant)
    tries = {f"case {case.__name__}": partial(case, library) for case in cases}
    tries |= {f"schedule {seed}": partial(play, seed, library) for seed in range(SCHEDULES)}
    for name, attempt in tries.items():
        print(name, file=sys.stderr, flush=True)
        try:
            attempt()
        except Exception as error:  # any: the world is not as it must be
            first, _, _ = f"{type(error).__name__} {error}".partition("\n")
            return f"{name} ({first.strip()[:70]})"
    return ""


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
        return f"{_last((late.stderr or b'').decode()) or 'the build'} (it never ends)"
    if done.returncode not in (0, 1):
        return f"{_last(done.stderr) or done.stderr[-200:]} (the kernel crashed)"
    return done.stdout.strip()


def _last(said: str) -> str:
    return next((line for line in reversed(said.splitlines()) if line.startswith(("case ", "schedule "))), "")


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
    chosen = [i for i, one in enumerate(MUTANTS) if (one.short or not arguments.short) and arguments.only in one.name]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        caught = sum(map(bool, pool.map(apart, chosen)))
    print(f"{caught} of {len(chosen)} mutants caught")
    return 0 if caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
