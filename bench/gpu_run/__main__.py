"""python -m bench.gpu_run [--list] [--only STAGE,...] [--again] [--mps] [--budget SECONDS] [--rehearse] ...

Runs what wants a GPU, stage by stage, and writes after each. A second call goes on where the first one stopped: what
passed or failed is skipped, what was cut (at its deadline, or with the run) or could not run begins again, and what
did not fit the budget follows.
`--back` gets two archives of all that after each stage; where a call finds them it goes on from there.
Exit status: 0 if every stage passed, 1 if one did not or is left to do, 2 for a wrong flag. See docs/gpu-run.md.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.gpu_run import archive, carried, mps, report, runner
from bench.gpu_run.stage import NO_GPU, REHEARSED
from bench.gpu_run.stages import STAGES, Stage, chosen
from bench.gpu_run.state import Outcome, Results, code_digest
from lora_server.demo import children

RAW, OUT, CARRIED = Path("bench/out/gpu_run"), Path("bench/results"), Path("bench/out/gpu")
BACK = Path("bench/out/gpu_back")
BUDGET_SECONDS, PACK_SECONDS = 570.0, 15.0  # of a call; of these for the report and the archives
REHEARSALS_AT_ONCE = 3  # on two cores: some of them wait for servers
REHEARSAL_SECONDS = 540.0  # of a stage, at least: its limit is for a GPU's host, and the CPU here may be busy
COLOURS = {"passed": "green", "failed": "red", "unable": "yellow", "cut": "yellow"}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; ends the process for a wrong one."""
    parser = argparse.ArgumentParser(
        prog="bench.gpu_run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="the stages, their limits and how they ended")
    parser.add_argument("--only", default="", metavar="STAGE,...", help="these stages; all by default")
    parser.add_argument("--again", action="store_true", help="also those that passed or failed")
    parser.add_argument("--mps", action="store_true", help="stages under CUDA's MPS, with results of their own")
    parser.add_argument("--budget", type=float, default=BUDGET_SECONDS, help="seconds for this call (%(default)g)")
    parser.add_argument("--rehearse", action="store_true", help="everything up to the GPU; needs none")
    parser.add_argument("--out", type=Path, default=OUT, help="for the report and the kernels' JSON (%(default)s)")
    parser.add_argument("--raw", type=Path, default=RAW, help="for what each stage found (%(default)s)")
    parser.add_argument("--back", type=Path, default=BACK, help="archives to go on from, and to write (%(default)s)")
    parser.add_argument("--carried", type=Path, default=CARRIED, help="what bench.fetch_gpu collected (%(default)s)")
    given = parser.parse_args(arguments)
    try:
        given.stages = chosen(given.only)
    except ValueError as error:
        parser.error(str(error))
    longest = max(given.stages, key=lambda stage: stage.seconds)
    least = longest.seconds + PACK_SECONDS
    if given.budget < least and not given.list:
        parser.error(
            f"--budget: got {given.budget:g} s, expected at least {least:g}: {longest.name} may take "
            f"{longest.seconds:g} s, and packing {PACK_SECONDS:g} s"
        )
    return given


def gpu_name() -> str:
    """Return the first GPU's name in the form of a file name, as h100-80gb-hbm3; no-gpu if there is none."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return "no-gpu"
    query = [command, "--query-gpu=name", "--format=csv,noheader", "--id=0"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (subprocess.SubprocessError, OSError):
        return "no-gpu"
    words = re.findall(r"[a-z0-9]+", said.lower())
    return "-".join(word for word in words if word != "nvidia") or "no-gpu"


def name_of_results(arguments: argparse.Namespace) -> str:
    """Return the name under which results are kept."""
    return gpu_name() + (mps.SUFFIX if arguments.mps else "")


def show(outcome: Outcome, console: Console, word: str = "") -> None:
    """One line as soon as a stage has ended; `word` instead of how."""
    colour = COLOURS["passed" if word else outcome.ending]
    console.print(f"[{colour}]{word or outcome.ending:7}[/] {outcome.stage:12} {outcome.seconds:6.1f} s  ", end="")
    console.print(outcome.reason, markup=False, highlight=False)


def listed(stages: list[Stage], results: Results) -> Table:
    """The table of stages."""
    table = Table("stage", "limit", "ended", "about", box=None)
    for stage in stages:
        outcome = results.load(stage.name)
        table.add_row(stage.name, f"{stage.seconds:g} s", outcome.ending if outcome else "-", stage.about)
    return table


def rehearse(arguments: argparse.Namespace, console: Console) -> bool:
    """Run every stage up to the point where it needs the GPU. Returns whether each got that far."""
    folder = arguments.raw / "rehearsal"
    shutil.rmtree(folder, ignore_errors=True)
    results = Results(folder)
    environment = prepare(arguments, folder, console)
    more = ("--rehearse", "--carried", str(arguments.carried.resolve()))

    def one(stage: Stage) -> Outcome:
        patient = replace(stage, seconds=max(stage.seconds, REHEARSAL_SECONDS))
        return runner.run(patient, results, environment, "rehearsal", more)

    with ThreadPoolExecutor(REHEARSALS_AT_ONCE) as pool:
        good = True
        for outcome in pool.map(one, sorted(arguments.stages, key=lambda stage: -stage.seconds)):
            ready = outcome.ending == "unable" and outcome.reason.startswith((NO_GPU, REHEARSED))
            show(outcome, console, "ready" if ready else "")
            if not ready:
                console.print(outcome.log, markup=False, highlight=False)
            good = good and ready
    report.write(arguments.stages, results, folder, "rehearsal")
    return good


def prepare(arguments: argparse.Namespace, caches: Path, console: Console) -> dict[str, str]:
    """Unpack what was carried; return the environment of the stages."""
    try:
        carried.check(arguments.carried)
    except ValueError as error:
        sys.exit(str(error))
    site = carried.unpack(arguments.carried, arguments.raw.parent / "gpu_site")
    if site is None:
        console.print(f"{carried.unused(arguments.carried)}: only what is installed here can be imported")
    return carried.environment(site, caches, os.environ)


def run(arguments: argparse.Namespace, console: Console) -> bool:
    """The stages that are left and fit the budget; whether all that were asked for have passed."""
    began, gpu = time.monotonic(), name_of_results(arguments)
    try:
        if count := archive.unpack(arguments.back, arguments.raw, arguments.out):
            console.print(f"going on from {arguments.back}: {count} files unpacked")
    except ValueError as error:
        sys.exit(str(error))
    results = Results(arguments.raw / gpu)
    environment = prepare(arguments, results.folder, console)
    if arguments.again:
        for stage in arguments.stages:
            results.forget(stage.name)
        save(arguments, results, gpu, console)  # the archive, too, forgets
    waiting = run_stages(arguments, results, gpu, environment, began, console)
    if waiting:
        console.print(f"left for the next call: {', '.join(waiting)}")
    written = save(arguments, results, gpu, console)
    console.print(f"{written}; what each stage found: {results.folder}; to go on elsewhere: {arguments.back}")
    outcomes = [results.load(stage.name) for stage in arguments.stages]
    return all(outcome is not None and outcome.ending == "passed" for outcome in outcomes)


def run_stages(
    arguments: argparse.Namespace,
    results: Results,
    gpu: str,
    environment: dict[str, str],
    began: float,
    console: Console,
) -> list[str]:
    """Run the stages that have not ended and fit the budget; return the names of the others."""
    more, code = ("--carried", str(arguments.carried.resolve())), code_digest()
    waiting = []
    for stage in arguments.stages:
        if results.ended(stage.name):
            continue
        if time.monotonic() - began + stage.seconds + PACK_SECONDS > arguments.budget:
            waiting.append(stage.name)
            continue
        with mps.running(environment) if arguments.mps else contextlib.nullcontext(environment) as own:
            show(runner.run(stage, results, own, code, more), console)
        save(arguments, results, gpu, console)
    return waiting


def save(arguments: argparse.Namespace, results: Results, gpu: str, console: Console) -> Path:
    """Write the report and the archives; return the report's path."""
    written = report.write(list(STAGES), results, arguments.out, gpu)
    found = [path for kind in ("kernels", "profile") for path in sorted(arguments.out.glob(f"{kind}_{gpu}_*.json"))]
    reports = [written, *found]
    if left := archive.pack(arguments.back, results.folder, reports):
        console.print(f"no room in {arguments.back} for {', '.join(left)}")
    return written


def main() -> None:
    """Entry point."""
    arguments = parse()
    console = Console(soft_wrap=True)
    if arguments.list:
        console.print(listed(arguments.stages, Results(arguments.raw / name_of_results(arguments))))
        return
    with children.ending_on_signals():
        try:
            good = rehearse(arguments, console) if arguments.rehearse else run(arguments, console)
        except OSError as error:  # MPS
            sys.exit(str(error))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
