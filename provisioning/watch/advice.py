"""Measured beside planned, and the GPUs that what was measured asks for.

The load is taken as measured: requests in flight by Little's law, popularity and presence by adapter. Step times are
the model's; then, in a second answer, LoRA compute is longer or shorter by the factor that the shards measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from lora_server.placement import Layout
from provisioning.model.profile import Profile
from provisioning.plan.candidates import Candidate
from provisioning.plan.choice import LayoutChoice, smallest
from provisioning.plan.fronts import apart
from provisioning.plan.judge import silent
from provisioning.plan.question import Scenario
from provisioning.plan.verify import verify
from provisioning.watch.measured import Measured

_BATCHES = tuple(2.0**power for power in range(13))
_FEW_STEPS = 100


@dataclass(frozen=True, kw_only=True)
class Row:
    """A quantity; None where it was not measured, or is not planned."""

    what: str
    measured: float | None
    planned: float | None
    unit: str = ""

    @property
    def factor(self) -> float | None:
        """Measured over planned: what to correct the plan's assumption by."""
        if self.measured is None or not self.planned:
            return None
        return self.measured / self.planned


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The GPUs of a LoRA Server for a load, None where none do; and how that was found."""

    gpus: int | None
    layout: Layout | None
    all_gpus: int | None
    binding: str
    min_cache_slots: int
    coupled_gpus: int | None  # by the model


def compared(measured: Measured, candidate: Candidate | None) -> Iterator[Row]:
    """Compare what a plan assumes or promises with what was measured."""
    plan = None if candidate is None else candidate.scenario
    rate = in_flight = held_s = None
    if candidate is not None and plan is not None:
        rate = plan.rate(candidate.mean_step_us) / plan.workload.peak
        in_flight = plan.global_batch / plan.workload.peak
        held_s = plan.workload.lengths.mean_tokens * candidate.mean_step_us * 1e-6
    yield Row(what="requests/s", measured=_known(measured.rate), planned=rate)
    yield Row(what="requests in flight", measured=_known(measured.in_flight), planned=in_flight)
    yield Row(what="an adapter is held", measured=_known(measured.held_s), planned=held_s, unit="s")
    num = None if plan is None else plan.workload.num_adapters
    yield Row(what="adapters", measured=measured.registered, planned=num)
    yield Row(what="of these called", measured=len(measured.named), planned=None)
    hottest = max((calls for name, (calls, _) in measured.holds.items() if name in measured.named), default=0.0)
    most = None if plan is None else float(plan.workload.popularity.max())
    share = hottest / measured.requests if measured.requests else None
    yield Row(what="share of the hottest", measured=share, planned=most)
    promised = None if candidate is None else candidate.scenario.cache.iar(candidate.slots)
    yield Row(what="admitted at once", measured=_known(measured.immediate), planned=promised)
    yield Row(what="tokens/s, prompts too", measured=_tokens_per_s(measured, plan), planned=None)
    compute = None if candidate is None else candidate.latency.compute.value / 2
    yield Row(what="compute of a step", measured=_known(measured.per_step_us("compute")), planned=compute, unit="us")
    yield Row(what="wait of a step", measured=_known(measured.per_step_us("wait")), planned=None, unit="us")
    yield Row(what="steps that failed", measured=measured.shards["failed_steps"], planned=None)


def now(measured: Measured, plan: Candidate, seeds: int, say: Callable[[str], None] = silent) -> Advice:
    """Plan GPUs for the measured load; simulated if seeds > 0."""
    return _advised(at_load(plan.scenario, measured), seeds, say)


def corrected(measured: Measured, plan: Candidate) -> tuple[float, Advice] | None:
    """Return (the factor on compute, the GPUs by the model) if the shards served enough steps to tell."""
    row = next(row for row in compared(measured, plan) if row.what == "compute of a step")
    if row.factor is None or measured.shards["steps"] < _FEW_STEPS:
        return None
    scenario = at_load(plan.scenario, measured)
    model = replace(scenario.model, profile=_slower(scenario, row.factor))
    return row.factor, _advised(replace(scenario, model=model), 0)


def at_load(scenario: Scenario, measured: Measured) -> Scenario:
    """Return a plan's question for the load that was measured."""
    found = measured.workload(scenario.workload.lengths)
    return replace(
        scenario.of(found),
        global_batch=measured.in_flight,
        request_rate=None,
        settled=True,
        free_instances=False,
        busiest_batch=None,
        most_batch=math.inf,
    )


def _advised(scenario: Scenario, seeds: int, say: Callable[[str], None] = silent) -> Advice:
    choice: LayoutChoice = smallest(scenario)
    if seeds:
        choice = verify(scenario, choice, seeds, say).choice
    found, rival = choice.chosen, apart(scenario)
    return Advice(
        gpus=found.gpus if found else None,
        layout=found.layout if found else None,
        all_gpus=found.all_gpus if found else None,
        binding=choice.binding,
        min_cache_slots=scenario.cache.min_cache_slots,
        coupled_gpus=rival.gpus if rival else None,
    )


def _slower(scenario: Scenario, factor: float) -> Profile:
    """Make a profile of the model's own compute times, all longer by one factor, at enough batches for its curve."""
    model = scenario.model
    points = {
        (ep, 1): [(batch, factor * model.lora(batch, Layout(ep, 1)).compute.value) for batch in _BATCHES]
        for ep in range(1, min(scenario.max_gpus, model.spec.experts or 1) + 1)
    }
    source = "compute as measured by the server"
    return replace(model.profile, source=source, points={**model.profile.points, "compute": points})


def _tokens_per_s(measured: Measured, plan: Scenario | None) -> float | None:
    """Derive tokens/s from entries: one per expert of a token, at two sites of every layer."""
    if plan is None or math.isnan(measured.seconds):
        return None
    spec = plan.model.spec
    each = 2 * (len(spec.moe_layers) * spec.top_k + spec.layers - len(spec.moe_layers))
    return measured.shards["entries"] / each / measured.seconds


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
