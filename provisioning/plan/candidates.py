"""The layouts that meet both SLOs by the model.

A layout is accepted when
    cache    its fullest shard holds M >= min_cache_slots(popularity, LB, target), by `offered`
    network, compute    Eq. 5 and Eq. 6 hold, each named after its largest term
    ttft     the SLO exceeds one decode step plus what prefetch cannot hide of an adapter's load
    tpot     the base model's own step, its share of prompts included, fits the SLO
    host     engines and server fit on one host, where the transport does not leave it
    kv       the KV cache of the busiest instance's requests fits beside its weights
    batch    no instance has more requests than --batch-size, where a rate is asked for as well
Among the accepted layouts of one GPU count, the fastest step comes first, then the larger cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from lora_server.placement import Layout
from provisioning.model import memory
from provisioning.model.latency import Latency, violations, visible_load_us
from provisioning.plan.question import Scenario


@dataclass(frozen=True, eq=False, kw_only=True)
class Candidate:
    """A layout, the load that it has, what it offers, and the constraints that it fails.

    A step takes `mean_step_us` on average: `decode_step_us`, and what comes in between of `prompt_us` a request.
    """

    scenario: Scenario
    layout: Layout
    slots: int
    latency: Latency
    step_us: float
    mean_step_us: float
    load_us: float
    failed: tuple[str, ...]

    @property
    def gpus(self) -> int:
        """x * y."""
        return self.layout.num_shards

    @cached_property
    def decode_step_us(self) -> float:
        """Decode step of an instance with B requests, between prompts."""
        return self.scenario.steps.decode_us(self.layout)

    @property
    def prompt_us(self) -> float:
        """Time that a request's prompt takes of its instance: its share of the steps that it comes into."""
        scenario = self.scenario
        return (self.mean_step_us - self.decode_step_us) * scenario.workload.lengths.mean_tokens / scenario.batch

    @property
    def all_gpus(self) -> int:
        """GPUs in total: the server's, the spares and those of the LLM instances."""
        return self.gpus + self.spare_gpus + self.scenario.engine_gpus

    @property
    def spare_gpus(self) -> int:
        """GPUs that stand by, and those of all replicas but one."""
        return self.scenario.spares(self.gpus)


def evaluate(scenario: Scenario, layout: Layout) -> Candidate:
    """Check one layout against all constraints, the base model's first."""
    found = scenario.at(layout)
    slots, step_us = found.cache.slots(layout), found.steps.us(layout)
    load_us = visible_load_us(found.model, layout, step_us)
    failed = [*_but_cache(found, layout, step_us + load_us)]
    if _short_of_slots(found, slots):
        failed.append("cache")
    return Candidate(
        scenario=found,
        layout=layout,
        slots=slots,
        latency=found.steps.lora(layout),
        step_us=step_us,
        mean_step_us=found.steps.mean_us(layout),
        load_us=load_us,
        failed=tuple(failed),
    )


def accepted(scenario: Scenario, layout: Layout) -> bool:
    """Tell whether a layout meets every constraint; quicker than `evaluate` if it does not."""
    found = scenario.at(layout)
    step_us = found.steps.us(layout)
    ttft_us = step_us + visible_load_us(found.model, layout, step_us)
    return not any(_but_cache(found, layout, ttft_us)) and not _short_of_slots(found, found.cache.slots(layout))


def _but_cache(scenario: Scenario, layout: Layout, ttft_us: float) -> Iterator[str]:
    slo, busiest = scenario.slo, scenario.busiest
    if busiest > scenario.kv_requests:
        yield "kv"
    if scenario.batch > scenario.most_batch * (1 + 1e-9):
        yield "batch"
    known = scenario.model.profile.machine is not None  # then a step may take longer than Eq. 5 says
    step_us = scenario.steps.us(layout) if known else scenario.loads.busiest_model.base_step_us(busiest)
    if step_us > slo.tpot_us:
        yield "tpot"
    yield from violations(
        scenario.steps.lora(layout),
        scenario.limit(layout),
        scenario.steps.busy_us(layout),
        scenario.steps.served(layout),
    )
    if scenario.model.transport.one_host:
        gpus = layout.num_shards + scenario.spares(layout.num_shards) + scenario.engine_gpus
        if gpus > scenario.model.cluster.gpus_per_node:
            yield "host"
    if slo.ttft_us <= ttft_us:
        yield "ttft"


def _short_of_slots(scenario: Scenario, slots: int) -> bool:
    return slots < scenario.workload.num_adapters and slots < scenario.cache.min_cache_slots


def candidates(scenario: Scenario, gpus: int) -> list[Candidate]:
    """List the layouts of one GPU count, best first: fewest failures, fastest step, largest cache."""
    found = [evaluate(scenario, layout) for layout in memory.layouts(scenario.model.spec, gpus, scenario.model.profile)]
    return sorted(found, key=lambda item: (len(item.failed), item.step_us, item.latency.total, -item.slots))


def all_but_cache(scenario: Scenario) -> list[list[Candidate]]:
    """List per GPU count the layouts that meet all but perhaps the model's cache test, if there are any."""
    found = (
        [item for item in candidates(scenario, gpus) if set(item.failed) <= {"cache"}] for gpus in scenario.gpu_counts
    )
    return [layouts for layouts in found if layouts]
