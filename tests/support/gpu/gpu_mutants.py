"""One-line sabotages of the device protocol, each caught by a case or a schedule: `make mutants`.

All take an hour of a CPU; --short, some of each kind, some minutes. A mutant that nothing catches is a test that is
missing: the exit status says so.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from tests.support.gpu import gpu_texts
from tests.support.gpu.gpu_generated import generated
from tests.support.gpu.gpu_sabotages import LISTED, Mutant
from tests.support.gpu.gpu_texts import read

MUTANTS = (*LISTED, *generated())
SCHEDULES = 150
SECONDS = 60.0  # of a CPU, that one case or schedule may take
MOST_BYTES = 4 << 30  # of memory, of a process that judges a mutant: one that never ends takes more and more


def mutated(mutant: Mutant) -> dict[str, str]:
    """Return the sabotaged text of the mutant's file. Raises ValueError if the line is no longer there once."""
    text, place = read(mutant.file), mutant.place
    if place is None:
        if (times := text.count(mutant.line)) != 1:
            raise ValueError(f"{mutant.name}: {mutant.file} has its line {times} times, expected once")
        place = text.index(mutant.line)
    return {mutant.file: text[:place] + mutant.instead + text[place + len(mutant.line) :]}


def looks(mutant: Mutant) -> dict[str, Callable[[Mapping[str, str]], None]]:
    """Return the checks that can catch the mutant by its text."""
    known = {"table": gpu_texts.look_at_instructions, "bounds": gpu_texts.look_at_launch_bounds}
    return {kind: known[kind] for kind in mutant.kinds if kind in known}


def tries(mutant: Mutant) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the attempts to catch it: checks of text, then the cases of each kind, then schedules."""
    from tests.support.gpu.gpu_cases import KINDS

    instead = mutated(mutant)
    for kind, look in looks(mutant).items():
        yield kind, partial(look, instead)
    schedules = []
    for kind in mutant.kinds if not looks(mutant) else ():
        library, play = KINDS[kind].load(instead), KINDS[kind].play
        for case in KINDS[kind].cases:
            yield f"case {case.__name__} ({kind})", partial(case, library)
        if play:
            schedules += [(f"schedule {seed} ({kind})", partial(play, seed, library)) for seed in range(SCHEDULES)]
    yield from schedules


def judge(mutant: Mutant) -> str:
    """Return what catches the mutant first, or "". Runs in this process, which a wrong kernel may crash."""
    for name, attempt in tries(mutant):
        if name not in mutant.kinds:
            print(name, file=sys.stderr, flush=True)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # its signal ends the process
        try:
            attempt()
        except Exception as error:  # any: the world is not as it must be
            first, _, _ = f"{type(error).__name__} {error}".partition("\n")
            return f"{name} ({first.strip()[:70]})"
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    return ""


def apart(number: int) -> str:
    """Judge in a process of its own, so that a crash and a kernel that never ends count as caught. Prints a line."""
    if looks(MUTANTS[number]):
        print(f"{MUTANTS[number].name}: {(by := judge(MUTANTS[number])) or 'NOT CAUGHT'}", flush=True)
        return by
    command = [sys.executable, "-m", "tests.support.gpu.gpu_mutants", "--judge", str(number)]
    began = time.monotonic()
    by = _caught(command)
    print(f"{MUTANTS[number].name}: {by or 'NOT CAUGHT'} [{time.monotonic() - began:.0f} s]", flush=True)
    return by


def _caught(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == -signal.SIGPROF:
        return f"{_last(done.stderr)} (it never ends)"
    if done.returncode < 0:
        return f"{_last(done.stderr)} (the kernel crashed)"
    if done.returncode > 1 or "Traceback" in done.stderr:
        print(done.stderr[-2000:], file=sys.stderr)
        return ""
    return done.stdout.strip()


def _last(said: str) -> str:
    return next((line for line in reversed(said.splitlines()) if line.startswith(("case ", "schedule "))), "")


def main() -> int:
    """A line per mutant, then how many were caught."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--judge", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--only", default="", help="those whose names hold this")
    parser.add_argument("--at-once", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--short", action="store_true", help="some of each kind, that are caught soon")
    arguments = parser.parse_args()
    if arguments.judge is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
        caught = judge(MUTANTS[arguments.judge])
        print(caught)
        return 0 if caught else 1
    chosen = [i for i, one in enumerate(MUTANTS) if (one.short or not arguments.short) and arguments.only in one.name]
    with ThreadPoolExecutor(arguments.at_once) as pool:
        caught = sum(map(bool, pool.map(apart, chosen)))
    print(f"{caught} of {len(chosen)} mutants caught")
    return 0 if caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
