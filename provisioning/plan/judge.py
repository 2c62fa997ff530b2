"""Verdict of a simulation on one system, over several seeds.

What is simulated: the rules of `simulation.run`; L instances; the rate that was asked for, or arrivals so that LB
requests are in flight on average (a request stays output tokens times the modelled step; its batch may exceed B for
a while); the workload's burstiness, or the very trace, and then other days of it (`workload.days`); output
lengths as given or seen. Of a trace with a peak, the worse counts of the whole and of the peak. The share of
requests within the TTFT SLO has a t interval over seeds, or of a trace the 5th and 95th percentile of its days, whose
lower end is to be the SLO's share or more; so has the
share that is admitted at once, which is judged where --iar asks for it. A run has ten TTFT SLOs or more, up to 300,000
requests, and a wait of over a tenth of it is never in time: a backlog that grows is not taken for a steady wait.
Of systems that are simulated step by step (`stepped`), the interval of the mean TPOT is to be within its SLO, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from provisioning.arrays import Floats, Ints
from provisioning.plan.classes import ttft_s as ttft_s_of
from provisioning.plan.question import Scenario
from provisioning.plan.stepped import simulated
from provisioning.simulation.measure import WARM_UP_RESIDENCES, Estimate, adapters_within, in_time, parts, tpots_s
from provisioning.simulation.run import SimulationResult, System
from provisioning.simulation.steps import StepSystem
from provisioning.workload.requests import Requests

_MOST_SEEDS = 10
_FAR_BELOW = 0.03
_DAYS = 20  # of a trace, itself included: the 5th percentile then lies between the worst two
_FEW_CALLS = 20
_FEWEST_CALLS, _MOST_CALLS = 30_000, 300_000  # of a run, after its warm-up
_FEWEST_STEPPED = 10_000  # step by step, which takes longer
_SLOS = 10  # TTFT SLOs of a run
# immediate, TTFT in s at the percentile, within the TTFT SLO, adapters, mean TPOT in s (0: not judged)
_Row = tuple[float, float, float, float, float]


@dataclass(frozen=True, eq=False, kw_only=True)
class Verdict:
    """Verdict on one system; `ttft_s` and `by_adapter` of all measured requests.

    `target` is the share of requests to be within the TTFT SLO, `iar` the share to be admitted at once, if asked for.
    `worst_window` of a trace: its start in s, and the share of its requests within the TTFT SLO. `own` is that of the
    very trace, and `seeds` are its days. `tpot_s` is the mean of requests, step by step.
    """

    immediate: Estimate
    ttft_s_at_percentile: Estimate
    within_ttft: Estimate
    adapters_within_slo: Estimate
    seeds: int
    requests_per_seed: int
    target: float
    iar: float | None
    worst_window: tuple[float, float] | None
    ttft_s: Floats = field(repr=False)
    by_adapter: Floats = field(repr=False)  # requests, and those within the TTFT SLO
    own: float | None = None
    tpot_s: Estimate | None = None
    meets_tpot: bool = True

    def worst_served(self, most: int = 5) -> list[tuple[int, int, float]]:
        """List (adapter, requests, share in time) of adapters of 20 requests or more below the target, worst first."""
        calls, met = self.by_adapter
        share = met / np.maximum(calls, 1)
        below = np.flatnonzero((calls >= _FEW_CALLS) & (share < self.target))
        worst = below[np.argsort(share[below], kind="stable")][:most]
        return [(int(index), int(calls[index]), float(share[index])) for index in worst]

    @property
    def holds(self) -> bool:
        """Whether what was asked for holds."""
        return self.in_time and self.meets_tpot and (self.iar is None or self.immediate.low >= self.iar)

    @property
    def in_time(self) -> bool:
        """Whether the whole interval of the share within the TTFT SLO is at the target or above."""
        return self.within_ttft.low >= self.target


def silent(_: str) -> None:
    """Say nothing: the default where a caller may pass a function that shows a line of progress."""


def played(scenario: Scenario, step_us: float, seed: int) -> Requests:
    """Draw one seed's requests: LB in flight on average (at the peak), enough of them after the warm-up."""
    rate = scenario.rate(step_us)
    fewest = _FEWEST_CALLS if scenario.engine_profile is None else _FEWEST_STEPPED
    enough = min(max(fewest, _SLOS * scenario.slo.ttft_us * 1e-6 * rate), _MOST_CALLS)
    num = int(enough + (WARM_UP_RESIDENCES + 4) * scenario.global_batch)
    tokens_per_s = rate * scenario.workload.lengths.mean_tokens
    return scenario.workload.calls(tokens_per_s=tokens_per_s, num=num, seed=seed)


def first_run(scenario: Scenario, system: System | StepSystem, step_us: float) -> tuple[float, bool]:
    """Return (share of the first run's calls within the TTFT SLO, whether what was asked for holds)."""
    outcome = simulated(scenario, played(scenario, step_us, seed=0), system)
    row = _worst([_row(scenario, outcome, part, system) for part in parts(outcome)])
    return row[2], _margin(scenario, row) >= 0


def judge(
    scenario: Scenario,
    system: System | StepSystem,
    step_us: float,
    seeds: int,
    *,
    give_up: bool = False,
    say: Callable[[str], None] = silent,
) -> Verdict:
    """Simulate the seeds, and more of them, up to ten, while the interval straddles the target; of a trace, 20 days.

    `give_up`: two seeds are enough if both are three points below the target or more, and two days below the target.
    """
    rows: list[_Row] = []
    ttft_s: list[Floats] = []
    slo_s: float | Floats = scenario.slo.ttft_us * 1e-6
    if scenario.classes:
        slo_s = ttft_s_of(scenario.classes, scenario.workload.num_adapters)
    worst_window, num, in_time_2N = None, 0, np.zeros((2, scenario.workload.num_adapters))
    days = scenario.workload.trace is not None
    fewest = max(seeds, _DAYS) if days else seeds
    while len(rows) < fewest or (not days and len(rows) < _MOST_SEEDS and _straddles(scenario, rows)):
        say(f"{'day' if days else 'run'} {len(rows) + 1}")
        outcome = simulated(scenario, played(scenario, step_us, seed=len(rows)), system)
        kept = parts(outcome)
        num = outcome.ttft_s[kept[0]].size
        if not rows:
            worst_window = _worst_window(scenario, outcome)
        ttft_s.append(outcome.ttft_s[kept[0]])
        in_time_2N += in_time(outcome, kept[0], slo_s)
        rows.append(_worst([_row(scenario, outcome, part, system) for part in kept]))
        if give_up and _hopeless(scenario, rows, days=days):
            break
    columns = zip(zip(*rows, strict=True), (1.0, np.inf, 1.0, 1.0, np.inf), strict=True)
    immediate, percentile_s, within_slo, adapters_slo, tpot_s = (
        Estimate.of_days(column) if days else Estimate.of(column, top) for column, top in columns
    )
    return Verdict(
        immediate=immediate,
        ttft_s_at_percentile=percentile_s,
        within_ttft=within_slo,
        adapters_within_slo=adapters_slo,
        seeds=len(rows),
        requests_per_seed=num,
        target=scenario.slo.share,
        iar=scenario.iar_target if scenario.iar_asked else None,
        worst_window=worst_window,
        ttft_s=np.concatenate(ttft_s),
        by_adapter=in_time_2N,
        own=rows[0][2] if days else None,
        tpot_s=tpot_s if isinstance(system, StepSystem) else None,
        meets_tpot=tpot_s.high <= scenario.slo.tpot_us * 1e-6,
    )


def _hopeless(scenario: Scenario, rows: list[_Row], *, days: bool) -> bool:
    margins = [_margin(scenario, row) for row in rows]
    if days:
        return sum(margin < 0 for margin in margins) > 0.05 * _DAYS
    return len(rows) == 2 and max(margins) < -_FAR_BELOW


def _row(scenario: Scenario, outcome: SimulationResult, part: slice | Ints, system: System | StepSystem) -> _Row:
    slo_s, ttft_s = min(scenario.slo.ttft_us * 1e-6, outcome.requests.span_s / _SLOS), outcome.ttft_s[part]
    return (
        float(outcome.immediate[part].mean()),
        float(np.percentile(ttft_s, scenario.slo.percentile)),
        float((ttft_s <= slo_s).mean()),
        adapters_within(outcome, part, slo_s),
        float(np.mean(tpots_s(outcome, part))) if isinstance(system, StepSystem) else 0.0,
    )


def _worst_window(scenario: Scenario, outcome: SimulationResult) -> tuple[float, float] | None:
    """Find the window in which the very trace is served worst; None where no trace is replayed as a whole."""
    trace, over_time = scenario.workload.trace, scenario.workload.over_time
    if trace is None or over_time is None or len(trace) != len(outcome.requests):
        return None
    met = outcome.ttft_s <= scenario.slo.ttft_us * 1e-6
    window = ((trace.arrival_s - trace.arrival_s[0]) // over_time.window_s).astype(int)
    calls_W = np.bincount(window)
    share_W = np.where(calls_W >= _FEW_CALLS, np.bincount(window, met) / np.maximum(calls_W, 1), 1.0)
    worst = int(np.argmin(share_W))
    return worst * over_time.window_s, float(share_W[worst])


def _worst(rows: list[_Row]) -> _Row:
    immediate, percentile_s, within, adapters, tpot_s = zip(*rows, strict=True)
    return min(immediate), max(percentile_s), min(within), min(adapters), max(tpot_s)


def _margin(scenario: Scenario, row: _Row) -> float:
    """Return by how much a run is above what is asked for; negative below."""
    at_once = row[0] - scenario.iar_target if scenario.iar_asked else np.inf
    return min(row[2] - scenario.slo.share, 1 - row[4] / (scenario.slo.tpot_us * 1e-6), at_once)


def _straddles(scenario: Scenario, rows: list[_Row]) -> bool:
    asked = [(2, scenario.slo.share), *([(0, scenario.iar_target)] if scenario.iar_asked else [])]
    estimates = [(Estimate.of([row[column] for row in rows], top=1.0), target) for column, target in asked]
    tpot = Estimate.of([row[4] for row in rows])
    at_tpot = tpot.low <= scenario.slo.tpot_us * 1e-6 < tpot.high
    return at_tpot or any(estimate.low < target <= estimate.high for estimate, target in estimates)


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as plain values."""
    return {
        "seeds": verdict.seeds,
        "very_trace_within_ttft_slo": verdict.own,
        "requests_per_seed": verdict.requests_per_seed,
        "immediate_rate": verdict.immediate.mean,
        "interval": [verdict.immediate.low, verdict.immediate.high],
        "target": verdict.target,
        "iar_asked": verdict.iar,
        "worst_window": None
        if verdict.worst_window is None
        else dict(zip(("start_s", "share_within_ttft_slo"), verdict.worst_window, strict=True)),
        "holds_target": verdict.holds,
        "ttft_s_at_percentile": verdict.ttft_s_at_percentile.as_json(),
        "share_within_ttft_slo": verdict.within_ttft.as_json(),
        "tpot_s": None if verdict.tpot_s is None else verdict.tpot_s.as_json(),
        "adapters_with_90_percent_within_slo": verdict.adapters_within_slo.as_json(),
    }
