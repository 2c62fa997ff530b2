"""Sensitivity: plans for slightly different questions, by the model alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from provisioning.arrays import Floats
from provisioning.plan.candidates import Candidate, candidates, evaluate
from provisioning.plan.choice import smallest
from provisioning.plan.instances import sized
from provisioning.plan.question import Scenario
from provisioning.workload.workload import zipf

_SERVERS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_SHARED = " servers, each with its share of the load"
_MANY = 20_000  # adapters: with more, the instances are not sought anew for each change


@dataclass(frozen=True, kw_only=True)
class QuestionVariant:
    """`gpus` is what the changed question needs (None: infeasible); `iar_at_plan` what the planned layout gives it.

    Where instances are not given, the changed question has its own `instances`.
    """

    change: str
    gpus: int | None
    instances: int
    layout: str | None
    min_cache_slots: int
    iar_at_plan: float
    meets_at_plan: bool
    binding_constraint: str


def sensitivity(scenario: Scenario, chosen: Candidate, *, feasible: bool = True) -> list[QuestionVariant]:
    """Vary the question: GPUs +-1, one GPU lost, N, s, rank, batch and link; if nothing is feasible, also the demands.

    `chosen` is then the layout that came closest, and a variant with `gpus` is one that would have a plan.
    """
    rows = [
        _resized(scenario, chosen.gpus + 1, "gpus +1"),
        *([_resized(scenario, chosen.gpus - 1, "gpus -1")] if chosen.gpus > 1 else []),
        _resized(scenario, chosen.gpus - 1, "one GPU fails, the rest laid out anew"),
    ]
    if scenario.workload.num_adapters > _MANY:
        scenario = replace(scenario, free_instances=False)
    changes = [*_changes(scenario), *(() if feasible else _relaxed(scenario))]
    return rows + [_replanned(name, changed, chosen) for name, changed in changes]


def several_servers(variants: Sequence[QuestionVariant]) -> QuestionVariant | None:
    """Return the variant of several servers, which only a question without a plan has."""
    return next((item for item in variants if item.change.endswith(_SHARED)), None)


def headroom(scenario: Scenario, chosen: Candidate, most: float = 16.0) -> float:
    """Find the largest factor on the load, to 1 %, at which the planned layout still meets everything by the model."""
    low, high = 1.0, most
    while high / low > 1.01:
        factor = (low * high) ** 0.5
        fails = evaluate(scenario.scaled(factor), chosen.layout).failed
        low, high = (low, factor) if fails else (factor, high)
    return low


def _resized(scenario: Scenario, gpus: int, change: str) -> QuestionVariant:
    found = candidates(scenario, gpus) if gpus > 0 else []
    best = found[0] if found else None
    return QuestionVariant(
        change=change,
        gpus=gpus,
        instances=scenario.instances,
        layout=str(best.layout) if best else None,
        min_cache_slots=best.scenario.cache.min_cache_slots if best else scenario.cache.min_cache_slots,
        iar_at_plan=best.scenario.cache.iar(best.slots) if best else 0.0,
        meets_at_plan=best is not None and not best.failed,
        binding_constraint=",".join(best.failed) if best else "cache",
    )


def _replanned(change: str, scenario: Scenario, chosen: Candidate) -> QuestionVariant:
    anew, kept = sized(scenario), evaluate(scenario, chosen.layout)
    choice = smallest(anew)
    return QuestionVariant(
        change=change,
        gpus=choice.chosen.gpus if choice.chosen else None,
        instances=anew.instances,
        layout=str(choice.chosen.layout) if choice.chosen else None,
        min_cache_slots=(choice.chosen or kept).scenario.cache.min_cache_slots,
        iar_at_plan=kept.scenario.cache.iar(kept.slots),
        meets_at_plan=not kept.failed,
        binding_constraint=choice.binding,
    )


def _changes(scenario: Scenario) -> Iterator[tuple[str, Scenario]]:
    workload, model, num = scenario.workload, scenario.model, scenario.workload.num_adapters
    skew = workload.zipf_skew
    if skew is not None:
        for factor in (0.5, 2.0):
            changed = max(round(num * factor), 1)
            yield f"adapters {changed}", _with_popularity(scenario, zipf(skew, changed))
        for change in (-0.2, 0.2):
            yield f"zipf s {max(skew + change, 0):.12g}", _with_popularity(scenario, zipf(max(skew + change, 0), num))
    for rank in sorted({max(model.lora_rank // 2, 1), model.lora_rank * 2}):
        yield f"rank {round(rank, 2):.12g}", replace(scenario, model=replace(model, lora_rank=rank))
    mean_rate = None if scenario.request_rate is None else scenario.request_rate / workload.peak
    for factor in (0.5, 2.0):
        batch = f"batch {round(scenario.batch * factor, 2):.12g}"
        yield batch if mean_rate is None else f"{mean_rate * factor:.12g} requests/s", scenario.scaled(factor)
    if scenario.instances > 1 and scenario.dispatch == "any":
        yield "dispatch by adapter", replace(scenario, dispatch="by-adapter")
    elif scenario.instances > 1:
        yield "dispatch to any instance", replace(scenario, dispatch="any")
    if model.prompt_tokens:
        yield "prompts computed apart", replace(scenario, prefill="apart", model=model.without_prompts())
    for factor in (0.5, 2.0):
        gbps = model.cluster.link_gbps * factor
        cluster = replace(model.cluster, link_gbps=gbps)
        yield f"link {gbps:.12g} Gb/s", replace(scenario, model=replace(model, cluster=cluster))


def _relaxed(scenario: Scenario) -> Iterator[tuple[str, Scenario]]:
    slo, cluster = scenario.slo, scenario.model.cluster
    yield f"max GPUs {2 * scenario.max_gpus}", replace(scenario, max_gpus=2 * scenario.max_gpus)
    yield f"TTFT SLO {slo.ttft_us / 500:.12g} ms", replace(scenario, slo=replace(slo, ttft_us=2 * slo.ttft_us))
    yield f"TPOT SLO {slo.tpot_us / 500:.12g} ms", replace(scenario, slo=replace(slo, tpot_us=2 * slo.tpot_us))
    doubled = 2 * scenario.instances
    yield f"instances {doubled}, the load spread over them", replace(scenario, instances=doubled)
    target = round(2 * scenario.iar_target - 1, 12)
    if 0 < target < 1:
        yield f"immediate admission target {target:g}", replace(scenario, iar_target=target)
    gpu = replace(cluster.gpu, memory_bytes=2 * cluster.gpu.memory_bytes)
    model = replace(scenario.model, cluster=replace(cluster, gpu=gpu))
    yield "memory per GPU x2", replace(scenario, model=model)
    servers = _servers(scenario)
    if servers is not None:
        yield f"{servers}{_SHARED}", _one_of(scenario, servers)


def _servers(scenario: Scenario) -> int | None:
    """Find the number of servers with the fewest GPUs in all, each of which has a plan; None if as many as 64 have
    none."""
    best, fewest = None, math.inf
    for servers in _SERVERS:
        chosen = smallest(sized(_one_of(scenario, servers))).chosen
        if chosen is not None and servers * chosen.all_gpus >= fewest:
            break
        if chosen is not None:
            best, fewest = servers, servers * chosen.all_gpus
    return best


def _one_of(scenario: Scenario, servers: int) -> Scenario:
    """Return the question of one of several servers: all adapters, its own instances, and its share of the load."""
    instances = max(scenario.instances // servers, 1)
    return replace(scenario.scaled(1 / servers), instances=instances)


def _with_popularity(scenario: Scenario, popularity: Floats) -> Scenario:
    workload = replace(scenario.workload, popularity=popularity, tokens=None, trace=None, over_time=None)
    return scenario.of(workload)
