"""The event loop of `run`, whose file states the rules."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Literal

from provisioning.arrays import Ints
from provisioning.workload.requests import Requests

_ROUNDING = 1e-14  # of the steps so far, which a clock in seconds loses: without it a long run stops moving


@dataclass(frozen=True, kw_only=True)
class System:
    """What is simulated. `cache_slots` is per cache: one shared by all, or one per instance.

    `instance_of` is by adapter; None where any of `instances` serves any adapter, from a shared cache.
    """

    step_s: Sequence[float]
    cache_slots: int
    instance_of: Sequence[int] | Ints | None = None
    instances: int = 1
    shared: bool = True
    max_batch: int | None = None
    load_s: float = 0.0
    order: Literal["fcfs", "sjf"] = "fcfs"


class Engine:
    """State of one run. Plain lists: a million requests go through it."""

    def __init__(self, requests: Requests, system: System) -> None:
        num, adapters = len(requests), requests.num_adapters
        self.owner = None if system.instance_of is None else [int(instance) for instance in system.instance_of]
        instances = system.instances if self.owner is None else max(self.owner) + 1
        self.arrival, self.adapter = requests.arrival_s.tolist(), requests.adapter.tolist()
        self.tokens = requests.output_tokens.tolist()
        self.key = list(range(num)) if system.order == "fcfs" else self.tokens
        self.cache_of = [0] * adapters if system.shared or self.owner is None else self.owner
        caches = 1 if system.shared else instances
        self.steps, self.last_step = list(system.step_s), len(system.step_s) - 1
        self.max_batch = system.max_batch if system.max_batch is not None else num + 1
        self.load_s, self.free = system.load_s, [system.cache_slots] * caches
        self.idle: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(caches)]
        self.slot_queue: list[list[tuple[int, int]]] = [[] for _ in range(caches)]
        self.resident, self.users = [False] * adapters, [0] * adapters
        self.blocked: list[list[tuple[int, int]]] = [[] for _ in range(adapters)]
        self.batch: list[list[tuple[float, int]]] = [[] for _ in range(instances)]
        self.batch_queue: list[list[tuple[int, int]]] = [[] for _ in range(instances)]
        self.least = [(0, instance) for instance in range(instances)]  # (load, instance); what is out of date is left
        self.clock, self.seen = [0.0] * instances, [0.0] * instances
        self.pace = [self.steps[0]] * instances
        self.version, self.events = [0] * instances, list[tuple[float, int, int]]()
        self.admit, self.first, self.finish = [math.nan] * num, [math.nan] * num, [math.nan] * num
        self.immediate = [False] * num

    def play(self) -> None:
        """All arrivals, then what is left to finish."""
        events, version = self.events, self.version
        for request, now in enumerate(self.arrival):
            while events and events[0][0] <= now:
                at, instance, issued = heappop(events)
                if issued == version[instance]:
                    self._complete(instance, at)
            self._arrive(request, now)
        while events:
            at, instance, issued = heappop(events)
            if issued == version[instance]:
                self._complete(instance, at)

    def _arrive(self, request: int, now: float) -> None:
        adapter = self.adapter[request]
        instance = self._instance_for(adapter)
        if len(self.batch[instance]) >= self.max_batch:
            self._queue(request, instance)
        elif self._admit(request, adapter, instance, now):
            self.immediate[request] = True
            self._reschedule(instance)
        else:
            self._block(request, adapter)

    def _instance_for(self, adapter: int) -> int:
        """The adapter's own, or that with the fewest requests."""
        if self.owner is not None:
            return self.owner[adapter]
        while self.least[0][0] != self._load(self.least[0][1]):
            heappop(self.least)
        return self.least[0][1]

    def _load(self, instance: int) -> int:
        return len(self.batch[instance]) + len(self.batch_queue[instance])

    def _changed(self, instance: int) -> None:
        if self.owner is None:
            heappush(self.least, (self._load(instance), instance))

    def _queue(self, request: int, instance: int) -> None:
        heappush(self.batch_queue[instance], (self.key[request], request))
        self._changed(instance)

    def _admit(self, request: int, adapter: int, instance: int, now: float) -> bool:
        """Takes a slot and joins the batch, or changes nothing."""
        load_s = 0.0
        if self.resident[adapter]:
            if not self.users[adapter]:
                del self.idle[self.cache_of[adapter]][adapter]
        else:
            cache = self.cache_of[adapter]
            if self.free[cache]:
                self.free[cache] -= 1
            elif self.idle[cache]:
                self.resident[self.idle[cache].popitem(last=False)[0]] = False
            else:
                return False
            self.resident[adapter], load_s = True, self.load_s
        self.users[adapter] += 1
        self._join(request, instance, now, load_s)
        return True

    def _join(self, request: int, instance: int, now: float, load_s: float) -> None:
        batch = self.batch[instance]
        clock = self.clock[instance] + (now - self.seen[instance]) / self.pace[instance] if batch else 0.0
        self.clock[instance], self.seen[instance] = clock, now
        pace = self.pace[instance] = self.steps[min(len(batch) + 1, self.last_step)]
        start = math.ceil(clock + load_s / pace - 1e-9)
        heappush(batch, (start + self.tokens[request], request))
        self.admit[request] = now
        self.first[request] = now + (start + 1 - clock) * pace
        self._changed(instance)

    def _block(self, request: int, adapter: int) -> None:
        waiting = self.blocked[adapter]
        key = self.key[request]
        if not waiting or key < waiting[0][0]:
            heappush(self.slot_queue[self.cache_of[adapter]], (key, adapter))
        heappush(waiting, (key, request))

    def _complete(self, instance: int, now: float) -> None:
        """All tokens that are due; then whoever waits for a slot or for room in the batch."""
        batch = self.batch[instance]
        clock = self.clock[instance] + (now - self.seen[instance]) / self.pace[instance]
        self.clock[instance], self.seen[instance] = clock, now
        due, cache = clock + 1e-6 + _ROUNDING * now / self.pace[instance], 0
        while batch and batch[0][0] <= due:
            request = heappop(batch)[1]
            self.finish[request] = now
            adapter = self.adapter[request]
            self.users[adapter] -= 1
            if not self.users[adapter]:
                self.idle[self.cache_of[adapter]][adapter] = None
            cache = self.cache_of[adapter]
        self.pace[instance] = self.steps[min(len(batch), self.last_step)]
        self._changed(instance)
        touched = self._grant_slots(cache, now) if self.slot_queue[cache] else set()
        touched.add(instance)
        self._fill(instance, now)
        for other in touched:
            self._reschedule(other)

    def _grant_slots(self, cache: int, now: float) -> set[int]:
        """Slots to the adapters that wait longest (or are shortest), if their batch has room."""
        touched, queue = set(), self.slot_queue[cache]
        while queue and (self.free[cache] or self.idle[cache]):
            adapter = heappop(queue)[1]
            waiting = self.blocked[adapter]
            while waiting:
                request, instance = heappop(waiting)[1], self._instance_for(adapter)
                if len(self.batch[instance]) < self.max_batch:
                    self._admit(request, adapter, instance, now)
                else:
                    self._queue(request, instance)
                touched.add(instance)
        return touched

    def _fill(self, instance: int, now: float) -> None:
        queue, batch = self.batch_queue[instance], self.batch[instance]
        while queue and len(batch) < self.max_batch:
            request = heappop(queue)[1]
            adapter = self.adapter[request]
            if not self._admit(request, adapter, instance, now):
                self._block(request, adapter)
                self._changed(instance)

    def _reschedule(self, instance: int) -> None:
        """The instance's next event is its first completion; older entries are void."""
        batch = self.batch[instance]
        self.version[instance] += 1
        if batch:
            ahead = batch[0][0] - self.clock[instance]
            at = self.seen[instance] + max(ahead, 0.0) * self.pace[instance]
            heappush(self.events, (at, instance, self.version[instance]))
