"""Comparison tables of a plan: changed questions, the coupled system and the costs, as rows of words."""

from __future__ import annotations

from collections.abc import Iterator

from provisioning.report import words
from provisioning.report.result import Result


def changes(result: Result) -> Iterator[tuple[str, str, str, str, str]]:
    """List (if, GPUs, layout, its immediate admission rate, whether it meets all, by the model) of each variant."""
    for item in result.variants:
        own = "" if item.instances == result.scenario.instances else f" + {item.instances:,} inst."
        met = "yes" if item.meets_at_plan else f"no: {item.binding_constraint.replace(',', ', ')}"
        gpus = f"{item.gpus:,}" if item.gpus is not None else "-"
        yield item.change, gpus, f"{item.layout}{own}" if item.layout else "-", f"{item.iar_at_plan:.4f}", met


def costs(result: Result) -> Iterator[tuple[str, str]]:
    """List (what, amount) of the costs."""
    for name, value in (result.cost() or {}).items():
        yield name.replace("_", " ").replace("lora server", "LoRA Server").replace("gpu", "GPU"), words.number(value)


def sides(result: Result) -> Iterator[tuple[str, str, str]]:
    """List (what, with a LoRA Server, coupled on as many GPUs): what both hold, admit and cost."""
    scenario, candidate, coupled = result.scenario, result.candidate, result.coupled
    yield (
        "GPUs",
        f"{scenario.engine_gpus:,} + {candidate.gpus + candidate.spare_gpus:,}",
        f"{coupled.instances * scenario.model.instance_gpus:,}",
    )
    apart = f"{coupled.instances:,} x {coupled.split.slots:,}, {coupled.split.share:.0%} of free memory"
    yield "adapter slots", f"{candidate.slots:,}, shared", apart
    if coupled.copies:
        yield "copies of hot adapters", "-", f"{coupled.copies:,}, about"
    yield "requests by KV memory", f"{scenario.kv_requests:,} an instance", f"{coupled.split.requests:,} an instance"
    yield "immediate admission, model", f"{scenario.cache.iar(candidate.slots):.4f}", f"{coupled.split.iar:.4f}"
    ours, theirs = result.verified.verdict, coupled.verdict
    if ours and theirs:
        yield "within TTFT, simulated", f"{ours.within_ttft.mean:.4f}", f"{theirs.within_ttft.mean:.4f}"
        yield "immediate admission, simulated", f"{ours.immediate.mean:.4f}", f"{theirs.immediate.mean:.4f}"
    yield "decode step", words.time(candidate.mean_step_us), words.time(coupled.step_us)
    needed = "over 64 instances" if coupled.gpus_needed is None else f"{coupled.gpus_needed:,}"
    yield "GPUs that do", f"{candidate.all_gpus:,}" if result.feasible else "-", needed
    cost = result.cost()
    if cost:
        rival = cost.get("coupled_per_hour")
        yield "cost per hour", words.number(cost["total_per_hour"]), "-" if rival is None else words.number(rival)
