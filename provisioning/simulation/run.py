"""Discrete events: decode instances with continuous batching, over coupled or shared LoRA caches.

Rules (the paper's sections 2.2 and 6.1; what it leaves open is decided here, before any result):

1. A request goes to the instance with the fewest requests or, where adapters belong to instances, to
   its adapter's; coupled instances have a router that knows their caches (`router`). It is admitted at once
   if that instance's batch has room and its adapter is resident or can take a free or idle slot; idle
   adapters go in LRU order.
2. Else it waits: for room in the instance's queue, or for a slot in the cache's queue, where the
   requests of one adapter wait together. Others overtake it if they can be admitted (as in vLLM).
   Queues are FCFS, or by true output length (oracle SJF).
3. It joins at the next step of its instance, after what the load of its adapter leaves visible:
   all of it in a coupled engine, in the disaggregated one what prefetch and layer-wise loading leave.
4. A step takes `step_s[batch]`. TTFT = queueing + load + first decode step; prefill is not in it. But where the same
   instances compute prompts, all of an instance's requests wait for `prompt_s` when one joins.
5. A slot is held from admission to the last token, and an adapter is evicted only when unused.

Each instance keeps a clock in tokens, which runs at 1 / step_s[batch] and stands during prompts; so an event costs
O(log n).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from provisioning.arrays import Floats, Ints
from provisioning.inputs import InputError, count
from provisioning.simulation.router import LoraRouter
from provisioning.simulation.state import AdapterState, DecodeInstance, SlotCache
from provisioning.workload.requests import Requests

Order = Literal["fcfs", "sjf"]
_ROUNDING = 1e-14  # of the steps so far, which a clock in seconds loses: without it a long run stops moving


@dataclass(frozen=True, kw_only=True)
class System:
    """Simulated system. `cache_slots` is per cache: one shared by all, or one per instance.

    `instance_of` is by adapter; None where any of `instances` serves any adapter: from a shared cache, or each from its
    own behind a router that knows them. A request's prompt takes `prompt_s` of its instance, where the calls have
    prompts of their own in proportion to these.
    """

    step_s: Sequence[float]
    cache_slots: int
    instance_of: Sequence[int] | Ints | None = None
    instances: int = 1
    shared: bool = True
    max_batch: int | None = None
    load_s: float = 0.0
    prompt_s: float = 0.0
    order: Order = "fcfs"


class RequestLists:
    """The requests, as plain lists. `key` orders queues."""

    def __init__(self, requests: Requests, system: System) -> None:
        self.arrival, self.adapter = requests.arrival_s.tolist(), requests.adapter.tolist()
        self.tokens = requests.output_tokens.tolist()
        self.key = list(range(len(requests))) if system.order == "fcfs" else self.tokens
        given, mean_s = requests.input_tokens, system.prompt_s
        self.prompt_s: list[float] = [mean_s] * len(requests)
        if given is not None and mean_s and given.any():
            self.prompt_s = (given * (mean_s / given.mean())).tolist()


class Moments:
    """Moments of each request, in seconds; NaN for one that was never admitted."""

    def __init__(self, num: int) -> None:
        self.admit, self.first, self.finish = [math.nan] * num, [math.nan] * num, [math.nan] * num
        self.immediate = [False] * num


class Engine:
    """State of one run. Plain lists: a million requests go through it."""

    def __init__(self, requests: Requests, system: System) -> None:
        num, adapters = len(requests), requests.num_adapters
        given = None if system.instance_of is None else [int(one) for one in system.instance_of]
        owners: Sequence[int | None] = [None] * adapters if given is None else given
        instances = system.instances if given is None else max(given) + 1
        caches = [SlotCache(system.cache_slots) for _ in range(1 if system.shared else instances)]
        own = caches * instances if system.shared else caches
        self.calls, self.moments = RequestLists(requests, system), Moments(num)
        self.adapters = [AdapterState(own[one or 0], one, adapter) for adapter, one in enumerate(owners)]
        self.chosen = list[AdapterState]()  # of each request that came
        self.steps, self.load_s = list(system.step_s), system.load_s
        self.max_batch = system.max_batch if system.max_batch is not None else num + 1
        self.instances = [DecodeInstance(self.steps[0]) for _ in range(instances)]
        routed = given is None and not system.shared
        self.router = LoraRouter(self.instances, caches, self.max_batch) if routed else None
        anywhere = range(instances) if given is None else ()
        self.least = [(0, instance) for instance in anywhere]  # (load, instance); stale entries stay
        self.events = list[tuple[float, int, int]]()  # (time, instance, its version)

    def play(self) -> None:
        """Play all arrivals, then finish the rest."""
        for request, now in enumerate(self.calls.arrival):
            self._complete_until(now)
            self._arrive(request, now)
        self._complete_until(math.inf)

    def _complete_until(self, end: float) -> None:
        events, instances = self.events, self.instances
        while events and events[0][0] <= end:
            at, instance, issued = heappop(events)
            if issued == instances[instance].version:
                self._complete(instance, at)

    def _arrive(self, request: int, now: float) -> None:
        adapter = self._state_for(self.calls.adapter[request])
        self.chosen.append(adapter)
        instance = self._instance_for(adapter)
        if len(self.instances[instance].batch) >= self.max_batch:
            self._queue(request, instance)
        elif self._admit(request, adapter, instance, now):
            self.moments.immediate[request] = True
            self._reschedule(instance)
        else:
            self._block(request, adapter)

    def _instance_for(self, adapter: AdapterState) -> int:
        """Choose the adapter's own instance, or the one with the fewest requests."""
        return self._least_loaded() if adapter.owner is None else adapter.owner

    def _state_for(self, adapter: int) -> AdapterState:
        return self.adapters[adapter] if self.router is None else self.router.choose(adapter, self._least_loaded())

    def _least_loaded(self) -> int:
        least, instances = self.least, self.instances
        while least[0][0] != instances[least[0][1]].load:
            heappop(least)
        return least[0][1]

    def _changed(self, instance: int) -> None:
        if self.least:
            heappush(self.least, (self.instances[instance].load, instance))

    def _queue(self, request: int, instance: int) -> None:
        heappush(self.instances[instance].queue, (self.calls.key[request], request))
        self._changed(instance)

    def _admit(self, request: int, adapter: AdapterState, instance: int, now: float) -> bool:
        """Take a slot and join the batch, or change nothing."""
        was_resident = adapter.hold()
        if was_resident is None:
            return False
        self._join(request, instance, now, 0.0 if was_resident else self.load_s)
        return True

    def _join(self, request: int, instance: int, now: float, load_s: float) -> None:
        its, moments = self.instances[instance], self.moments
        clock, ready = its.advance(now)
        its.clock, its.seen = clock, ready + self.calls.prompt_s[request]
        pace = its.pace = self._pace(len(its.batch) + 1)
        start = math.ceil(clock + load_s / pace - 1e-9)
        heappush(its.batch, (start + self.calls.tokens[request], request))
        moments.admit[request] = now
        moments.first[request] = ready + (start + 1 - clock) * pace  # without its own prompt
        self._changed(instance)

    def _pace(self, batch: int) -> float:
        return self.steps[min(batch, len(self.steps) - 1)]

    def _block(self, request: int, adapter: AdapterState) -> None:
        key = self.calls.key[request]
        if not adapter.blocked or key < adapter.blocked[0][0]:
            heappush(adapter.cache.waiting, (key, adapter.adapter, adapter))
        heappush(adapter.blocked, (key, request))

    def _complete(self, instance: int, now: float) -> None:
        """Finish the requests that are due; then admit those that wait for a slot or for a place in the batch."""
        its = self.instances[instance]
        its.clock, its.seen = clock, _ = its.advance(now)
        due = clock + 1e-6 + _ROUNDING * now / its.pace
        freed: SlotCache | None = None
        while its.batch and its.batch[0][0] <= due:
            request = heappop(its.batch)[1]
            self.moments.finish[request] = now
            adapter = self.chosen[request]
            adapter.release()
            freed = adapter.cache
        its.pace = self._pace(len(its.batch))
        self._changed(instance)
        touched = self._grant_slots(freed, now) if freed and freed.waiting else set()
        touched.add(instance)
        self._fill(instance, now)
        for other in touched:
            self._reschedule(other)

    def _grant_slots(self, cache: SlotCache, now: float) -> set[int]:
        """Give slots to the adapters that wait longest (or are shortest), if their batch has room."""
        touched = set()
        while cache.waiting and (cache.free or cache.idle):
            adapter = heappop(cache.waiting)[2]
            while adapter.blocked:
                request, instance = heappop(adapter.blocked)[1], self._instance_for(adapter)
                if len(self.instances[instance].batch) < self.max_batch:
                    self._admit(request, adapter, instance, now)
                else:
                    self._queue(request, instance)
                touched.add(instance)
        return touched

    def _fill(self, instance: int, now: float) -> None:
        its = self.instances[instance]
        while its.queue and len(its.batch) < self.max_batch:
            request = heappop(its.queue)[1]
            adapter = self.chosen[request]
            if not self._admit(request, adapter, instance, now):
                self._block(request, adapter)
                self._changed(instance)

    def _reschedule(self, instance: int) -> None:
        """Schedule the instance's first completion; older entries are void."""
        its = self.instances[instance]
        its.version += 1
        if its.batch:
            ahead = its.batch[0][0] - its.clock
            at = its.seen + max(ahead, 0.0) * its.pace
            heappush(self.events, (at, instance, its.version))


@dataclass(frozen=True, eq=False)
class SimulationResult:
    """The times of each request in seconds, in order of arrival; NaN for requests that were never admitted."""

    requests: Requests
    admit_s: Floats
    first_token_s: Floats
    finish_s: Floats
    immediate: NDArray[np.bool_]

    @classmethod
    def of(cls, requests: Requests, moments: Moments) -> SimulationResult:
        """Make the result of a run."""
        admit, first, finish = (np.array(one) for one in (moments.admit, moments.first, moments.finish))
        return cls(requests, admit, first, finish, np.array(moments.immediate, dtype=bool))

    @property
    def ttft_s(self) -> Floats:
        """Queueing + load + first decode step."""
        ttft_s: Floats = self.first_token_s - self.requests.arrival_s
        return ttft_s


def assign_greedily(popularity: Floats, instances: int) -> Ints:
    """Assign adapters to instances: the busiest adapter first, each to the least loaded instance (section 6.1)."""
    used = min(count(instances, "instances", 1), popularity.size)  # the others would get none
    loads = [(0.0, instance) for instance in range(used)]
    owner = np.zeros(popularity.size, dtype=np.int64)
    for index in np.argsort(-popularity, kind="stable"):
        load, instance = heappop(loads)
        owner[index] = instance
        heappush(loads, (load + float(popularity[index]), instance))
    return owner


def run(requests: Requests, system: System) -> SimulationResult:
    """Play the requests through the system, to the last token."""
    if system.instance_of is not None and len(system.instance_of) != requests.num_adapters:
        raise InputError(
            f"instance_of: got {len(system.instance_of)} entries, expected {requests.num_adapters} adapters"
        )
    engine = Engine(requests, system)
    engine.play()
    return SimulationResult.of(requests, engine.moments)
