"""Error band of a plan: the same calls with steps and outputs a fifth shorter or longer than assumed.

Requests then last 0.64 or 1.44 times as long (0.8 or 1.2, squared), and as many times as many are in flight. Prompts
keep their share of the time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from provisioning.iar.models import offered_curve
from provisioning.plan.candidates import Candidate
from provisioning.plan.judge import first_run
from provisioning.plan.verify import system
from provisioning.simulation.run import System
from provisioning.simulation.steps import StepSystem

SPREAD = 0.2


@dataclass(frozen=True, kw_only=True)
class Band:
    """The shares: `low` with longer steps and outputs, `high` with shorter ones. Of requests within the TTFT SLO where
    `simulated`, else of those that the model admits at once.

    `holds` and `meets_tpot` say whether the target and the TPOT SLO are still met with the longer ones.
    """

    low: float
    high: float
    holds: bool
    meets_tpot: bool
    simulated: bool


def band(candidate: Candidate, *, simulated: bool) -> Band:
    """Estimate the band of a plan: by its first simulated run, or by the model."""
    share, scenario = _simulated if simulated else _modelled, candidate.scenario
    low, holds = share(candidate, 1 + SPREAD)
    return Band(
        low=low,
        high=share(candidate, 1 - SPREAD)[0],
        holds=holds,
        meets_tpot=candidate.step_us * (1 + SPREAD) <= scenario.slo.tpot_us,
        simulated=simulated,
    )


def _modelled(candidate: Candidate, factor: float) -> tuple[float, bool]:
    workload, in_flight = candidate.scenario.workload, candidate.scenario.global_batch * factor**2
    curve = offered_curve(workload.popularity, in_flight, workload.in_flight)
    share = float(curve[min(candidate.slots, workload.num_adapters)])
    return share, share >= candidate.scenario.iar_target


def _simulated(candidate: Candidate, factor: float) -> tuple[float, bool]:
    scenario, step_us = candidate.scenario, candidate.mean_step_us * factor
    longer = scenario.workload.with_mean_tokens(scenario.workload.lengths.mean_tokens * factor)
    same_calls = replace(scenario, workload=longer, request_rate=scenario.rate(candidate.mean_step_us))
    return first_run(same_calls, _longer(system(candidate), factor), step_us)


def _longer(known: System | StepSystem, factor: float) -> System | StepSystem:
    if isinstance(known, StepSystem):
        return replace(known, steps=known.steps.scaled(factor))
    return replace(known, step_s=[step_s * factor for step_s in known.step_s])
