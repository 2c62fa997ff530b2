"""Run `provision simulate`: a workload, a system and seeds, with the models' IAR for comparison."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import numpy as np

from provisioning.iar.admissibility import Model, immediate_admissibility
from provisioning.iar.models import offered_curve
from provisioning.inputs import InputError, count, non_negative, positive
from provisioning.plan.flags import SimulateFlags
from provisioning.plan.judge import silent
from provisioning.plan.scenario import workload
from provisioning.simulation.measure import Estimate, adapters_within, parts
from provisioning.simulation.run import System, assign_greedily
from provisioning.simulation.run import run as play
from provisioning.workload.requests import Requests
from provisioning.workload.workload import Workload

MOST_REQUESTS = 2_000_000
MOST_INSTANCES = 100_000
MOST_MS = 1e9


def run(experiment: SimulateFlags, say: Callable[[str], None] = silent) -> dict[str, Any]:
    """Simulate; returns {"simulated": {name: {mean, interval}}, "model_iar": {model: IAR}, "load": {...}}."""
    found, system, rate = _prepare(experiment)
    slo_s = positive(experiment.ttft_slo_ms, "--ttft-slo-ms", MOST_MS) * 1e-3
    rows = []
    for seed in range(count(experiment.seeds, "--seeds", 2, 1000)):
        say(f"simulating, run {seed + 1:,} of {experiment.seeds:,}")
        outcome = play(_requests(experiment, found, rate, seed), system)
        kept = parts(outcome)[-1]
        ttft_s = outcome.ttft_s[kept]
        rows.append(
            {
                "immediate_rate": float(outcome.immediate[kept].mean()),
                "ttft_p50_s": float(np.percentile(ttft_s, 50)),
                "ttft_p95_s": float(np.percentile(ttft_s, 95)),
                "ttft_p99_s": float(np.percentile(ttft_s, 99)),
                "share_within_slo": float((ttft_s <= slo_s).mean()),
                "adapters_with_90_percent_within_slo": adapters_within(outcome, kept, slo_s),
            }
        )
    estimates = {name: _estimate(name, [row[name] for row in rows]) for name in rows[0]}
    in_flight = rate * found.lengths.mean_tokens * system.step_s[0] * found.peak
    return {
        "simulated": {name: {"mean": e.mean, "interval": [e.low, e.high]} for name, e in estimates.items()},
        "model_iar": _models(found, in_flight, experiment.cache_slots) if system.shared else {},
        "load": {"request_rate": rate, "global_batch": in_flight, "adapters": found.num_adapters, "peak": found.peak},
        "seeds": experiment.seeds,
    }


def _models(found: Workload, in_flight: float, cache_slots: int) -> dict[str, float]:
    """Compute each model's IAR; only `offered` knows output lengths by adapter."""
    slots = min(cache_slots, found.num_adapters)
    if found.tokens is not None:
        return {"offered": float(offered_curve(found.popularity, in_flight, found.in_flight)[slots])}
    return {model: immediate_admissibility(found.popularity, in_flight, slots, model) for model in get_args(Model)}


def _prepare(experiment: SimulateFlags) -> tuple[Workload, System, float]:
    found = workload(experiment)
    for flag, value, known in (
        ("--mode", experiment.mode, ("disaggregated", "coupled")),
        ("--order", experiment.order, ("fcfs", "sjf")),
        ("--dispatch", experiment.dispatch, ("any", "by-adapter")),
    ):
        if value not in known:
            raise InputError(f"{flag}: got {value!r}, expected {' or '.join(known)}")
    step_s = positive(experiment.step_ms, "--step-ms", MOST_MS) * 1e-3
    instances = count(experiment.instances, "--instances", 1, MOST_INSTANCES)
    apart = experiment.dispatch == "by-adapter"
    system = System(
        instance_of=assign_greedily(found.in_flight, instances) if apart else None,
        instances=instances,
        step_s=[step_s],
        cache_slots=count(experiment.cache_slots, "--cache-slots", 1),
        shared=experiment.mode == "disaggregated",
        max_batch=None if experiment.max_batch is None else count(experiment.max_batch, "--max-batch", 1),
        load_s=non_negative(experiment.load_ms, "--load-ms", MOST_MS) * 1e-3,
        order="sjf" if experiment.order == "sjf" else "fcfs",
    )
    return found, system, _rate(experiment, found, step_s * found.lengths.mean_tokens)


def _estimate(name: str, values: list[float]) -> Estimate:
    return Estimate.of(values) if name.endswith("_s") else Estimate.of(values, top=1.0)


def _rate(experiment: SimulateFlags, found: Workload, residence_s: float) -> float:
    if (experiment.request_rate is None) == (experiment.batch_size is None):
        if experiment.request_rate is None and found.own_rate is not None:
            return found.own_rate
        raise InputError("--request-rate: give either it or --batch-size (with --instances)")
    if experiment.request_rate is not None:
        return positive(experiment.request_rate, "--request-rate", 1e9)
    return experiment.instances * positive(experiment.batch_size, "--batch-size", 1e9) / residence_s


def _requests(experiment: SimulateFlags, found: Workload, rate: float, seed: int) -> Requests:
    num = count(experiment.requests, "--requests", 100, MOST_REQUESTS)
    return found.calls(tokens_per_s=rate * found.lengths.mean_tokens * found.peak, num=num, seed=seed)
