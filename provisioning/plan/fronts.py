"""Cost of a rate for each way to serve: the fewest GPUs that meet the SLOs, by the model.

coupled         no LoRA Server: instances with their own caches, whose share of the memory is searched, and a router
disaggregated   instances beside a LoRA Server, both sought together
8-bit wire      the same with half the bytes on the links
hot-merged      the hottest adapters merged into instances of their own, the others disaggregated (or coupled)
merged base     disaggregated, with the hottest adapter in the base weights of every instance (lora-server merge)

A batch follows from rate, step and instances. Sizes of an instance are tried where several are given; nothing is
charged for what the GPUs of one exchange, so large ones look better than they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from provisioning.arrays import Ints
from provisioning.model.latency import StepModel
from provisioning.plan.choice import smallest
from provisioning.plan.coupled import coupled
from provisioning.plan.instances import base_instances, sized
from provisioning.plan.question import Scenario

_MOST_COUPLED = 256  # instances
_MERGED = (1, 2, 4, 8, 16)
_LEAST = 1e-3  # of the rate that was asked for, or its inverse


@dataclass(frozen=True, kw_only=True)
class Point:
    """`gpus` in all; `batch` of the mean instance of the larger group; `how` in words."""

    rate: float
    gpus: int
    instances: int
    instance_gpus: int
    batch: float
    how: str


Serve = Callable[[Scenario], Point | None]


def at_sizes(serve: Serve, scenario: Scenario, sizes: Sequence[int]) -> Point | None:
    """Find the cheapest over all sizes of an instance; None if no size serves the load."""
    found = (serve(replace(scenario, model=replace(scenario.model, instance_gpus=size))) for size in sizes)
    return min((point for point in found if point), key=lambda point: point.gpus, default=None)


def disaggregated(scenario: Scenario) -> Point | None:
    """Size instances with a LoRA Server."""
    chosen = smallest(sized(scenario)).chosen
    if chosen is None:
        return None
    settled = chosen.scenario
    return Point(
        rate=scenario.request_rate or 0.0,
        gpus=chosen.all_gpus,
        instances=settled.instances,
        instance_gpus=settled.model.instance_gpus,
        batch=settled.batch,
        how=f"{settled.instances:,} x {settled.model.instance_gpus:,} + {chosen.layout}, {chosen.slots:,} slots",
    )


def narrow_wire(scenario: Scenario) -> Point | None:
    """Size the LoRA Server with 8-bit rows (--wire e4m3)."""
    return disaggregated(replace(scenario, model=replace(scenario.model, wire="e4m3")))


def apart(scenario: Scenario) -> Point | None:
    """Size coupled instances: find the fewest by doubling and bisection."""
    low, high = 0, max(base_instances(scenario), 1)
    while not coupled(scenario, high).holds:
        if high >= _MOST_COUPLED:
            return None
        low, high = high, min(2 * high, _MOST_COUPLED)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if coupled(scenario, middle).holds else (middle, high)
    found = coupled(scenario, high)
    return Point(
        rate=scenario.request_rate or 0.0,
        gpus=found.gpus,
        instances=high,
        instance_gpus=scenario.model.instance_gpus,
        batch=found.scenario.global_batch / high,
        how=f"{high:,} x {scenario.model.instance_gpus:,}, {found.split.slots:,} slots each",
    )


def hot_merged(scenario: Scenario) -> Point | None:
    """Merge as many of the hottest adapters as gives the fewest GPUs; at least one."""
    best: Point | None = None
    for num in (num for num in _MERGED if num < scenario.workload.num_adapters):
        if best and num * scenario.model.instance_gpus >= best.gpus:
            break
        found = _merged(scenario, num)
        if found and (best is None or found.gpus < best.gpus):
            best = found
    return best


def _merged(scenario: Scenario, num: int) -> Point | None:
    order = np.argsort(-scenario.workload.in_flight, kind="stable")
    own = [base_instances(_part(scenario, order[place : place + 1])) for place in range(num)]
    others = _part(scenario, order[num:])
    found = [point for point in (disaggregated(others), apart(others)) if point]
    if not found:
        return None
    rest = min(found, key=lambda point: point.gpus)
    each = scenario.model.instance_gpus
    return replace(
        rest,
        rate=scenario.request_rate or 0.0,
        gpus=rest.gpus + sum(own) * each,
        instances=rest.instances + sum(own),
        how=f"{num:,} merged on {sum(own):,} x {each:,}; others {rest.how}",
    )


def merged_base(scenario: Scenario) -> Point | None:
    """Size instances with the hottest adapter in their base weights, with a LoRA Server for all others.

    A share h of the rows stays in the engine. Any other row travels once and has two entries.
    """
    return disaggregated(replace(scenario, model=with_merged(scenario.model)))


class MergeCost(NamedTuple):
    """What the server's compute and its links carry with a merged base, as a multiple of what they do without."""

    compute: float
    wire: float


def merge_cost(hottest: float, base: float = 0.0) -> MergeCost:
    """Return the cost of a merged base, by the shares of all rows that are the hottest adapter's and the base model's.

    A row of another adapter has two entries and travels once; one of the base model has one entry and travels, too.
    """
    return MergeCost((2.0 - base - 2.0 * hottest) / (1.0 - base), (1.0 - hottest) / (1.0 - base))


def with_merged(model: StepModel) -> StepModel:
    """Return the model of instances with the hottest adapter in their base weights."""
    popularity, hottest = model.popularity.copy(), int(np.argmax(model.popularity))
    share = float(popularity[hottest])
    popularity[hottest] = 1.0 - share
    return replace(model, popularity=popularity, merged_share=share)


def _part(scenario: Scenario, index: Ints) -> Scenario:
    """Return the question for the calls of some adapters alone, at their share of the rate."""
    workload = scenario.workload
    share = float(workload.popularity[index].sum())
    popularity = workload.popularity[index] / share
    tokens = None if workload.tokens is None else workload.tokens[index]
    mean = workload.lengths.mean_tokens if tokens is None else max(float(popularity @ tokens), 1.0)
    part = replace(
        workload,
        popularity=popularity,
        tokens=tokens,
        lengths=replace(workload.lengths, mean_tokens=mean, observed=()),
        names=(),
        trace=None,
        generate=None,
    )
    rate = (scenario.request_rate or 0.0) * share
    return replace(
        scenario.of(part),
        request_rate=rate,
        global_batch=rate * mean * scenario.slo.tpot_us * 1e-6,
    )


def front(line: str, scenario: Scenario, factors: Sequence[float], sizes: Sequence[int]) -> list[Point | None]:
    """Size each rate; where a higher rate takes fewer GPUs, its size serves the lower one, too."""
    found = [at_sizes(LINES[line], scenario.scaled(factor), sizes) for factor in factors]
    for place in reversed(range(len(found) - 1)):
        here, more = found[place], found[place + 1]
        if more and (here is None or more.gpus < here.gpus):
            found[place] = replace(more, rate=(scenario.request_rate or 0.0) * factors[place])
    return found


def within(line: str, scenario: Scenario, budget: int, sizes: Sequence[int]) -> Point | None:
    """Find the highest rate, to 2 %, that `budget` GPUs serve."""

    def fits(factor: float) -> Point | None:
        point = at_sizes(LINES[line], scenario.scaled(factor), sizes)
        return point if point and point.gpus <= budget else None

    low, best = 1.0, fits(1.0)
    while best is None and low > _LEAST:
        low /= 4
        best = fits(low)
    if best is None:
        return None
    high = 2 * low
    while high < 1 / _LEAST and (found := fits(high)):
        low, high, best = high, 2 * high, found
    while high / low > 1.02:
        middle = (low * high) ** 0.5
        found = fits(middle)
        low, high, best = (middle, high, found) if found else (low, middle, best)
    return best


LINES: dict[str, Serve] = {
    "coupled": apart,
    "disaggregated": disaggregated,
    "8-bit wire": narrow_wire,
    "hot-merged": hot_merged,
    "merged base": merged_base,
}
