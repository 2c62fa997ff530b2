"""The alternative on the same budget: no LoRA Server, all GPUs are LLM instances with their own caches.

S-LoRA as in the paper's section 6.1: half of the memory that the base weights leave holds adapters
and half KV cache, adapters are split over instances greedily by load, LoRA runs after the base GEMM, and a cold adapter
is loaded whole before its request starts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from provisioning.arrays import Floats
from provisioning.iar.models import offered_curve
from provisioning.model import memory
from provisioning.plan.candidates import Candidate, Scenario
from provisioning.plan.judge import Verdict, judge, silent
from provisioning.simulation.run import System, assign_greedily

_MEMORY_SHARE = 0.5


@dataclass(frozen=True, eq=False, kw_only=True)
class Coupled:
    """The coupled system on the budget of the plan, and the smallest one that would do by the model."""

    gpus: int
    instances: int
    slots_per_instance: int
    iar: float
    step_us: float
    holds_tpot: bool
    holds_kv: bool
    verdict: Verdict | None
    gpus_needed: int | None
    adapters_in_all: int
    target: float

    @property
    def holds(self) -> bool:
        """Whether it meets both SLOs: by simulation where there is one, else by the model."""
        return self.holds_tpot and self.holds_kv and (self.verdict.holds if self.verdict else self.iar >= self.target)


def slots(scenario: Scenario) -> int:
    """Adapters that one coupled instance caches."""
    model = scenario.model
    return memory.coupled_slots(
        model.spec, model.cluster, model.instance_gpus, model.lora_rank, model.shared_a, _MEMORY_SHARE
    )


def most_requests(scenario: Scenario) -> int:
    """Requests that the other half of the memory holds the KV cache of, per instance."""
    model = scenario.model
    free_share = 1 - _MEMORY_SHARE
    return memory.kv_batch(model.spec, model.cluster, model.instance_gpus, model.context_tokens, free_share)


def model_iar(scenario: Scenario, instances: int, cache_slots: int) -> float:
    """`offered` of every instance with its own adapters and its share of LB, weighted by requests."""
    popularity, in_flight = scenario.workload.popularity, scenario.workload.in_flight
    owner, total = assign_greedily(in_flight, instances), 0.0
    for instance in np.unique(owner):
        own: Floats = popularity[owner == instance]
        share = float(own.sum())
        if share > 0:
            curve = offered_curve(own / share, scenario.global_batch, in_flight[owner == instance])
            total += share * float(curve[min(cache_slots, own.size)])
    return total


def system(scenario: Scenario, instances: int, step_us: float) -> System:
    """For the simulator: a cache per instance, a whole adapter to load."""
    model = scenario.model
    bytes_ = model.spec.adapter_bytes(model.lora_rank, shared_a=model.shared_a)
    load_us = bytes_ / (model.instance_gpus * model.cluster.host_bytes_per_us)
    return System(
        instance_of=assign_greedily(scenario.workload.in_flight, instances),
        step_s=[step_us * 1e-6],
        cache_slots=slots(scenario),
        shared=False,
        max_batch=max(most_requests(scenario), 1),
        load_s=load_us * 1e-6,
    )


def compare(scenario: Scenario, candidate: Candidate, seeds: int, say: Callable[[str], None] = silent) -> Coupled:
    """The coupled system on as many GPUs as the plan and its instances take; simulated if seeds > 0."""
    model = scenario.model
    gpus = scenario.instances * model.instance_gpus + candidate.gpus
    instances, cache_slots = max(gpus // model.instance_gpus, 1), slots(scenario)
    step_us = model.step_us(scenario.global_batch / instances, None)
    verdict = None
    if seeds > 0 and cache_slots > 0:
        alone = system(scenario, instances, step_us)
        verdict = judge(scenario, alone, step_us, seeds, say=lambda text: say(f"simulating coupled instances, {text}"))
    return Coupled(
        gpus=gpus,
        instances=instances,
        slots_per_instance=cache_slots,
        iar=model_iar(scenario, instances, cache_slots),
        step_us=step_us,
        holds_tpot=step_us <= scenario.slo.tpot_us,
        holds_kv=scenario.global_batch / instances <= most_requests(scenario),
        verdict=verdict,
        gpus_needed=_needed(scenario, cache_slots),
        adapters_in_all=min(instances * cache_slots, scenario.workload.num_adapters),
        target=scenario.iar_target,
    )


def _needed(scenario: Scenario, cache_slots: int) -> int | None:
    """GPUs of the smallest coupled system whose modelled IAR reaches the target; None beyond 64 instances."""
    model = scenario.model
    if cache_slots == 0:
        return None
    tried = np.unique(np.r_[1:17, np.geomspace(16, 64, 9).astype(int)])
    for instances in tried:
        if scenario.global_batch / int(instances) > most_requests(scenario):
            continue
        step_us = model.step_us(scenario.global_batch / int(instances), None)
        if step_us <= scenario.slo.tpot_us and model_iar(scenario, int(instances), cache_slots) >= scenario.iar_target:
            return int(instances) * model.instance_gpus
    return None


def enough(coupled: Coupled) -> bool:
    """Whether a coupled system on no more GPUs than the plan's would do."""
    return coupled.holds or (coupled.gpus_needed is not None and coupled.gpus_needed <= coupled.gpus)


def verdict_text(scenario: Scenario, candidate: Candidate, coupled: Coupled, *, plan: bool = True) -> str:
    """Plainly, whether a LoRA Server is worth it. Without a plan `candidate` is what came closest to one."""
    if not plan:
        return _without_plan(scenario, coupled)
    server = f"{scenario.instances:,} instances and {candidate.gpus:,} LoRA Server GPUs"
    cached = f"{coupled.instances:,} coupled instances on the same {coupled.gpus:,} GPUs"
    held = f"cache {coupled.adapters_in_all:,} of the {scenario.workload.num_adapters:,} adapters"
    if coupled.holds:
        fewer = ""
        if coupled.gpus_needed is not None and coupled.gpus_needed < coupled.gpus:
            fewer = f", and by the model {coupled.gpus_needed:,} GPUs would do"
        return f"A LoRA Server is not worth it here: {cached} {held} and meet both SLOs{fewer}."
    if enough(coupled):
        return (
            f"A LoRA Server may not be worth it here: by the model, {coupled.gpus_needed} GPUs of coupled "
            f"instances do as well as {server}; simulate it before deciding."
        )
    need = f"would need {coupled.gpus_needed} GPUs by the model" if coupled.gpus_needed else "need over 64 instances"
    return f"A LoRA Server is worth it: {cached} {held}, {_why(coupled)} and {need}."


def _why(coupled: Coupled) -> str:
    if not coupled.holds_kv:
        return "lack memory for KV"
    return "miss the TTFT SLO" if coupled.holds_tpot else "miss the TPOT SLO"


def _without_plan(scenario: Scenario, coupled: Coupled) -> str:
    where = f"{coupled.instances:,} coupled instances on {coupled.gpus:,} GPUs"
    if coupled.holds:
        return f"No LoRA Server of up to {scenario.max_gpus:,} GPUs does, but by the model {where} meet both SLOs."
    more = f"; {coupled.gpus_needed} GPUs of them would do" if coupled.gpus_needed else ""
    return f"Nor do {where}, as many as the closest layout takes: by the model they {_why(coupled)}{more}."
