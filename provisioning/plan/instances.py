"""Number of LLM instances for a rate: the one with the fewest GPUs in total, the LoRA Server's included.

More instances than the base model alone needs can pay: with fewer requests each, their steps are shorter, fewer
requests are in flight and fewer adapters have to be there.
"""

from __future__ import annotations

import math
from dataclasses import replace

from provisioning.model import memory
from provisioning.plan.candidates import accepted
from provisioning.plan.question import Scenario

_MOST_TIMES = 8  # as many instances as the base model alone needs
_EACH = 16


def sized(scenario: Scenario) -> Scenario:
    """Settle the number of instances, unless it is given. Ties go to fewer instances."""
    if not scenario.free_instances:
        return scenario
    fewest = base_instances(scenario)
    first = _first_accepted(scenario, fewest)
    if first is None:
        return replace(scenario, instances=fewest)
    each, best = scenario.model.instance_gpus, first
    total = first * each + _server(scenario, first)
    for instances in range(first + 1, (total - 1) // each + 1):
        left = total - 1 - instances * each
        gpus = _server(replace(scenario, max_gpus=min(left + scenario.spare_gpus, scenario.max_gpus)), instances)
        if gpus:
            best, total = instances, instances * each + gpus
    return replace(scenario, instances=best)


def base_instances(scenario: Scenario) -> int:
    """Return the instances that the base model alone needs: the rate over an instance's at its largest batch."""
    model, tpot_us = scenario.model, scenario.slo.tpot_us
    high = max(min(scenario.kv_requests, scenario.most_batch, scenario.tokens_per_us * tpot_us), 1e-9)
    low = 0.0
    if model.base_step_us(high) > tpot_us:
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if model.base_step_us(middle) <= tpot_us else (low, middle)
        high = max(low, 1e-9)
    needed = scenario.tokens_per_us * model.base_step_us(high) / high
    return max(math.ceil(needed * (1 - 1e-9)), 1)


def _first_accepted(scenario: Scenario, fewest: int) -> int | None:
    """Find, by doubling and bisection, the first number of instances with which there is a plan.

    More instances are less loaded but share the server, so the numbers that have a plan are a span, which doubling may
    step over: where it finds none, each of the first numbers is tried.
    """
    low, high = fewest - 1, fewest
    while not _server(scenario, high):
        if high >= _MOST_TIMES * fewest:
            few = range(fewest, min(_MOST_TIMES * fewest, _EACH) + 1)
            return next((number for number in few if _server(scenario, number)), None)
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _server(scenario, middle) else (middle, high)
    return high


def _server(scenario: Scenario, instances: int) -> int:
    """Return the fewest GPUs of a LoRA Server for so many instances, all replicas; 0 if no server serves them."""
    asked = replace(scenario, instances=instances)
    for gpus in asked.gpu_counts:
        if any(accepted(asked, layout) for layout in memory.layouts(asked.model.spec, gpus, asked.model.profile)):
            return gpus * asked.replicas
    return 0
