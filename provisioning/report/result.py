"""A plan with everything that is said about it: the one document behind the table, JSON, YAML and report."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from provisioning.inputs import InputError
from provisioning.plan import coupled as coupling
from provisioning.plan.candidates import Candidate, Scenario, smallest
from provisioning.plan.coupled import Coupled
from provisioning.plan.judge import verdict_json
from provisioning.plan.sensitivity import Variant, headroom, sensitivity
from provisioning.plan.verify import Trial, Verified, verify
from provisioning.report.provenance import provenance

HOURS_PER_MONTH = 730
MOST_SIMULATED = 100_000

NOTES = (
    "TTFT is queueing plus the first decode step, as in the paper; prefill is not in it.",
    "GPUs are the LoRA Server's (ep * pp); those of the LLM instances come on top.",
    "One adapter cache serves all instances; a cold adapter is loaded layer by layer, no prefetch signal assumed.",
)


@dataclass(frozen=True, eq=False, kw_only=True)
class Result:
    """What `provision` answers."""

    scenario: Scenario
    verified: Verified
    coupled: Coupled
    variants: list[Variant]
    price_per_gpu_hour: float | None = None
    base_model: str = ""

    @property
    def feasible(self) -> bool:
        """Exit code 0, else 3."""
        return self.verified.choice.feasible

    @property
    def candidate(self) -> Candidate:
        """The plan, or what came closest."""
        return self.verified.choice.chosen or self.verified.choice.closest

    def as_json(self) -> dict[str, Any]:
        """The documented keys; those of a plan are null where there is none."""
        scenario, candidate, feasible = self.scenario, self.candidate, self.feasible
        layout = {"ep": candidate.layout.ep, "pp": candidate.layout.pp}
        return {
            "feasible": feasible,
            "gpus": candidate.gpus if feasible else None,
            "layout": layout if feasible else None,
            "nodes": self.nodes if feasible else None,
            "min_cache_slots": scenario.min_cache_slots,
            "cache_slots": candidate.slots,
            "iar": scenario.iar(candidate.slots),
            "iar_target": scenario.iar_target,
            "binding_constraint": self.verified.choice.binding,
            "closest": None
            if feasible
            else {"layout": layout, "gpus": candidate.gpus, "fails": list(candidate.failed)},
            "model": scenario.model.spec.name,
            "slo": asdict(scenario.slo),
            "load": self._load(),
            "latency_us": self._latency(),
            "coupled": self._coupled(),
            "sensitivity": [variant.as_json() for variant in self.variants],
            "load_headroom": self.headroom,
            "simulation": self._simulation(),
            "cost": self.cost(),
            "provenance": {name: entry.as_json() for name, entry in provenance(scenario, candidate).items()},
            "notes": list(NOTES),
        }

    @property
    def headroom(self) -> float | None:
        """By the model; None without a plan, and where the model turns the simulated one down."""
        known = self.feasible and not self.verified.below_model
        return headroom(self.scenario, self.candidate) if known else None

    @property
    def nodes(self) -> int:
        """Of the LoRA Server."""
        return math.ceil(self.candidate.gpus / self.scenario.model.cluster.gpus_per_node)

    def _load(self) -> dict[str, float]:
        scenario = self.scenario
        return {
            "instances": scenario.instances,
            "instance_gpus": scenario.model.instance_gpus,
            "batch": scenario.batch,
            "global_batch": scenario.global_batch,
            "adapters": scenario.workload.num_adapters,
        }

    def _latency(self) -> dict[str, float]:
        latency, limit = self.candidate.latency, self.scenario.limit
        return {
            "recv": latency.receive.value,
            "compute": latency.compute.value,
            "send": latency.send.value,
            "total": latency.total,
            "budget": limit.ffn,
            "slowest_times_instances": latency.longest * self.scenario.instances,
            "budget_layer": limit.layer,
            "decode_step": self.candidate.step_us,
            "visible_load": self.candidate.load_us,
        }

    def _coupled(self) -> dict[str, Any]:
        coupled = self.coupled
        return {
            "evaluated": True,
            "gpus": coupled.gpus,
            "instances": coupled.instances,
            "cache_slots_per_instance": coupled.slots_per_instance,
            "cache_slots": coupled.adapters_in_all,
            "iar": coupled.iar,
            "decode_step_us": coupled.step_us,
            "meets_slo": coupled.holds,
            "gpus_needed_by_model": coupled.gpus_needed,
            "lora_server_worth_it": self.feasible and not coupling.enough(coupled),
            "verdict": coupling.verdict_text(self.scenario, self.candidate, coupled, plan=self.feasible),
            "simulation": None if coupled.verdict is None else verdict_json(coupled.verdict),
        }

    def _simulation(self) -> dict[str, Any]:
        verdict = self.verified.verdict
        if verdict is None:
            return {"simulated": False, "reason": "--no-simulate, or no feasible plan by the model"}
        verified, model_gpus = self.verified, self.verified.model_gpus
        change = self.candidate.gpus - model_gpus if self.feasible and model_gpus is not None else 0
        return {
            "simulated": True,
            **verdict_json(verdict),
            "refuted": [trial_json(item) for item in verified.refuted],
            "refuted_below": [trial_json(item) for item in verified.refuted_below],
            "model_gpus": model_gpus,
            "below_model": verified.below_model,
            "gpus_added": max(change, 0),
            "gpus_saved": max(-change, 0),
        }

    def cost(self) -> dict[str, float] | None:
        """From --price-per-gpu-hour; tokens at LB in flight and the modelled step."""
        if self.price_per_gpu_hour is None or not self.feasible:
            return None
        scenario, price = self.scenario, self.price_per_gpu_hour
        engines = scenario.instances * scenario.model.instance_gpus
        hourly = (engines + self.candidate.gpus) * price
        tokens_per_hour = scenario.global_batch / (self.candidate.step_us * 1e-6) * 3600
        return {
            "price_per_gpu_hour": price,
            "lora_server_per_hour": self.candidate.gpus * price,
            "engines_per_hour": engines * price,
            "total_per_hour": hourly,
            "total_per_month": hourly * HOURS_PER_MONTH,
            "total_per_million_tokens": hourly / tokens_per_hour * 1e6,
            "lora_server_per_adapter_month": self.candidate.gpus
            * price
            * HOURS_PER_MONTH
            / scenario.workload.num_adapters,
        }


def trial_json(item: Trial) -> dict[str, Any]:
    """A layout that was given up."""
    return {
        "gpus": item.candidate.gpus,
        "layout": str(item.candidate.layout),
        "cache_slots": item.candidate.slots,
        "immediate_rate": item.verdict.immediate.mean,
        "interval": [item.verdict.immediate.low, item.verdict.immediate.high],
        "share_within_ttft_slo": item.verdict.within_ttft.mean,
    }


def answer(scenario: Scenario, *, seeds: int, price_per_gpu_hour: float | None = None, base_model: str = "") -> Result:
    """Plans, simulates (unless seeds is 0), compares with coupled and varies the question."""
    if seeds and scenario.global_batch > MOST_SIMULATED:
        raise InputError(
            f"--no-simulate: {scenario.global_batch:g} requests in flight are too many to simulate "
            f"(at most {MOST_SIMULATED:,}); add --no-simulate"
        )
    choice = smallest(scenario)
    verified = verify(scenario, choice, seeds) if seeds else Verified(choice=choice, verdict=None)
    candidate = verified.choice.chosen or verified.choice.closest
    return Result(
        scenario=scenario,
        verified=verified,
        coupled=coupling.compare(scenario, candidate, seeds if verified.choice.feasible else 0),
        variants=sensitivity(scenario, candidate, feasible=verified.choice.feasible),
        price_per_gpu_hour=price_per_gpu_hour,
        base_model=base_model or scenario.model.spec.name,
    )
