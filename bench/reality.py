"""Prediction and race: attainment that the planner simulates for each row of a race, beside what was measured.

    lora-server profile-vllm --base-model DIR --adapters DIR --slots 4,8 --out engine.json ...
    python -m bench.reality --race bench/results/race-cpu-2026-11.json --engine-profile engine.json [--traces DIR]

The very calls of a row are simulated step by step (provisioning/simulation/steps.py), with times of a profile that
knows nothing of the race, from the state in which the race begins, all adapters read once, and scored as the race
scores them; in brackets, with steps a fifth longer and shorter than the profile's. Rows of open loops: Poisson, tuning
and traces. Adapters on all sites, other numbers of threads and PEFT are left out, as the profile has none.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.race import load, score
from bench.race.load import Call, Job, Seen
from provisioning.model import engine_steps
from provisioning.model.engine_steps import EngineProfile, Kind
from provisioning.plan.band import SPREAD
from provisioning.simulation.run import SimulationResult
from provisioning.simulation.steps import StepSystem, run_steps
from provisioning.workload.requests import Requests

SITES, BAR, TRACE_SEED, PATIENCE = "attention", 0.05, 3, 1.6
HEAD = (
    "| load | adapters | system | within SLO: measured | predicted | points | TTFT p50/p95 s: measured | predicted "
    "| TPOT p50 ms: measured | predicted |\n|---|---|---|---|---|---|---|---|---|---|"
)


def calls_of(row: dict[str, Any], rates: list[float], traces: Path) -> tuple[list[Call], float] | None:
    """Draw a row's calls anew, as bench/race does; returns them and the row's seconds, or None for another kind.

    Poisson rows of races that did not record `seed` have that of their place among the race's `rates`.
    """
    adapters, seconds = load.names(SITES, row["adapters"]), round(row["calls"] / row["rate"], 6)
    if row["load"] == "poisson":
        seed = row.get("seed", 10 + rates.index(row["rate"]))
        return load.poisson(adapters, row["rate"], seconds, seed), seconds
    if row["load"] == "tuning":
        return load.poisson(adapters, row["rate"], seconds, 1), seconds
    if row["load"] in load.TRACES and (file := traces / load.TRACES[row["load"]]).exists():
        return load.compressed(file, adapters, row["rate"], seconds, TRACE_SEED), seconds
    return None


@dataclass(frozen=True)
class Cell:
    """A row that was predicted: the shares within the SLO; `low` and `high` are those of longer and shorter steps."""

    line: str
    measured: float
    predicted: float
    low: float
    high: float

    @property
    def near(self) -> bool:
        """Whether the prediction is within BAR."""
        return abs(self.measured - self.predicted) <= BAR

    @property
    def spanned(self) -> bool:
        """Whether what was measured is within BAR of what steps of some length in between may give."""
        return self.low - BAR <= self.measured <= self.high + BAR


def system_of(row: dict[str, Any], profile: EngineProfile) -> StepSystem | None:
    """Return what a row raced, once it has read all adapters; None where the profile has not measured it."""
    system, names = row["system"], load.names(SITES, row["adapters"])
    places = re.fullmatch(r"vLLM's LoRA, (\d+) places, 2 threads", system)
    if not places and system not in ("base", "ours"):
        return None
    kind: Kind = "coupled" if places else "base" if system == "base" else "server"
    slots = int(places[1]) if places else len(names)
    steps = profile.steps(kind, slots)
    return StepSystem(steps=steps, slots=slots, shared=kind != "coupled", read=range(len(names)))


def simulated(calls: list[Call], row: dict[str, Any], system: StepSystem, factor: float = 1.0) -> SimulationResult:
    """Simulate a row's calls, with steps `factor` times as long."""
    names = load.names(SITES, row["adapters"])
    requests = Requests(
        arrival_s=np.array([call.at for call in calls]),
        adapter=np.array([names.index(call.adapter or "") for call in calls]),
        output_tokens=np.array([call.new_tokens for call in calls]),
        input_tokens=np.array([len(call.prompt) for call in calls]),
        num_adapters=len(names),
    )
    return run_steps(requests, replace(system, steps=system.steps.scaled(factor)))


def scored(calls: list[Call], seconds: float, found: SimulationResult) -> dict[str, Any]:
    """Score a simulation as the race scores what it measured: tokens after the job's end do not count."""
    job, seen = Job(calls, 0, seconds * PATIENCE), []
    for number, call in enumerate(calls):
        times = np.linspace(found.first_token_s[number], found.finish_s[number], call.new_tokens)
        kept = times[times <= job.seconds].tolist()
        seen.append(Seen(number, call.at, call.at, kept, [0] * len(kept)))
    return score.row(job, seen)


def cells(race: dict[str, Any], profile: EngineProfile, traces: Path) -> Iterator[Cell]:
    """Yield each row that can be predicted."""
    for row in race["rows"]:
        if row["sites"] != SITES:
            continue
        same = {one["rate"] for one in race["rows"] if _kind(one) == ("poisson", SITES, row["adapters"])}
        drawn = calls_of(row, sorted(same), traces)
        system = system_of(row, profile)
        if drawn is None or system is None:
            continue
        if len(drawn[0]) != row["calls"]:
            raise ValueError(
                f"{row['load']}: drew {len(drawn[0])} calls, the race had {row['calls']}; give its --traces"
            )
        said, low, high = (
            scored(*drawn, simulated(drawn[0], row, system, factor)) for factor in (1.0, 1 + SPREAD, 1 - SPREAD)
        )
        pairs = ((row, "measured"), (said, "predicted"))
        ttft = [f"{one['ttft_p50_s']:.2f}/{one['ttft_p95_s']:.2f}" for one, _ in pairs]
        tpot = [f"{1e3 * one['tpot_p50_s']:.0f}" for one, _ in pairs]
        points = f"{row['within']:.1%} | {said['within']:.1%} [{100 * low['within']:.0f}, {100 * high['within']:.0f}]"
        points += f" | {100 * (said['within'] - row['within']):+.1f}"
        where = f"{row['load']} {row['rate']:g}/s | {row['adapters']} | {row['system']}"
        line = f"| {where} | {points} | {' | '.join(ttft)} | {' | '.join(tpot)} |"
        yield Cell(line, row["within"], said["within"], low["within"], high["within"])


def _kind(row: dict[str, Any]) -> tuple[str, str, int]:
    return row["load"], row["sites"], row["adapters"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--race", type=Path, required=True)
    parser.add_argument("--engine-profile", type=Path, required=True)
    parser.add_argument("--traces", type=Path, default=Path("shared/traces"))
    given = parser.parse_args()
    print(HEAD)
    found = []
    for cell in cells(json.loads(given.race.read_text()), engine_steps.read(given.engine_profile), given.traces):
        print(cell.line)
        found.append(cell)
    hard = [cell for cell in found if cell.measured < 1]
    for of, which in (("all", found), ("those measured below 100 %", hard)):
        near, spanned = sum(cell.near for cell in which), sum(cell.near or cell.spanned for cell in which)
        within = f"{near} of {len(which)} within {100 * BAR:g} points"
        print(f"\nOf {of}, {within}; with steps up to {SPREAD:.0%} longer or shorter, {spanned}.")


if __name__ == "__main__":
    main()
