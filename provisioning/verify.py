"""Tries to refute a plan by simulation, and goes on to more GPUs where it is refuted.

The next plans tried are 1, 2, 4, ... GPUs on, until one holds; then the counts between the last
refuted and the first that holds are bisected, on the premise that more slots do not admit fewer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from provisioning.judge import Verdict, judge
from provisioning.plan import Candidate, Choice, Scenario, smallest
from provisioning.simulate import System, assign_greedily


def disaggregated(scenario: Scenario, candidate: Candidate) -> System:
    """The LoRA Server of a layout, shared by all instances."""
    return System(
        instance_of=assign_greedily(scenario.workload.popularity, scenario.instances),
        step_s=[candidate.step_us * 1e-6],
        cache_slots=min(candidate.slots, scenario.workload.num_adapters),
        load_s=candidate.load_us * 1e-6,
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class Refutation:
    """A plan of the model that the simulation did not bear out."""

    candidate: Candidate
    verdict: Verdict


@dataclass(frozen=True, eq=False, kw_only=True)
class Verified:
    """The plan after simulation. `verdict` is None only where nothing was simulated."""

    choice: Choice
    verdict: Verdict | None
    refuted: tuple[Refutation, ...] = ()


def verify(scenario: Scenario, choice: Choice, seeds: int) -> Verified:
    """The model's plan if the simulation bears it out, else the first one with more slots that it does."""
    refuted: list[Refutation] = []
    stride = 1
    while choice.chosen is not None:
        candidate = choice.chosen
        verdict = _try(scenario, candidate, seeds)
        if verdict.holds:
            return _bisected(scenario, Verified(choice=choice, verdict=verdict, refuted=tuple(refuted)), seeds)
        refuted.append(Refutation(candidate=candidate, verdict=verdict))
        if candidate.slots >= scenario.workload.num_adapters or verdict.immediate.low >= scenario.iar_target:
            choice = Choice(chosen=None, closest=candidate, binding="ttft")
            break
        choice = _further(scenario, candidate, stride)
        stride *= 2
    return Verified(choice=choice, verdict=refuted[-1].verdict if refuted else None, refuted=tuple(refuted))


def _try(scenario: Scenario, candidate: Candidate, seeds: int) -> Verdict:
    return judge(scenario, disaggregated(scenario, candidate), candidate.step_us, seeds, give_up=True)


def _further(scenario: Scenario, refuted: Candidate, stride: int) -> Choice:
    """The plan `stride` GPUs on, or the last one there is."""
    for start in sorted({min(refuted.gpus + stride, scenario.max_gpus), refuted.gpus + 1}, reverse=True):
        if start > refuted.gpus:
            found = smallest(scenario, start=start, more_slots_than=refuted.slots)
            if found.chosen is not None:
                return replace(found, binding="simulation")
    return Choice(chosen=None, closest=refuted, binding="cache")


def _bisected(scenario: Scenario, held: Verified, seeds: int) -> Verified:
    """The smallest plan that holds, between the last refuted and the one that was found to hold."""
    refuted = list(held.refuted)
    while refuted and held.choice.chosen is not None:
        below, above = refuted[-1].candidate, held.choice.chosen
        found = smallest(scenario, start=(below.gpus + above.gpus + 1) // 2, more_slots_than=below.slots)
        if found.chosen is None or found.chosen.gpus >= above.gpus:
            found = smallest(scenario, start=below.gpus + 1, more_slots_than=below.slots)
        if found.chosen is None or found.chosen.gpus >= above.gpus:
            break
        verdict = _try(scenario, found.chosen, seeds)
        if verdict.holds:
            held = Verified(choice=replace(found, binding="simulation"), verdict=verdict)
        else:
            refuted.append(Refutation(candidate=found.chosen, verdict=verdict))
    return replace(held, refuted=tuple(refuted))
