"""Measures of a simulated run: the requests that count, those in time, and an interval over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from provisioning.arrays import Floats, Ints
from provisioning.simulation.run import SimulationResult

WARM_UP_RESIDENCES = 3.0


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over seeds with its 95 % t interval; or over days, with their 5th and 95th percentiles."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float], top: float = np.inf) -> Estimate:
        """Estimate from at least two seeds; with one, the interval is the whole line. Values lie in [0, top]."""
        sample = np.asarray(values, dtype=float)
        mean = float(sample.mean())
        if sample.size < 2:
            return cls(mean=mean, low=-np.inf, high=np.inf)
        from scipy.special import stdtrit  # slow to import, and of no use without a simulation

        reach = float(stdtrit(sample.size - 1, 0.975) * sample.std(ddof=1) / np.sqrt(sample.size))
        return cls(mean=mean, low=max(mean - reach, 0.0), high=min(mean + reach, top))

    @classmethod
    def of_days(cls, values: Sequence[float]) -> Estimate:
        """Estimate from one value of each day."""
        low, high = np.quantile(values, (0.05, 0.95))
        return cls(mean=float(np.mean(values)), low=float(low), high=float(high))

    def as_json(self) -> dict[str, Any]:
        """Return mean and interval as plain values."""
        return {"mean": self.mean, "interval": [self.low, self.high]}


def measured(outcome: SimulationResult) -> slice:
    """Return the requests after the warm-up, which is three mean residences but at most a third of the run."""
    arrival_s = outcome.requests.arrival_s
    residence_s = float(np.nanmean(outcome.finish_s - outcome.admit_s))
    settled_s = min(WARM_UP_RESIDENCES * residence_s, outcome.requests.span_s / 3)
    return slice(int(np.searchsorted(arrival_s, settled_s)), len(outcome.requests))


def parts(outcome: SimulationResult) -> list[slice | Ints]:
    """Return the parts for which a target must hold: the measured requests, and those at the peak, if there is one."""
    kept, at_peak = measured(outcome), outcome.requests.at_peak
    if at_peak is None or not at_peak[kept].any():
        return [kept]
    return [kept, kept.start + np.flatnonzero(at_peak[kept])]


def tpots_s(outcome: SimulationResult, kept: slice | Ints) -> Floats:
    """Return the mean time between tokens of each request that has several; one 0 if none has."""
    tokens = outcome.requests.output_tokens[kept]
    several = tokens > 1
    found: Floats = (outcome.finish_s - outcome.first_token_s)[kept][several] / (tokens[several] - 1)
    return found if found.size else np.zeros(1)


def in_time(outcome: SimulationResult, kept: slice | Ints, ttft_slo_s: float | Floats) -> Floats:
    """Count per adapter, as two rows: requests, and those that met the TTFT SLO, which may differ by adapter."""
    adapter = outcome.requests.adapter[kept]
    met = outcome.ttft_s[kept] <= (ttft_slo_s if isinstance(ttft_slo_s, float) else ttft_slo_s[adapter])
    num = outcome.requests.num_adapters
    return np.stack([np.bincount(adapter, minlength=num), np.bincount(adapter, met, num)]).astype(float)


def adapters_within(outcome: SimulationResult, kept: slice | Ints, ttft_slo_s: float, share: float = 0.9) -> float:
    """Return the share of adapters with at least 90 % of requests within the TTFT SLO: the paper's attainment."""
    calls, good = in_time(outcome, kept, ttft_slo_s)
    called = calls > 0
    return float((good[called] >= share * calls[called]).mean())
