"""What a simulation says of one system, over several seeds.

What is simulated: `simulate`'s rules; L instances; arrivals so that LB requests are in flight on
average (a request stays output tokens times the modelled step; its batch may exceed B for a while);
the workload's burstiness, or the trace itself from a different point per seed; output lengths as
given or seen. The share of requests that are admitted at once has a t interval over seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from provisioning.plan import Scenario
from provisioning.poisson_binomial import Floats
from provisioning.requests import Requests
from provisioning.simulate import Outcome, System, run

_WARM_UP_RESIDENCES = 3.0
_MOST_SEEDS = 10
_FAR_BELOW = 0.03


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over seeds with its 95 % t interval."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float], top: float = np.inf) -> Estimate:
        """Of at least two seeds; of one, the interval is the whole line. Values lie in [0, top]."""
        sample = np.asarray(values, dtype=float)
        mean = float(sample.mean())
        if sample.size < 2:
            return cls(mean=mean, low=-np.inf, high=np.inf)
        from scipy.special import stdtrit  # slow to import, and of no use without a simulation

        reach = float(stdtrit(sample.size - 1, 0.975) * sample.std(ddof=1) / np.sqrt(sample.size))
        return cls(mean=mean, low=max(mean - reach, 0.0), high=min(mean + reach, top))


@dataclass(frozen=True, eq=False, kw_only=True)
class Verdict:
    """What the simulation of one system says; `ttft_s` of all measured requests for the CDF."""

    immediate: Estimate
    ttft_s_at_percentile: Estimate
    within_ttft: Estimate
    adapters_within_slo: Estimate
    seeds: int
    requests_per_seed: int
    target: float
    ttft_s: Floats = field(repr=False)

    @property
    def holds(self) -> bool:
        """The whole interval of the admitted share is at the target or above, and so is that of the TTFT SLO."""
        return self.immediate.low >= self.target and self.within_ttft.low >= self.target


def played(scenario: Scenario, step_us: float, seed: int) -> Requests:
    """One seed's requests: LB in flight on average, long enough for 30,000 after the warm-up."""
    workload = scenario.workload
    residence_s = workload.lengths.mean_tokens * step_us * 1e-6
    rate = scenario.global_batch / residence_s
    num = int(30_000 + (_WARM_UP_RESIDENCES + 4) * scenario.global_batch)
    if workload.trace is None:
        return workload.sample(rate=rate, num_requests=num, seed=seed)
    return rotated(workload.trace, seed, num).scaled_to(rate)


def rotated(trace: Requests, seed: int, num: int) -> Requests:
    """The trace from a point that the seed draws, round its end; at most once through."""
    start = int(np.random.default_rng(seed).integers(len(trace)))
    index = (start + np.arange(min(num, len(trace)))) % len(trace)
    gap_s = trace.span_s / max(len(trace) - 1, 1)
    arrival_s = trace.arrival_s[index] - trace.arrival_s[start]
    arrival_s = np.where(index < start, arrival_s + trace.span_s + gap_s, arrival_s)
    return Requests(
        arrival_s=arrival_s,
        adapter=trace.adapter[index],
        output_tokens=trace.output_tokens[index],
        num_adapters=trace.num_adapters,
        names=trace.names,
    )


def measured(outcome: Outcome) -> slice:
    """The requests after the warm-up, three mean residences but at most a third of the run."""
    arrival_s = outcome.requests.arrival_s
    residence_s = float(np.nanmean(outcome.finish_s - outcome.admit_s))
    settled_s = min(_WARM_UP_RESIDENCES * residence_s, outcome.requests.span_s / 3)
    return slice(int(np.searchsorted(arrival_s, settled_s)), len(outcome.requests))


def adapters_within(outcome: Outcome, kept: slice, ttft_slo_s: float, share: float = 0.9) -> float:
    """Share of adapters of whom at least 90 % of the requests meet the TTFT SLO (the paper's attainment)."""
    adapter, met = outcome.requests.adapter[kept], outcome.ttft_s[kept] <= ttft_slo_s
    calls = np.bincount(adapter, minlength=outcome.requests.num_adapters)
    good = np.bincount(adapter, weights=met, minlength=outcome.requests.num_adapters)
    called = calls > 0
    return float((good[called] >= share * calls[called]).mean())


def judge(scenario: Scenario, system: System, step_us: float, seeds: int, *, give_up: bool = False) -> Verdict:
    """Runs the seeds; more of them, up to ten, while the interval straddles the target.

    `give_up`: two seeds are enough if both are three points below the target or more.
    """
    rows: list[tuple[float, float, float, float]] = []
    ttft_s: list[Floats] = []
    slo_s, num = scenario.slo.ttft_us * 1e-6, 0
    while len(rows) < seeds or (len(rows) < _MOST_SEEDS and _straddles(rows, scenario.iar_target)):
        outcome = run(played(scenario, step_us, seed=len(rows)), system)
        kept = measured(outcome)
        times = outcome.ttft_s[kept]
        num = times.size
        ttft_s.append(times)
        percentile = float(np.percentile(times, scenario.slo.percentile))
        within = float((times <= slo_s).mean())
        adapters = adapters_within(outcome, kept, slo_s)
        rows.append((float(outcome.immediate[kept].mean()), percentile, within, adapters))
        if give_up and len(rows) == 2 and max(rows)[0] < scenario.iar_target - _FAR_BELOW:
            break
    columns = zip(zip(*rows, strict=True), (1.0, np.inf, 1.0, 1.0), strict=True)
    immediate, percentile_s, within_slo, adapters_slo = (Estimate.of(column, top) for column, top in columns)
    return Verdict(
        immediate=immediate,
        ttft_s_at_percentile=percentile_s,
        within_ttft=within_slo,
        adapters_within_slo=adapters_slo,
        seeds=len(rows),
        requests_per_seed=num,
        target=scenario.iar_target,
        ttft_s=np.concatenate(ttft_s),
    )


def _straddles(rows: list[tuple[float, float, float, float]], target: float) -> bool:
    estimates = [Estimate.of([row[column] for row in rows], top=1.0) for column in (0, 2)]
    return any(estimate.low < target <= estimate.high for estimate in estimates)


def estimate_json(estimate: Estimate) -> dict[str, Any]:
    """Mean and 95 % interval."""
    return {"mean": estimate.mean, "interval": [estimate.low, estimate.high]}


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    """Plain values."""
    return {
        "seeds": verdict.seeds,
        "requests_per_seed": verdict.requests_per_seed,
        "immediate_rate": verdict.immediate.mean,
        "interval": [verdict.immediate.low, verdict.immediate.high],
        "target": verdict.target,
        "holds_target": verdict.holds,
        "ttft_s_at_percentile": estimate_json(verdict.ttft_s_at_percentile),
        "share_within_ttft_slo": estimate_json(verdict.within_ttft),
        "adapters_with_90_percent_within_slo": estimate_json(verdict.adapters_within_slo),
    }
