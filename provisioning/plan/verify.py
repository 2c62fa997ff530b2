"""Sizes a plan by simulation: more GPUs where it refutes the model's, fewer where it holds with fewer.

Tried at a GPU count: of the layouts that meet everything but, perhaps, the model's cache test, the one with
the largest cache. From the model's plan the search goes up, or down, by 1, 2, 4, ... such counts until the
answer changes, and bisects what is left, on the premise that more slots do not admit fewer. So what is found
is the smallest count whose simulated interval holds the target; there, the fastest layout is taken if it holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from provisioning.plan.candidates import Candidate, all_but_cache
from provisioning.plan.choice import Choice, binding
from provisioning.plan.judge import Verdict, judge, silent
from provisioning.plan.question import Scenario
from provisioning.simulation.run import System, assign_greedily

_FINEST = 1e-4  # a share of misses that runs of 30,000 requests can tell from none; closer to 1 the model has its say
_MOST_INSTANCES = 100_000  # that are simulated: more than there are requests in flight stand idle


def disaggregated(candidate: Candidate) -> System:
    """The LoRA Server of a layout, shared by all instances."""
    scenario = candidate.scenario
    apart = scenario.dispatch == "by-adapter"
    return System(
        instance_of=assign_greedily(scenario.workload.in_flight, scenario.instances) if apart else None,
        instances=min(scenario.instances, _MOST_INSTANCES),
        step_s=[candidate.mean_step_us * 1e-6],
        cache_slots=min(candidate.slots, scenario.workload.num_adapters),
        max_batch=max(scenario.kv_requests, 1),
        load_s=candidate.load_us * 1e-6,
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class Trial:
    """A layout and what the simulation says of it."""

    candidate: Candidate
    verdict: Verdict


@dataclass(frozen=True, eq=False, kw_only=True)
class Verified:
    """The plan after simulation. `verdict` is None only where nothing was simulated.

    `refuted` are the model's plan and larger ones, `refuted_below` those with fewer GPUs than the model's, or
    than the plan where the model has none (`model_gpus` is None).
    """

    choice: Choice
    verdict: Verdict | None
    refuted: tuple[Trial, ...] = ()
    refuted_below: tuple[Trial, ...] = ()
    model_gpus: int | None = None

    @property
    def below_model(self) -> bool:
        """Whether the simulation bears out a plan that the model's cache test turns down."""
        return self.choice.chosen is not None and "cache" in self.choice.chosen.failed


def verify(scenario: Scenario, choice: Choice, seeds: int, say: Callable[[str], None] = silent) -> Verified:
    """The smallest plan that the simulation bears out, sought from the model's."""
    fine, model = scenario.iar_target > 1 - _FINEST, choice.chosen
    if model is None and (fine or choice.closest.failed != ("cache",)):
        return Verified(choice=choice, verdict=None)
    layouts = all_but_cache(scenario)
    if fine and model:
        layouts = [found for found in layouts if found[0].gpus >= model.gpus]
    if not layouts:
        return Verified(choice=choice, verdict=None)
    search = _Search(scenario, seeds, layouts, say)
    counts = [layouts[0].gpus for layouts in search.layouts]
    place = search.first_held(counts.index(model.gpus) if model else len(counts) - 1)
    held, tried = search.held.get(place), search.refuted
    final = held or tried[-1]
    fewer_than = (model or final.candidate).gpus
    return Verified(
        choice=_choice(scenario, choice, held, tried, stuck=search.stuck),
        verdict=final.verdict,
        refuted=tuple(item for item in tried if item.candidate.gpus >= fewer_than),
        refuted_below=tuple(item for item in tried if item.candidate.gpus < fewer_than),
        model_gpus=model.gpus if model else None,
    )


def _choice(scenario: Scenario, model: Choice, held: Trial | None, tried: list[Trial], *, stuck: bool) -> Choice:
    if held is None:
        busiest = tried[-1].candidate.scenario.busiest
        full = busiest + 3 * busiest**0.5 > scenario.kv_requests  # as many as are there now and then
        return Choice(chosen=None, closest=tried[-1].candidate, binding="kv" if full else "ttft" if stuck else "cache")
    found = held.candidate
    if model.chosen is None or found.gpus < model.chosen.gpus:
        return Choice(chosen=found, closest=found, binding=binding(scenario, found))
    if found.layout == model.chosen.layout:
        return model
    return Choice(chosen=found, closest=found, binding="simulation")


@dataclass(eq=False)
class _Search:
    """`layouts`: per GPU count what may be tried, best first; a place is an index of it."""

    scenario: Scenario
    seeds: int
    layouts: list[list[Candidate]]
    say: Callable[[str], None]
    held: dict[int, Trial] = field(default_factory=dict)
    refuted: list[Trial] = field(default_factory=list)

    @property
    def stuck(self) -> bool:
        """Whether more slots are of no use: all fit, or all are admitted and the TTFT is missed."""
        if not self.refuted:
            return False
        last = self.refuted[-1]
        return last.candidate.slots >= self.scenario.workload.num_adapters or (
            last.verdict.immediate.low >= self.scenario.iar_target
        )

    def first_held(self, start: int) -> int:
        """The first place that holds, or -1."""
        if self._bears_out(start, self.layouts[start][0]) or self._holds(start):
            place = self._down(start)
        else:
            place = self._up(start)
        if place >= 0:
            self._bears_out(place, self.layouts[place][0])
        return place

    def _holds(self, place: int) -> bool:
        return self._bears_out(place, max(self.layouts[place], key=lambda item: item.slots))

    def _bears_out(self, place: int, candidate: Candidate) -> bool:
        """Simulates it, unless that is known: what was refuted with as many slots does not do."""
        if place in self.held and self.held[place].candidate == candidate:
            return True
        if candidate.slots <= max((item.candidate.slots for item in self.refuted), default=-1):
            return False
        verdict = judge(
            candidate.scenario,
            disaggregated(candidate),
            candidate.mean_step_us,
            self.seeds,
            give_up=True,
            say=lambda text: self.say(f"simulating {candidate.layout}, {text}"),
        )
        trial = Trial(candidate=candidate, verdict=verdict)
        if verdict.holds:
            self.held[place] = trial
        else:
            self.refuted.append(trial)
        return verdict.holds

    def _down(self, high: int) -> int:
        stride = 1
        while high > 0:
            lower = max(high - stride, 0)
            if not self._holds(lower):
                return self._between(lower, high)
            high, stride = lower, stride * 2
        return high

    def _up(self, low: int) -> int:
        stride, last = 1, len(self.layouts) - 1
        while low < last and not self.stuck:
            higher = min(low + stride, last)
            if self._holds(higher):
                return self._between(low, higher)
            low, stride = higher, stride * 2
        return -1

    def _between(self, low: int, high: int) -> int:
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._holds(middle) else (middle, high)
        return high
