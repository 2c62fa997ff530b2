"""States plainly whether a LoRA Server is worth it, and by how much."""

from __future__ import annotations

from provisioning.plan.candidates import Candidate
from provisioning.plan.coupled import Coupled


def worth(candidate: Candidate, coupled: Coupled, *, plan: bool = True) -> str:
    """Compare in a sentence. Without a plan `candidate` is the nearest miss."""
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
