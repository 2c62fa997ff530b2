"""The alternative: no LoRA Server, all GPUs are LLM instances with their own caches; and whether a server is worth it.

LoRA runs after the base GEMM, and a cold adapter is loaded whole before its request starts. The paper's S-LoRA (section
6.1) gives adapters half of the memory that the base weights leave, and splits them over instances greedily by load.
Here, unless that is asked for, the share is searched, by the model, and the best and its two neighbours by simulation;
and a LoRA-aware router (`simulation.router`) sends each request to an instance that has its adapter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from provisioning.model import memory
from provisioning.plan.candidates import Candidate
from provisioning.plan.judge import Verdict, judge, silent
from provisioning.plan.loads import settled_batch
from provisioning.plan.question import Scenario
from provisioning.plan.split import Split, copies, splits
from provisioning.plan.stepped import stepped
from provisioning.simulation.run import System, assign_greedily
from provisioning.simulation.steps import StepSystem

_MOST_INSTANCES = 64
_NEIGHBOURS = (1.0, 0.85, 1.15)  # of the best split's slots


@dataclass(frozen=True, eq=False, kw_only=True)
class Coupled:
    """The coupled system on so many GPUs, and the fewest that would do: simulated if `verdict` is.

    A router keeps `copies` of hot adapters beside the first, about.
    """

    scenario: Scenario
    gpus: int
    instances: int
    split: Split
    copies: int
    step_us: float
    verdict: Verdict | None
    gpus_needed: int | None = None

    @property
    def adapters_in_all(self) -> int:
        """Adapters that all caches hold together."""
        return max(min(self.instances * self.split.slots, self.scenario.workload.num_adapters) - self.copies, 0)

    @property
    def holds_tpot(self) -> bool:
        """Whether the mean instance meets the TPOT SLO."""
        return self.step_us <= self.scenario.slo.tpot_us

    @property
    def holds_kv(self) -> bool:
        """Whether the mean instance holds its KV cache."""
        return self.scenario.global_batch / self.instances <= self.split.requests

    @property
    def holds(self) -> bool:
        """Whether it meets both SLOs; the TTFT by simulation, or by the model where enough are admitted at once."""
        in_time = self.verdict.holds if self.verdict else self.split.admitted >= self.scenario.iar_target
        return self.holds_tpot and self.holds_kv and in_time


def compare(scenario: Scenario, candidate: Candidate, seeds: int, say: Callable[[str], None] = silent) -> Coupled:
    """Evaluate the coupled system on as many GPUs as the plan and its instances take; simulated if seeds > 0.

    Its load is the plan's requests/s, since the same number in flight would be another rate at another step. Without a
    plan it has the same number in flight.
    """
    gpus, each = candidate.all_gpus, scenario.model.instance_gpus
    instances = max(gpus // each, 1)
    asked = candidate.scenario
    if set(candidate.failed) <= {"cache"}:
        asked = replace(asked, request_rate=asked.rate(candidate.mean_step_us))
    found = coupled(asked, instances, seeds, say)
    needed = _fewest(asked, instances, found, seeds, say)
    return replace(found, gpus=gpus, gpus_needed=None if needed is None else needed * each)


def coupled(scenario: Scenario, instances: int, seeds: int = 0, say: Callable[[str], None] = silent) -> Coupled:
    """Size `instances` with their best split, under the same load: LB, or the rate."""
    loaded = _loaded(scenario, instances)
    found = splits(loaded, instances)
    step_us = loaded.model.coupled_step_us(loaded.global_batch / instances)
    best = Coupled(
        scenario=loaded,
        gpus=instances * scenario.model.instance_gpus,
        instances=instances,
        split=found[0],
        copies=int((copies(loaded.workload, instances) - 1).sum()) if scenario.coupled_routed else 0,
        step_us=step_us,
        verdict=None,
    )
    if not seeds or not found[0].slots or not (best.holds_tpot and best.holds_kv):
        return best
    tried: list[Coupled] = []
    for factor in _NEIGHBOURS:
        near = min(found, key=lambda item: abs(item.slots - factor * found[0].slots))
        if all(near is not known.split for known in tried):
            tried.append(replace(best, split=near, verdict=_simulated(best, near, seeds, say)))
            if tried[-1].holds:
                return tried[-1]
    return max(tried, key=lambda item: item.verdict.within_ttft.mean if item.verdict else 0.0)


def _simulated(asked: Coupled, split: Split, seeds: int, say: Callable[[str], None]) -> Verdict:
    system = _system(asked.scenario, asked.instances, split, asked.step_us)
    doing = f"simulating {asked.instances:,} coupled instances of {split.slots:,} slots"
    return judge(asked.scenario, system, asked.step_us, seeds, give_up=True, say=lambda text: say(f"{doing}, {text}"))


def _loaded(scenario: Scenario, instances: int) -> Scenario:
    """Settle LB with the coupled step: at a given rate it changes the requests in flight."""
    if scenario.request_rate is None:
        return scenario
    per_us = scenario.tokens_per_us / instances
    batch = settled_batch(per_us, scenario.model.coupled_step_us, per_us * scenario.slo.tpot_us)
    return replace(scenario, global_batch=batch * instances, busiest_batch=None)


def _system(scenario: Scenario, instances: int, split: Split, step_us: float) -> System | StepSystem:
    """Build the simulator's system: a cache per instance, and loads of complete adapters."""
    if scenario.engine_profile is not None:
        each = {"slots": split.slots, "instances": instances, "most_requests": split.requests}
        return stepped(scenario.engine_profile, "coupled", **each)
    model, batch = scenario.model, scenario.global_batch / instances
    decode_us = model.without_prompts().coupled_step_us(batch)
    prompt_us = (step_us - decode_us) * scenario.workload.lengths.mean_tokens / batch
    bytes_ = memory.adapter_bytes(model.spec, model.lora_rank, model.shared_a)
    load_us = bytes_ / (model.instance_gpus * model.cluster.host_bytes_per_us)
    return System(
        instance_of=None if scenario.coupled_routed else assign_greedily(scenario.workload.in_flight, instances),
        instances=instances,
        step_s=[decode_us * 1e-6],
        prompt_s=prompt_us * 1e-6,
        cache_slots=split.slots,
        shared=False,
        max_batch=max(split.requests, 1),
        load_s=load_us * 1e-6,
    )


def _fewest(scenario: Scenario, instances: int, found: Coupled, seeds: int, say: Callable[[str], None]) -> int | None:
    """Find the fewest instances that suffice: below `instances` by the model, above it as `found` was judged."""

    def does(number: int) -> bool:
        return coupled(scenario, number, seeds, say).holds

    if found.holds:
        seeds, low, high = 0, 0, instances
    else:
        low, high = instances, instances + 1
        while not does(high):
            if high >= _MOST_INSTANCES:
                return None
            low, high = high, min(low + 2 * (high - low), max(_MOST_INSTANCES, low + 1))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if does(middle) else (middle, high)
    return high


def worth(candidate: Candidate, coupled: Coupled, *, plan: bool = True) -> str:
    """Say whether a LoRA Server is worth it, and by how much. Without a plan `candidate` is the nearest miss."""
    if not plan:
        return _without_plan(candidate, coupled)
    routed = ", behind a LoRA-aware router" if coupled.scenario.coupled_routed and coupled.instances > 1 else ""
    how = "tuned" if coupled.scenario.coupled_split is None else f"with {coupled.split.share:.0%} for adapters"
    same = f"{_instances(coupled)}, {how}{routed}, on the same {coupled.gpus:,} GPUs"
    num = candidate.scenario.workload.num_adapters
    held = f"cache {coupled.adapters_in_all:,} of the {num:,} adapters"
    if coupled.holds:
        needed = coupled.gpus_needed or coupled.gpus
        fewer = f", and by the model {needed:,} GPUs would do" if needed < coupled.gpus else ""
        return f"A LoRA Server is not worth it here: {same} {held} and meet both SLOs{fewer}."
    return f"A LoRA Server is worth it: {same} {held} and {_why(coupled)}; {_need(coupled)}."


def _instances(coupled: Coupled) -> str:
    return f"{coupled.instances:,} coupled instance{'' if coupled.instances == 1 else 's'}"


def _need(coupled: Coupled) -> str:
    by = "the simulation" if coupled.verdict else "the model"
    if coupled.gpus_needed is None:
        return f"by {by} not even 64 instances do"
    saved = 1 - coupled.gpus / coupled.gpus_needed
    return f"by {by} they need {coupled.gpus_needed:,} GPUs, so {saved:.0%} are saved"


def _why(coupled: Coupled) -> str:
    if not coupled.holds_kv:
        return "lack memory for KV"
    if not coupled.holds_tpot:
        return "miss the TPOT SLO"
    verdict, target = coupled.verdict, coupled.scenario.iar_target
    if verdict is None:
        return f"admit {coupled.split.admitted:.1%} of requests at once, not {target:.12g}"
    if not verdict.meets_tpot:
        return "miss the TPOT SLO"
    if verdict.in_time:
        return f"admit {verdict.immediate.mean:.1%} of requests at once, which --iar forbids"
    return f"miss the TTFT SLO, with {verdict.within_ttft.mean:.1%} of requests in time"


def _without_plan(candidate: Candidate, coupled: Coupled) -> str:
    where = f"{_instances(coupled)} on {coupled.gpus:,} GPUs"
    most = candidate.scenario.max_gpus
    if coupled.holds:
        return f"No LoRA Server of up to {most:,} GPUs meets both SLOs, but by the model {where} do."
    more = f"; {coupled.gpus_needed} GPUs of them would do" if coupled.gpus_needed else ""
    return f"{where} (as many as the closest layout takes) fail, too: by the model they {_why(coupled)}{more}."
