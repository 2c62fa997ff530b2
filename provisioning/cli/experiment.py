"""Run `provision simulate`: a workload, a system and seeds, with the models' IAR for comparison."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import numpy as np

from provisioning.arrays import Ints
from provisioning.iar.admissibility import Model, immediate_admissibility
from provisioning.iar.models import offered_curve
from provisioning.inputs import InputError, count, non_negative, one_of, positive
from provisioning.model import engine_steps
from provisioning.plan.flags import SimulateFlags
from provisioning.plan.judge import silent
from provisioning.plan.scenario import workload
from provisioning.simulation.measure import Estimate, adapters_within, parts, tpots_s
from provisioning.simulation.run import Order, SimulationResult, System, assign_greedily
from provisioning.simulation.run import run as play
from provisioning.simulation.steps import MOST_ENGINES, StepSystem, run_steps
from provisioning.workload.requests import Requests
from provisioning.workload.workload import Workload

MOST_REQUESTS = 2_000_000
MOST_INSTANCES = 100_000
MOST_MS = 1e9
Play = Callable[[Requests], SimulationResult]


def run(experiment: SimulateFlags, say: Callable[[str], None] = silent) -> dict[str, Any]:
    """Simulate; returns {"simulated": {name: {mean, interval}}, "model_iar": {model: IAR}, "load": {...}}."""
    found, mode = workload(experiment), one_of("--mode", experiment.mode, "disaggregated", "coupled")
    order: Order = one_of("--order", experiment.order, "fcfs", "sjf")
    one_of("--dispatch", experiment.dispatch, "any", "by-adapter")
    rate = _rate(experiment, found)
    simulate = _stepped(experiment) if experiment.engine_profile else _clocked(experiment, found, order)
    slo_s = positive(experiment.ttft_slo_ms, "--ttft-slo-ms", MOST_MS) * 1e-3
    rows, in_flight = [], 0.0
    for seed in range(count(experiment.seeds, "--seeds", 2, 1000)):
        say(f"simulating, run {seed + 1:,} of {experiment.seeds:,}")
        outcome = simulate(_requests(experiment, found, rate, seed))
        kept = parts(outcome)[-1]
        rows.append(_row(outcome, kept, slo_s))
        in_flight += float((outcome.finish_s - outcome.admit_s)[kept].mean()) * rate * found.peak / experiment.seeds
    tops = {name: np.inf if name.endswith("_s") else 1.0 for name in rows[0]}
    if experiment.engine_profile is None:
        in_flight = rate * found.lengths.mean_tokens * experiment.step_ms * 1e-3 * found.peak
    return {
        "simulated": {name: Estimate.of([row[name] for row in rows], top).as_json() for name, top in tops.items()},
        "model_iar": _models(found, in_flight, experiment.cache_slots) if mode == "disaggregated" else {},
        "load": {"request_rate": rate, "global_batch": in_flight, "adapters": found.num_adapters, "peak": found.peak},
        "seeds": experiment.seeds,
    }


def _row(outcome: SimulationResult, kept: slice | Ints, slo_s: float) -> dict[str, float]:
    ttft_s, tpot_s = outcome.ttft_s[kept], tpots_s(outcome, kept)
    return {
        "immediate_rate": float(outcome.immediate[kept].mean()),
        "ttft_p50_s": float(np.percentile(ttft_s, 50)),
        "ttft_p95_s": float(np.percentile(ttft_s, 95)),
        "ttft_p99_s": float(np.percentile(ttft_s, 99)),
        "tpot_p50_s": float(np.percentile(tpot_s, 50)),
        "tpot_p95_s": float(np.percentile(tpot_s, 95)),
        "share_within_slo": float((ttft_s <= slo_s).mean()),
        "adapters_with_90_percent_within_slo": adapters_within(outcome, kept, slo_s),
    }


def _models(found: Workload, in_flight: float, cache_slots: int) -> dict[str, float]:
    """Compute each model's IAR; only `offered` knows output lengths by adapter."""
    slots = min(cache_slots, found.num_adapters)
    if found.tokens is not None:
        return {"offered": float(offered_curve(found.popularity, in_flight, found.in_flight)[slots])}
    return {model: immediate_admissibility(found.popularity, in_flight, slots, model) for model in get_args(Model)}


def _clocked(experiment: SimulateFlags, found: Workload, order: Order) -> Play:
    """Prepare instances with steps that all take --step-ms."""
    instances = count(experiment.instances, "--instances", 1, MOST_INSTANCES)
    apart = experiment.dispatch == "by-adapter"
    system = System(
        instance_of=assign_greedily(found.in_flight, instances) if apart else None,
        instances=instances,
        step_s=[positive(experiment.step_ms, "--step-ms", MOST_MS) * 1e-3],
        cache_slots=count(experiment.cache_slots, "--cache-slots", 1),
        shared=experiment.mode == "disaggregated",
        max_batch=None if experiment.max_batch is None else count(experiment.max_batch, "--max-batch", 1),
        load_s=_load_s(experiment),
        order=order,
    )
    return lambda requests: play(requests, system)


def _stepped(experiment: SimulateFlags) -> Play:
    """Prepare engines that schedule step by step, with measured steps."""
    for flag, given, known in (("--order", experiment.order, "fcfs"), ("--dispatch", experiment.dispatch, "any")):
        if given != known:
            raise InputError(f"{flag}: got {given!r} with --engine-profile, expected {known!r}, as vLLM schedules")
    shared, slots = experiment.mode == "disaggregated", count(experiment.cache_slots, "--cache-slots", 1)
    assert experiment.engine_profile is not None
    steps = engine_steps.read(experiment.engine_profile).steps("server" if shared else "coupled", slots)
    if experiment.max_batch is not None:
        steps = replace(steps, max_seqs=count(experiment.max_batch, "--max-batch", 1))
    instances = count(experiment.instances, "--instances", 1, MOST_ENGINES)
    system = StepSystem(steps=steps, slots=slots, shared=shared, instances=instances, load_s=_load_s(experiment))
    tokens = count(experiment.prompt_tokens, "--prompt-tokens", 1, 10**7)

    def stepped(requests: Requests) -> SimulationResult:
        if requests.input_tokens is None:
            requests = replace(requests, input_tokens=np.full(len(requests), tokens))
        return run_steps(requests, system)

    return stepped


def _load_s(experiment: SimulateFlags) -> float:
    return non_negative(experiment.load_ms, "--load-ms", MOST_MS) * 1e-3


def _rate(experiment: SimulateFlags, found: Workload) -> float:
    if (experiment.request_rate is None) == (experiment.batch_size is None):
        if experiment.request_rate is None and found.own_rate is not None:
            return found.own_rate
        raise InputError("--request-rate: give either it or --batch-size (with --instances)")
    if experiment.request_rate is not None:
        return positive(experiment.request_rate, "--request-rate", 1e9)
    if experiment.engine_profile is not None:
        raise InputError("--batch-size: with --engine-profile the batch follows from the rate; give --request-rate")
    residence_s = found.lengths.mean_tokens * positive(experiment.step_ms, "--step-ms", MOST_MS) * 1e-3
    return experiment.instances * positive(experiment.batch_size, "--batch-size", 1e9) / residence_s


def _requests(experiment: SimulateFlags, found: Workload, rate: float, seed: int) -> Requests:
    num = count(experiment.requests, "--requests", 100, MOST_REQUESTS)
    return found.calls(tokens_per_s=rate * found.lengths.mean_tokens * found.peak, num=num, seed=seed)
