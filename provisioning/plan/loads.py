"""The load of a question: over the instances, on the server's cache, and as the steps that a layout has with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np

from lora_server.placement import Layout
from provisioning.arrays import Floats, Ints
from provisioning.iar.models import offered_curve
from provisioning.model import memory
from provisioning.model.latency import Eq6, Latency, StepModel, served_us
from provisioning.simulation.run import assign_greedily
from provisioning.workload.workload import Workload

Dispatch = Literal["any", "by-adapter"]
_PRECISION = 1e-9  # of a settled batch


@lru_cache(maxsize=16)
def _curve(workload: Workload, global_batch: float) -> Floats:
    """Compute `offered` for M = 0..N; where a trace's mix changes, the worse of all windows and the fullest."""
    mixes = workload.mixes
    if not mixes:
        return offered_curve(workload.popularity, global_batch, workload.in_flight)
    curves_WM = np.stack([offered_curve(mix.popularity, global_batch * mix.load, mix.in_flight) for mix in mixes])
    fullest = max(range(len(mixes)), key=lambda place: mixes[place].load)
    mean = np.asarray([mix.share for mix in mixes]) @ curves_WM
    return np.where(curves_WM.min(axis=0) == 1, 1.0, np.minimum(mean, curves_WM[fullest]))


@lru_cache(maxsize=64)
def _owners(workload: Workload, instances: int) -> Ints:
    """Map each adapter to its instance, where adapters belong to instances."""
    return assign_greedily(workload.in_flight, instances)


def settled_batch(tokens_per_us: float, step_us: Callable[[float], float], most: float) -> float:
    """Find the batch B = tokens_per_us * step(B) that a rate keeps in flight; `most` if it would be that or more.

    It is Little's law against a step that takes longer, the more requests there are. step(B) / B falls, so there is one
    at most: regula falsi on what is too little, with Illinois' halving.
    """
    high, excess = most, most - tokens_per_us * step_us(most)
    if excess <= 0:
        return most
    low, lack = 0.0, tokens_per_us * step_us(0.0)
    last = 0
    while high - low > _PRECISION * high:
        middle = low + (high - low) * lack / (lack + excess)
        over = middle - tokens_per_us * step_us(middle)
        if abs(over) <= _PRECISION * middle:
            return middle
        if over > 0:
            high, excess, lack, last = middle, over, lack / 2 if last > 0 else lack, 1
        else:
            low, lack, excess, last = middle, -over, excess / 2 if last < 0 else excess, -1
    return high


@dataclass(frozen=True, eq=False)
class InstanceLoads:
    """Requests in flight by instance. With `any` dispatch all instances have as many, else each has its adapters'."""

    workload: Workload
    instances: int
    model: StepModel
    dispatch: Dispatch

    @cached_property
    def hottest(self) -> float:
        """Requests in flight of the busiest instance over the mean, were adapters assigned to instances."""
        return float(self._loads.max()) * self.instances

    @cached_property
    def busiest_model(self) -> StepModel:
        """Model of the busiest instance, which has its own adapters only."""
        if self.dispatch == "any" or self.instances == 1:
            return self.model
        own = _owners(self.workload, self.instances) == int(np.argmax(self._loads))
        in_flight = self.workload.in_flight[own]
        return replace(self.model, popularity=in_flight / in_flight.sum())

    @cached_property
    def _loads(self) -> Floats:
        owners = _owners(self.workload, self.instances)
        loads: Floats = np.bincount(owners, weights=self.workload.in_flight).astype(float)
        return loads


@dataclass(frozen=True, eq=False)
class AdapterCache:
    """The server's slots for adapters: how many are needed for LB = `global_batch`, and how many a layout has."""

    workload: Workload
    model: StepModel
    global_batch: float
    iar_target: float

    @cached_property
    def curve(self) -> Floats:
        """`offered` for M = 0..N."""
        return _curve(self.workload, self.global_batch)

    @cached_property
    def min_cache_slots(self) -> int:
        """The smallest M >= 1 that reaches the target by `offered`."""
        return max(int(np.argmax(self.curve >= self.iar_target)), 1)

    def iar(self, cache_slots: int) -> float:
        """Compute `offered` at a layout's slots; slots beyond the number of adapters are ignored."""
        return float(self.curve[min(cache_slots, self.workload.num_adapters)])

    def adapter_bytes(self, layout: Layout) -> int:
        """Return the bytes of a slot on the fullest shard."""
        model = self.model
        return memory.fullest_shard_bytes(model.spec, layout, model.lora_rank, model.shared_a)

    def slots(self, layout: Layout) -> int:
        """Return M, the number of adapters that a layout holds."""
        model = self.model
        return memory.cache_slots(model.spec, layout, model.cluster, model.lora_rank, model.shared_a)


def slowest_us(model: StepModel, batch: float, layout: Layout, busy_us: float, engines: int) -> float:
    """Compute a decode step of one of so many instances on a server that is busy with each layer for `busy_us`."""
    return max(model.step_us(batch, layout, engines=engines), model.spec.layers * busy_us)


@dataclass(frozen=True, eq=False)
class LayoutSteps:
    """The steps of a load on each layout: of an instance with `batch` requests, and of the one with `busiest`.

    `alike`: the busiest has the mean load and all adapters.
    """

    model: StepModel
    busiest_model: StepModel
    batch: float
    busiest: float
    instances: int
    eq6: Eq6
    alike: bool

    def lora(self, layout: Layout) -> Latency:
        """Compute one layer's LoRA step of the busiest instance; cached by ep, since pp has no part in it."""
        if layout.ep not in self._latencies:
            self._latencies[layout.ep] = self.busiest_model.lora(self.busiest, layout, self.instances)
        return self._latencies[layout.ep]

    @cached_property
    def _latencies(self) -> dict[int, Latency]:
        return {}

    def served(self, layout: Layout) -> Latency:
        """Compute the terms of Eq. 6: one layer's LoRA step of the busiest instance, with its share of prompts."""
        known = None if self.busiest_model.profile.points else self.lora(layout)
        return self.busiest_model.served(self.busiest, layout, known)

    def busy_us(self, layout: Layout) -> float:
        """Compute the left side of Eq. 6 for equally busy instances: no other split of the load takes longer."""
        latency = self.served(layout) if self.alike else self.model.served(self.batch, layout)
        return served_us(latency, layout, self.model.spec.layers, self.instances, self.eq6)

    def us(self, layout: Layout) -> float:
        """Compute the decode step of the busiest instance."""
        return slowest_us(self.busiest_model, self.busiest, layout, self.busy_us(layout), self.instances)

    def mean_us(self, layout: Layout) -> float:
        """Compute the step of an instance with B requests."""
        return self.model.step_us(self.batch, layout, self.instances, self.eq6)

    def decode_us(self, layout: Layout) -> float:
        """Compute the decode step of an instance with B requests, between prompts."""
        return self.model.without_prompts().step_us(self.batch, layout, self.instances, self.eq6)
