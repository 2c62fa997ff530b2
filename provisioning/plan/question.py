"""The question to the planner, and what every layout's answer is measured against.

All loads are those of the workload's peak.
What is asked for is LB requests in flight, or a rate of requests. Of a rate, LB follows from the step that a layout
has at that very load (`at`). With `any` dispatch all instances hold LB / L requests; with `by-adapter` the busiest
holds more, and it is the busiest that has to meet the TPOT and Eq. 5, and to hold the KV cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np

from lora_server.placement import Layout
from provisioning.arrays import Floats, Ints
from provisioning.iar.models import offered_curve
from provisioning.model import memory
from provisioning.model.latency import Budget, Eq6, Latency, StepModel, budget, served_us
from provisioning.plan.balance import settled_batch
from provisioning.plan.classes import SloClass
from provisioning.plan.slo import Slo
from provisioning.simulation.run import assign_greedily
from provisioning.workload.workload import Workload

Dispatch = Literal["any", "by-adapter"]
Prefill = Literal["shared", "apart"]  # by the instances that decode, or by others
_FINEST = 0.005  # of LB, relative


@lru_cache(maxsize=16)
def _curve(workload: Workload, global_batch: float) -> Floats:
    return offered_curve(workload.popularity, global_batch, workload.in_flight)


@lru_cache(maxsize=64)
def _owners(workload: Workload, instances: int) -> Ints:
    """Map each adapter to its instance, where adapters belong to instances."""
    return assign_greedily(workload.in_flight, instances)


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
    coupled_split: float | None = None
    max_gpus: int = 64
    spare_gpus: int = 0
    whole_nodes: bool = False
    classes: tuple[SloClass, ...] = ()

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
            batch = settled_batch(per_us, lambda b: self._mean_step_us(b, layout), most)
            found = replace(self, settled=True, global_batch=batch * self.instances)
        if self.dispatch == "any" or self.instances == 1:
            return found
        per_us, busy_us = found.hottest * found.batch / found.mean_step_us(layout), found.busy_us(layout)
        most = per_us * self.slo.tpot_us
        busiest = settled_batch(per_us, lambda b: self._busiest_step_us(b, layout, busy_us), most)
        return replace(found, busiest_batch=busiest)

    def _mean_step_us(self, batch: float, layout: Layout) -> float:
        return self.model.step_us(batch, layout, self.instances, self.eq6)

    def _busiest_step_us(self, batch: float, layout: Layout, busy_us: float) -> float:
        return max(self.busiest_model.step_us(batch, layout), self.model.spec.layers * busy_us)

    @cached_property
    def hottest(self) -> float:
        """Requests in flight of the busiest instance over the mean, were adapters assigned to instances."""
        return float(self._loads.max()) * self.instances

    @cached_property
    def _loads(self) -> Floats:
        owners = _owners(self.workload, self.instances)
        loads: Floats = np.bincount(owners, weights=self.workload.in_flight).astype(float)
        return loads

    @cached_property
    def busiest_model(self) -> StepModel:
        """Model of the busiest instance, which has its own adapters only."""
        if self.dispatch == "any" or self.instances == 1:
            return self.model
        own = _owners(self.workload, self.instances) == int(np.argmax(self._loads))
        in_flight = self.workload.in_flight[own]
        return replace(self.model, popularity=in_flight / in_flight.sum())

    @property
    def busiest(self) -> float:
        """Requests in flight of the busiest instance."""
        return self.batch if self.busiest_batch is None else self.busiest_batch

    @cached_property
    def curve(self) -> Floats:
        """`offered` for M = 0..N. LB of a rate differs a little by layout: it is rounded up, to have few curves."""
        rounded = math.exp(math.ceil(math.log(self.global_batch) / _FINEST) * _FINEST)
        return _curve(self.workload, self.global_batch if self.request_rate is None else rounded)

    @cached_property
    def min_cache_slots(self) -> int:
        """The smallest M >= 1 that reaches the target by `offered`."""
        return max(int(np.argmax(self.curve >= self.iar_target)), 1)

    def iar(self, cache_slots: int) -> float:
        """Compute `offered` at a layout's slots; slots beyond the number of adapters are ignored."""
        return float(self.curve[min(cache_slots, self.workload.num_adapters)])

    def limit(self, layout: Layout) -> Budget:
        """Compute the right sides of Eq. 5 and 6."""
        return budget(self.model, self.busiest, self.slo.tpot_us, layout.ep)

    def lora(self, layout: Layout) -> Latency:
        """Compute one layer's LoRA step of the busiest instance; cached by ep, since pp has no part in it."""
        if layout.ep not in self._latencies:
            self._latencies[layout.ep] = self.busiest_model.lora(self.busiest, layout)
        return self._latencies[layout.ep]

    @cached_property
    def _latencies(self) -> dict[int, Latency]:
        return {}

    def busy_us(self, layout: Layout) -> float:
        """Compute the left side of Eq. 6 for equally busy instances: no other split of the load takes longer."""
        shared = self.busiest_batch is None and self.busiest_model is self.model
        latency = self.served(layout) if shared else self.model.served(self.batch, layout)
        return served_us(latency, layout, self.model.spec.layers, self.instances, self.eq6)

    def served(self, layout: Layout) -> Latency:
        """Compute the terms of Eq. 6: one layer's LoRA step of the busiest instance, with its share of prompts."""
        latency, model = self.lora(layout), self.busiest_model
        if not model.prompt_tokens:
            return latency
        return latency.plus(model.prompt(layout.ep).served, model.prompts(self.busiest))

    def decode_step_us(self, layout: Layout) -> float:
        """Decode step of an instance with B requests, between prompts."""
        return self.model.without_prompts().step_us(self.batch, layout, self.instances, self.eq6)

    def step_us(self, layout: Layout) -> float:
        """Decode step of the busiest instance."""
        return self._busiest_step_us(self.busiest, layout, self.busy_us(layout))

    def mean_step_us(self, layout: Layout) -> float:
        """Compute the step of an instance with B requests."""
        return self._mean_step_us(self.batch, layout)

    @property
    def gpu_counts(self) -> range:
        """GPU counts of the LoRA Server to consider; with the spares, complete nodes if `whole_nodes`."""
        step, spare = self.model.cluster.gpus_per_node if self.whole_nodes else 1, self.spare_gpus
        return range(step - spare % step, self.max_gpus - spare + 1, step)

    @property
    def engine_gpus(self) -> int:
        """GPUs of all LLM instances."""
        return self.instances * self.model.instance_gpus

    @cached_property
    def kv_requests(self) -> int:
        """Requests that an instance has KV cache for; without adapters, KV cache has all free memory."""
        return memory.requests_in(self.model.free_bytes, self.model.spec, self.model.context_tokens)

    def adapter_bytes(self, layout: Layout) -> int:
        """Return the bytes of a slot on the fullest shard."""
        model = self.model
        return memory.fullest_shard_bytes(model.spec, layout, model.lora_rank, model.shared_a)

    def slots(self, layout: Layout) -> int:
        """Return M, the number of adapters that a layout holds."""
        model = self.model
        return memory.cache_slots(model.spec, layout, model.cluster, model.lora_rank, model.shared_a)
