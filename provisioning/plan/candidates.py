"""The question to the planner, and the layouts that meet both SLOs by the model.

A layout is accepted when
    cache    its fullest shard holds M >= min_cache_slots(popularity, LB, target), by `offered`
    network, compute    Eq. 5 and Eq. 6 hold, each named after its largest term
    ttft     the SLO exceeds one decode step plus what prefetch cannot hide of an adapter's load
    tpot     the base model's own step fits the SLO
    kv       the KV cache of B requests fits beside an instance's weights
Among the accepted layouts of one GPU count, the fastest step comes first, then the larger cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lora_server.placement import Layout
from provisioning.arrays import Floats
from provisioning.iar.models import offered_curve
from provisioning.model import memory
from provisioning.model.latency import Budget, Latency, StepModel, budget, violations
from provisioning.model.loading import visible_load_us
from provisioning.plan.slo import Slo
from provisioning.workload.workload import Workload


@dataclass(frozen=True, eq=False, kw_only=True)
class Scenario:
    """One question to the planner; `global_batch` is LB at the workload's peak."""

    slo: Slo
    workload: Workload
    model: StepModel
    instances: int
    global_batch: float
    iar_target: float
    max_gpus: int = 64
    whole_nodes: bool = False

    @property
    def batch(self) -> float:
        """B, of one instance."""
        return self.global_batch / self.instances

    @cached_property
    def curve(self) -> Floats:
        """`offered` for M = 0..N."""
        return offered_curve(self.workload.popularity, self.global_batch, self.workload.in_flight)

    @cached_property
    def min_cache_slots(self) -> int:
        """The smallest M >= 1 that reaches the target by `offered`."""
        return max(int(np.argmax(self.curve >= self.iar_target)), 1)

    def iar(self, cache_slots: int) -> float:
        """`offered` at what a layout holds; more slots than adapters are of no use."""
        return float(self.curve[min(cache_slots, self.workload.num_adapters)])

    @cached_property
    def limit(self) -> Budget:
        """Right sides of Eq. 5 and 6."""
        return budget(self.model, self.batch, self.slo.tpot_us)

    def lora(self, layout: Layout) -> Latency:
        """Of one layer's LoRA step; worked out once per ep, since pp has no part in it."""
        if layout.ep not in self._latencies:
            self._latencies[layout.ep] = self.model.lora(self.batch, layout)
        return self._latencies[layout.ep]

    @cached_property
    def _latencies(self) -> dict[int, Latency]:
        return {}

    @cached_property
    def base_us(self) -> tuple[float, float]:
        """The base layer's attention and FFN at this batch."""
        return self.model.base_attention_us(self.batch).value, self.model.base_ffn_us(self.batch).value

    def step_us(self, layout: Layout) -> float:
        """One decode step, LoRA beside the FFN."""
        attention_us, ffn_us = self.base_us
        return self.model.spec.layers * (attention_us + max(ffn_us, self.lora(layout).total))

    @property
    def gpu_counts(self) -> range:
        """Of the LoRA Server: what may be considered."""
        step = self.model.cluster.gpus_per_node if self.whole_nodes else 1
        return range(step, self.max_gpus + 1, step)

    @cached_property
    def kv_requests(self) -> int:
        """Requests whose KV cache an instance holds: without adapters, all that its weights leave is for it."""
        model = self.model
        return memory.kv_batch(model.spec, model.cluster, model.instance_gpus, model.context_tokens, share=1.0)

    def adapter_bytes(self, layout: Layout) -> int:
        """What a slot takes of the fullest shard."""
        model = self.model
        return memory.fullest_shard_bytes(model.spec, layout, model.lora_rank, model.shared_a)

    def slots(self, layout: Layout) -> int:
        """M of a layout."""
        model = self.model
        return memory.cache_slots(model.spec, layout, model.cluster, model.lora_rank, model.shared_a)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A layout, what it offers, and the constraints that it fails."""

    layout: Layout
    slots: int
    latency: Latency
    step_us: float
    load_us: float
    failed: tuple[str, ...]

    @property
    def gpus(self) -> int:
        """x * y."""
        return self.layout.num_shards


def evaluate(scenario: Scenario, layout: Layout) -> Candidate:
    """One layout against all constraints, the base model's first."""
    model, slo = scenario.model, scenario.slo
    latency, slots, step_us = scenario.lora(layout), scenario.slots(layout), scenario.step_us(layout)
    load_us = visible_load_us(model, layout, step_us)
    failed = violations(latency, scenario.limit, scenario.instances)
    if model.spec.layers * sum(scenario.base_us) > slo.tpot_us:
        failed.insert(0, "tpot")
    if scenario.batch > scenario.kv_requests:
        failed.insert(0, "kv")
    if slo.ttft_us <= step_us + load_us:
        failed.append("ttft")
    if slots < scenario.min_cache_slots:
        failed.append("cache")
    return Candidate(
        layout=layout, slots=slots, latency=latency, step_us=step_us, load_us=load_us, failed=tuple(failed)
    )


def candidates(scenario: Scenario, gpus: int) -> list[Candidate]:
    """All layouts of one GPU count, best first: fewest failures, fastest step, largest cache."""
    found = [evaluate(scenario, layout) for layout in memory.layouts(scenario.model.spec, gpus)]
    return sorted(found, key=lambda item: (len(item.failed), item.latency.total, -item.slots))


def all_but_cache(scenario: Scenario) -> list[list[Candidate]]:
    """Per GPU count the layouts that meet all but, perhaps, the model's cache test; counts without one are left out."""
    found = (
        [item for item in candidates(scenario, gpus) if set(item.failed) <= {"cache"}] for gpus in scenario.gpu_counts
    )
    return [layouts for layouts in found if layouts]
