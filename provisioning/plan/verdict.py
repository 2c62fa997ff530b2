"""States plainly whether a LoRA Server is worth it, and by how much."""

from __future__ import annotations

from provisioning.plan.candidates import Candidate
from provisioning.plan.coupled import Coupled


def worth(candidate: Candidate, coupled: Coupled, *, plan: bool = True) -> str:
    """Compare in a sentence. Without a plan `candidate` is the nearest miss."""
    if not plan:
        return _without_plan(candidate, coupled)
    how = "tuned" if coupled.scenario.coupled_split is None else f"with {coupled.split.share:.0%} for adapters,"
    same = f"{_instances(coupled)}, {how} on the same {coupled.gpus:,} GPUs"
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
    return "miss the TTFT SLO" if coupled.holds_tpot else "miss the TPOT SLO"


def _without_plan(candidate: Candidate, coupled: Coupled) -> str:
    where = f"{_instances(coupled)} on {coupled.gpus:,} GPUs"
    most = candidate.scenario.max_gpus
    if coupled.holds:
        return f"No LoRA Server of up to {most:,} GPUs meets both SLOs, but by the model {where} do."
    more = f"; {coupled.gpus_needed} GPUs of them would do" if coupled.gpus_needed else ""
    return f"{where} (as many as the closest layout takes) fail, too: by the model they {_why(coupled)}{more}."
