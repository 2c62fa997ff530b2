"""Size a plan by simulation: more GPUs where it refutes the model's plan, fewer where fewer hold.

Tried are all layouts of all GPU counts that meet everything but, perhaps, the model's cache test. The one premise:
where a layout is refuted, so are those with no more slots, no faster step and no shorter load. Slots do not rise with
GPUs (an ep that does not divide the experts wastes some), so no count stands for those below it. From the model's plan
the search goes up until a layout holds, and then to those with fewer GPUs that no refutation covers, the best first,
until none is left. The result is the smallest count for which some layout's simulated interval holds the target, and of
that count's layouts the fastest that holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from provisioning.plan.candidates import Candidate, all_but_cache
from provisioning.plan.choice import LayoutChoice, binding
from provisioning.plan.judge import Verdict, judge, silent
from provisioning.plan.question import Scenario
from provisioning.plan.stepped import stepped
from provisioning.simulation.run import System, assign_greedily
from provisioning.simulation.steps import StepSystem

_FINEST = 1e-4  # a share of misses that runs of 30,000 requests can tell from none; closer to 1 the model has its say
_MOST_INSTANCES = 100_000  # that are simulated: more than there are requests in flight stand idle


def disaggregated(candidate: Candidate) -> System:
    """Make the simulated system of a layout: a LoRA Server that all instances share."""
    scenario = candidate.scenario
    apart = scenario.dispatch == "by-adapter"
    return System(
        instance_of=assign_greedily(scenario.workload.in_flight, scenario.instances) if apart else None,
        instances=min(scenario.instances, _MOST_INSTANCES),
        step_s=[candidate.decode_step_us * 1e-6],
        prompt_s=candidate.prompt_us * 1e-6,
        cache_slots=min(candidate.slots, scenario.workload.num_adapters),
        max_batch=max(scenario.kv_requests, 1),
        load_s=candidate.load_us * 1e-6,
    )


def system(candidate: Candidate) -> System | StepSystem:
    """Make the simulated system of a layout, step by step where the question has an engine profile."""
    scenario = candidate.scenario
    if scenario.engine_profile is None:
        return disaggregated(candidate)
    return stepped(
        scenario.engine_profile,
        "server",
        slots=min(candidate.slots, scenario.workload.num_adapters),
        instances=scenario.instances,
        most_requests=scenario.kv_requests,
        load_s=candidate.load_us * 1e-6,
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class Trial:
    """A layout and what the simulation says of it."""

    candidate: Candidate
    verdict: Verdict


Bears = Callable[[Candidate], Verdict]


@dataclass(frozen=True, eq=False, kw_only=True)
class Verified:
    """The plan after simulation. `verdict` is None only where nothing was simulated.

    `refuted` are the model's plan and larger ones, `refuted_below` those with fewer GPUs than the model's, or
    than the plan where the model has none (`model_gpus` is None).
    """

    choice: LayoutChoice
    verdict: Verdict | None
    refuted: tuple[Trial, ...] = ()
    refuted_below: tuple[Trial, ...] = ()
    model_gpus: int | None = None

    @property
    def below_model(self) -> bool:
        """Whether the simulation bears out a plan that the model's cache test turns down."""
        return self.choice.chosen is not None and "cache" in self.choice.chosen.failed


def verify(scenario: Scenario, choice: LayoutChoice, seeds: int, say: Callable[[str], None] = silent) -> Verified:
    """Find the smallest plan that the simulation confirms, beginning with the model's."""
    fine, model = max(scenario.iar_target, scenario.slo.share) > 1 - _FINEST, choice.chosen
    if model is None and fine:
        return Verified(choice=choice, verdict=None)
    layouts = [item for found in all_but_cache(scenario) for item in found]
    if fine and model:
        layouts = [item for item in layouts if item.gpus >= model.gpus and not item.failed]
    if not layouts:
        return Verified(choice=choice, verdict=None)
    first = next(item for item in layouts if item.layout == model.layout) if model else None
    search = Search(layouts, _simulation(seeds, say))
    held, tried = search.smallest(first), search.refuted
    final = held or tried[-1]
    fewer_than = (model or final.candidate).gpus
    return Verified(
        choice=_choice(scenario, choice, held, tried),
        verdict=final.verdict,
        refuted=tuple(item for item in tried if item.candidate.gpus >= fewer_than),
        refuted_below=tuple(item for item in tried if item.candidate.gpus < fewer_than),
        model_gpus=model.gpus if model else None,
    )


def _simulation(seeds: int, say: Callable[[str], None]) -> Bears:
    def bears(candidate: Candidate) -> Verdict:
        return judge(
            candidate.scenario,
            system(candidate),
            candidate.mean_step_us,
            seeds,
            give_up=True,
            say=lambda text: say(f"simulating {candidate.layout}, {text}"),
        )

    return bears


def _choice(scenario: Scenario, model: LayoutChoice, held: Trial | None, tried: list[Trial]) -> LayoutChoice:
    if held is None:
        stuck = tried[-1].candidate.slots >= scenario.workload.num_adapters or (
            tried[-1].verdict.immediate.low >= scenario.iar_target
        )  # more slots are of no use: all fit, or all are admitted and the TTFT is missed
        busiest = tried[-1].candidate.scenario.busiest
        full = busiest + 3 * busiest**0.5 > scenario.kv_requests  # as many as are there now and then
        slow = not tried[-1].verdict.meets_tpot
        why = "kv" if full else "tpot" if slow else "ttft" if stuck else "cache"
        return LayoutChoice(chosen=None, closest=tried[-1].candidate, binding=why)
    found = held.candidate
    if model.chosen is None or found.gpus < model.chosen.gpus:
        return LayoutChoice(chosen=found, closest=found, binding=binding(scenario, found))
    if found.layout == model.chosen.layout:
        return model
    return LayoutChoice(chosen=found, closest=found, binding="simulation")


class Search:
    """The fewest GPUs among `layouts` that `bears` bears out; each is tried once at most."""

    def __init__(self, layouts: list[Candidate], bears: Bears) -> None:
        self._layouts, self._bears = sorted(layouts, key=_worth), bears
        self.held: list[Trial] = []
        self.refuted: list[Trial] = []

    def smallest(self, first: Candidate | None) -> Trial | None:
        """Search from `first`, the model's plan, if there is one; None where no candidate holds."""
        stride = 1
        if first is None or not self._holds(first):
            while not self.held and (left := self._left(self._layouts)):
                counts = sorted({item.gpus for item in left if first is None or item.gpus >= first.gpus})
                up = counts[min(stride, len(counts)) - 1] if counts and first else left[-1].gpus
                self._holds(max((item for item in left if item.gpus == up), key=_worth))
                stride *= 2
        if not self.held:
            return None
        stride = 1
        while left := self._left(item for item in self._layouts if item.gpus < self._fewest):
            stride = 2 * stride if self._holds(left[-min(stride, len(left))]) else 1
        return self._fastest(self._fewest)

    @property
    def _fewest(self) -> int:
        return self.held[-1].candidate.gpus

    def _left(self, layouts: Iterable[Candidate]) -> list[Candidate]:
        """List the candidates that no refutation covers, the best last."""
        return [item for item in layouts if not any(no_better(item, trial.candidate) for trial in self.refuted)]

    def _fastest(self, gpus: int) -> Trial:
        """Pick among the candidates that hold with so many GPUs."""
        found = self.held[-1]
        quicker = [item for item in self._layouts if item.gpus == gpus and _speed(item) < _speed(found.candidate)]
        for item in sorted(quicker, key=_speed):
            if self._left([item]) and self._holds(item):
                return self.held[-1]
        return found

    def _holds(self, candidate: Candidate) -> bool:
        trial = Trial(candidate=candidate, verdict=self._bears(candidate))
        (self.held if trial.verdict.holds else self.refuted).append(trial)
        return trial.verdict.holds


def _speed(item: Candidate) -> tuple[int, float, float, int]:
    """Return a key that sorts candidates: those that the model accepts first, then by speed."""
    return len(item.failed), item.step_us, item.latency.total, -item.slots


def _slots(item: Candidate) -> int:
    return min(item.slots, item.scenario.workload.num_adapters)


def _worth(item: Candidate) -> tuple[int, float, int]:
    """Return a key that rises with what a layout offers."""
    return _slots(item), -item.mean_step_us, -item.gpus


def no_better(item: Candidate, refuted: Candidate) -> bool:
    """Return whether no simulated figure differs; an exact tie of all is the same system.

    With an engine profile all layouts have the same steps.
    """
    slower = item.decode_step_us >= refuted.decode_step_us and item.prompt_us >= refuted.prompt_us
    return (
        _slots(item) <= _slots(refuted)
        and item.load_us >= refuted.load_us
        and (slower or item.scenario.engine_profile is not None)
    )
