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

from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from provisioning.arrays import Floats, Ints
from provisioning.inputs import InputError, count
from provisioning.simulation.engine import Engine, System
from provisioning.workload.requests import Requests

__all__ = ["SimulationResult", "System", "assign_greedily", "run"]


@dataclass(frozen=True, eq=False)
class SimulationResult:
    """The times of each request in seconds, in order of arrival; NaN for requests that were never admitted."""

    requests: Requests
    admit_s: Floats
    first_token_s: Floats
    finish_s: Floats
    immediate: NDArray[np.bool_]

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
    found = engine.moments
    admit, first, finish = (np.array(one) for one in (found.admit, found.first, found.finish))
    return SimulationResult(requests, admit, first, finish, np.array(found.immediate, dtype=bool))
