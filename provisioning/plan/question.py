"""The question to the planner, and what every layout's answer is measured against.

All loads are those of the workload's peak.
What is asked for is LB requests in flight, or a rate of requests. Of a rate, LB follows from the step that a layout
has at that very load (`at`). With `any` dispatch all instances hold LB / L requests; with `by-adapter` the busiest
holds more, and it is the busiest that has to meet the TPOT and Eq. 5, and to hold the KV cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from lora_server.placement import Layout
from lora_server.slo import Slo
from provisioning.model import memory
from provisioning.model.engine_steps import EngineProfile
from provisioning.model.latency import Budget, Eq6, StepModel, budget
from provisioning.plan.classes import SloClass
from provisioning.plan.loads import AdapterCache, Dispatch, InstanceLoads, LayoutSteps, settled_batch, slowest_us
from provisioning.workload.workload import Workload

Prefill = Literal["shared", "apart"]  # by the instances that decode, or by others
_FINEST = 0.005  # of LB, relative


@dataclass(frozen=True, eq=False, kw_only=True)
class Scenario:
    """One question. Where it is not `settled`, LB is by rate and step, and global_batch is the SLO's bound on it."""

    slo: Slo
    workload: Workload
    model: StepModel
    instances: int
    global_batch: float
    iar_target: float
    request_rate: float | None = None
    settled: bool = True
    free_instances: bool = False
    most_batch: float = math.inf
    busiest_batch: float | None = None
    dispatch: Dispatch = "any"
    eq6: Eq6 = "stage"
    prefill: Prefill = "shared"
    prompt_tokens: float = 0.0
    prompts_by: str = ""
    iar_asked: bool = False
    coupled_split: float | None = None
    coupled_routed: bool = True
    max_gpus: int = 64
    spare_gpus: int = 0
    replicas: int = 1
    whole_nodes: bool = False
    classes: tuple[SloClass, ...] = ()
    engine_profile: EngineProfile | None = None

    @property
    def batch(self) -> float:
        """B: mean requests in flight of an instance."""
        return self.global_batch / self.instances

    def of(self, workload: Workload) -> Scenario:
        """Replace the calls; the prompt length stays."""
        mean = workload.lengths.mean_tokens
        return replace(
            self,
            workload=workload,
            model=replace(self.model, popularity=workload.in_flight, output_tokens=mean),
        )

    def scaled(self, factor: float) -> Scenario:
        """Return the question with the load multiplied by a factor."""
        rate = None if self.request_rate is None else self.request_rate * factor
        return replace(self, request_rate=rate, global_batch=self.global_batch * factor, busiest_batch=None)

    @property
    def tokens_per_us(self) -> float:
        """Output tokens of the given rate."""
        return (self.request_rate or 0.0) * self.workload.lengths.mean_tokens * 1e-6

    def rate(self, step_us: float) -> float:
        """Return the requests/s with this step: the rate asked for, or the rate that LB requests in flight make."""
        return self.request_rate or self.global_batch / (self.workload.lengths.mean_tokens * step_us * 1e-6)

    def at(self, layout: Layout) -> Scenario:
        """Settle the load on this layout: LB of a rate, and the requests of the busiest instance."""
        found = self
        if not self.settled:
            per_us = self.tokens_per_us / self.instances
            most = per_us * self.slo.tpot_us
            batch = settled_batch(per_us, lambda b: self.model.step_us(b, layout, self.instances, self.eq6), most)
            found = replace(self, settled=True, global_batch=batch * self.instances)
        if self.dispatch == "any" or self.instances == 1:
            return found
        steps, model = found.steps, self.loads.busiest_model
        per_us, busy_us = self.loads.hottest * found.batch / steps.mean_us(layout), steps.busy_us(layout)
        most = per_us * self.slo.tpot_us
        busiest = settled_batch(per_us, lambda b: slowest_us(model, b, layout, busy_us, self.instances), most)
        return replace(found, busiest_batch=busiest)

    @cached_property
    def loads(self) -> InstanceLoads:
        """How requests are spread over the instances."""
        return InstanceLoads(self.workload, self.instances, self.model, self.dispatch)

    @cached_property
    def cache(self) -> AdapterCache:
        """The server's slots. LB of a rate differs a little by layout: it is rounded up, to have few curves."""
        rounded = math.exp(math.ceil(math.log(self.global_batch) / _FINEST) * _FINEST)
        global_batch = self.global_batch if self.request_rate is None else rounded
        return AdapterCache(self.workload, self.model, global_batch, self.iar_target)

    @cached_property
    def steps(self) -> LayoutSteps:
        """The times of this load's steps."""
        busiest = self.loads.busiest_model
        shared = self.busiest_batch is None and busiest is self.model
        return LayoutSteps(self.model, busiest, self.batch, self.busiest, self.instances, self.eq6, shared)

    @property
    def busiest(self) -> float:
        """Requests in flight of the busiest instance."""
        return self.batch if self.busiest_batch is None else self.busiest_batch

    def limit(self, layout: Layout) -> Budget:
        """Compute the right sides of Eq. 5 and 6."""
        return budget(self.model, self.busiest, self.slo.tpot_us, layout.ep, self.instances)

    def spares(self, gpus: int) -> int:
        """Return the GPUs beside a LoRA Server of so many: those that stand by, and those of the other replicas."""
        return self.spare_gpus + (self.replicas - 1) * gpus

    @property
    def gpu_counts(self) -> list[int]:
        """GPU counts of the LoRA Server to consider; with the spares, complete nodes if `whole_nodes`."""
        step = self.model.cluster.gpus_per_node if self.whole_nodes else 1
        counts = range(1, (self.max_gpus - self.spare_gpus) // self.replicas + 1)
        return [gpus for gpus in counts if (gpus + self.spares(gpus)) % step == 0]

    @property
    def engine_gpus(self) -> int:
        """GPUs of all LLM instances."""
        return self.instances * self.model.instance_gpus

    @cached_property
    def kv_requests(self) -> int:
        """Requests that an instance has KV cache for; without adapters, KV cache has all free memory."""
        return memory.requests_in(self.model.free_bytes, self.model.spec, self.model.context_tokens)
