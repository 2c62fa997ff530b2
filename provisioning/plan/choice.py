"""Choice by the model: the fewest GPUs with a layout that meets every objective. `verify` then tries to refute it."""

from __future__ import annotations

from dataclasses import dataclass

from lora_server.placement import Layout
from provisioning.plan.candidates import Candidate, candidates, evaluate
from provisioning.plan.question import Scenario

_ENGINES = {"kv", "batch", "tpot"}  # what fails there fails with any LoRA Server


@dataclass(frozen=True, kw_only=True)
class LayoutChoice:
    """The model's plan: `chosen` meets everything, or nothing up to `max_gpus` does."""

    chosen: Candidate | None
    closest: Candidate
    binding: str

    @property
    def feasible(self) -> bool:
        """Whether there is a plan."""
        return self.chosen is not None


def smallest(scenario: Scenario) -> LayoutChoice:
    """Find the smallest GPU count with an accepted layout, and the constraint that the count before it fails."""
    closest = None
    for gpus in scenario.gpu_counts:
        found = candidates(scenario, gpus)
        if not found:
            continue
        if not found[0].failed:
            return LayoutChoice(chosen=found[0], closest=found[0], binding=binding(scenario, found[0]))
        if closest is None or _closer(found[0], closest):
            closest = found[0]
    if closest is None:
        return LayoutChoice(
            chosen=None,
            closest=evaluate(scenario, Layout(1, 1)),
            binding="node_granularity" if scenario.whole_nodes else "cache",
        )
    return LayoutChoice(chosen=None, closest=closest, binding=_kind(closest.failed[0]))


def _closer(larger: Candidate, closest: Candidate) -> bool:
    """Tell whether `larger` comes closer: it fails less, or as much of what more GPUs can help with."""
    return len(larger.failed) < len(closest.failed) or (
        len(larger.failed) == len(closest.failed) and not set(closest.failed) <= _ENGINES
    )


def binding(scenario: Scenario, chosen: Candidate) -> str:
    """Name the binding constraint: why one GPU fewer fails, or what is nearest to its limit."""
    if scenario.whole_nodes:
        alone = [item for item in candidates(scenario, chosen.gpus - 1) if not item.failed] if chosen.gpus > 1 else []
        if alone:
            return "node_granularity"
    below = (candidates(scenario, gpus) for gpus in reversed(scenario.gpu_counts) if gpus < chosen.gpus)
    previous = next((found[0] for found in below if found), None)
    if previous is not None and previous.failed:
        return _kind(previous.failed[0])
    latency, found, limit = chosen.latency, chosen.scenario, chosen.scenario.limit(chosen.layout)
    used = {
        "cache": found.cache.min_cache_slots / max(chosen.slots, 1),
        found.steps.served(chosen.layout).worst: max(
            latency.total / limit.ffn, found.steps.busy_us(chosen.layout) / limit.layer
        ),
        "ttft": (chosen.step_us + chosen.load_us) / scenario.slo.ttft_us,
    }
    return max(used, key=lambda name: used[name])


def _kind(failure: str) -> str:
    return failure.rpartition(":")[2]
