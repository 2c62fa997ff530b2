"""Memory split of a coupled instance: free memory for adapters and for KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from provisioning.arrays import Floats, Ints
from provisioning.iar.models import offered_curve
from provisioning.model import memory
from provisioning.plan.question import Scenario
from provisioning.plan.scenario import MOST_GPUS
from provisioning.simulation.run import assign_greedily
from provisioning.workload.workload import Workload

_MOST_SPLITS = 200
_Curves = tuple[Floats, Floats, list[Floats]]


@dataclass(frozen=True, kw_only=True)
class Split:
    """Adapters and requests that an instance has room for; `admitted` is the share that the model admits at once."""

    share: float
    slots: int
    requests: int
    iar: float
    admitted: float


def splits(scenario: Scenario, instances: int) -> list[Split]:
    """List the split that was asked for, or all splits that differ by an adapter, the best first."""
    model, free = scenario.model, scenario.model.free_bytes
    adapter = memory.adapter_bytes(model.spec, model.lora_rank, model.shared_a)
    if scenario.coupled_split is not None:
        shares = [scenario.coupled_split]
    else:
        most = min(
            memory.adapters_in(free, model.spec, model.lora_rank, model.shared_a), scenario.workload.num_adapters
        )
        tried = np.unique(np.linspace(1, most, min(most, _MOST_SPLITS), dtype=int))
        shares = [min((int(slots) * adapter + 1) / free, 1.0) for slots in tried]
    found = [_split(scenario, instances, share) for share in shares]
    return sorted(found, key=lambda item: (-item.admitted, item.slots)) or [_split(scenario, instances, 0.0)]


def _split(scenario: Scenario, instances: int, share: float) -> Split:
    """Evaluate a split. A request is admitted if its adapter has a slot and there is room beside a Poisson number of
    requests: those of its own instance, or, behind a LoRA-aware router, of all instances together."""
    from scipy.special import pdtr  # slow to import, and of no use in an infeasible question

    model, free = scenario.model, scenario.model.free_bytes
    slots = memory.adapters_in(share * free, model.spec, model.lora_rank, model.shared_a)
    requests = memory.requests_in((1 - share) * free, model.spec, model.context_tokens)
    pooled = instances if scenario.coupled_routed else 1
    weights, loads, curves = (_pooled if pooled > 1 else _curves)(scenario.workload, instances, scenario.global_batch)
    iar_L = np.array([curve[min(pooled * slots, curve.size - 1)] for curve in curves])
    room_L = pdtr(pooled * requests - 1, loads) if requests else np.zeros_like(loads)
    return Split(
        share=share,
        slots=slots,
        requests=requests,
        iar=float(weights @ iar_L),
        admitted=float(weights @ (iar_L * room_L)),
    )


def copies(workload: Workload, instances: int) -> Ints:
    """Return in how many instances a router keeps each adapter: one per instance's share of the load that it has."""
    return np.maximum(np.ceil(workload.in_flight * min(instances, MOST_GPUS) - 1e-9), 1).astype(np.int64)


@lru_cache(maxsize=8)
def _pooled(workload: Workload, instances: int, global_batch: float) -> _Curves:
    """Return the same of all instances as one, whose slots hold every copy of an adapter."""
    copies_N = copies(workload, instances)
    popularity, in_flight = np.repeat([workload.popularity / copies_N, workload.in_flight / copies_N], copies_N, axis=1)
    return np.ones(1), np.array([global_batch]), [offered_curve(popularity, global_batch, in_flight)]


@lru_cache(maxsize=8)
def _curves(workload: Workload, instances: int, global_batch: float) -> _Curves:
    """Return of each instance with calls: its share of them, its requests in flight, `offered` of its own adapters."""
    owner = assign_greedily(workload.in_flight, instances)
    shares, loads, curves = [], [], []
    for instance in np.unique(owner):
        own, in_flight = workload.popularity[owner == instance], workload.in_flight[owner == instance]
        share = float(own.sum())
        if share > 0:
            shares.append(share)
            loads.append(global_batch * float(in_flight.sum()))
            curves.append(offered_curve(own / share, global_batch, in_flight))
    return np.array(shares), np.array(loads), curves
