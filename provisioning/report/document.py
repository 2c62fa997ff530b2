"""The JSON of a plan: `provision --json`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from provisioning.plan.band import SPREAD
from provisioning.plan.judge import verdict_json
from provisioning.plan.verify import Trial
from provisioning.report import classes, prefill
from provisioning.report.provenance import provenance
from provisioning.report.render import headline, question
from provisioning.report.result import Result
from provisioning.report.serve_file import unmet


def document(result: Result) -> dict[str, Any]:
    """Make the JSON document with the documented keys; those of a plan are null if there is none."""
    scenario, candidate, feasible = result.scenario, result.candidate, result.feasible
    layout = {"ep": candidate.layout.ep, "pp": candidate.layout.pp}
    return {
        "question": question(result),
        "answer": headline(result),
        "command": result.command,
        "date": result.date,
        "feasible": feasible,
        "gpus": candidate.gpus if feasible else None,
        "spare_gpus": candidate.spare_gpus,
        "replicas": scenario.replicas,
        "layout": layout if feasible else None,
        "nodes": result.nodes if feasible else None,
        "min_cache_slots": scenario.cache.min_cache_slots,
        "cache_slots": candidate.slots,
        "iar": scenario.cache.iar(candidate.slots),
        "iar_target": scenario.iar_target,
        "binding_constraint": result.verified.choice.binding,
        "closest": None if feasible else {"layout": layout, "gpus": candidate.gpus, "fails": list(candidate.failed)},
        "model": scenario.model.spec.name,
        "slo": asdict(scenario.slo),
        "dispatch": scenario.dispatch,
        "eq6": scenario.eq6,
        "transport": scenario.model.transport.name,
        "prefill": scenario.prefill,
        "prompts": prefill.as_json(result),
        "load": _load(result),
        "latency_us": _latency(result),
        "coupled": _coupled(result),
        "sensitivity": [asdict(variant) for variant in result.variants],
        "load_headroom": result.headroom,
        "band": _band(result),
        "classes": [asdict(one) for one in classes.by_class(result)],
        "simulation": _simulation(result),
        "cost": result.cost(),
        "provenance": {name: entry._asdict() for name, entry in provenance(scenario, candidate).items()},
        "warnings": result.warnings,
        "unmet_assumptions": list(unmet(result)),
        "notes": list(result.notes),
    }


def _load(result: Result) -> dict[str, Any]:
    """Describe the load: `batch` and `global_batch` are means over time, as asked for; `peak` has those of the peak."""
    scenario = result.scenario
    mean, over_time = 1 / scenario.workload.peak, scenario.workload.over_time
    return {
        "instances": scenario.instances,
        "instance_gpus": scenario.model.instance_gpus,
        "batch": scenario.batch * mean,
        "busiest_batch": scenario.busiest * mean,
        "hottest_over_mean_by_adapter": scenario.loads.hottest,
        "batch_limit_by_kv": scenario.kv_requests,
        "global_batch": scenario.global_batch * mean,
        "request_rate": result.rate,
        "mean_output_tokens": scenario.workload.lengths.mean_tokens,
        "adapters": scenario.workload.num_adapters,
        "peak": None
        if over_time is None
        else {
            "steady": over_time.steady,
            "load_over_mean": over_time.fullest,
            "window_s": over_time.window_s,
            "start_s": over_time.start_s,
            "batch": scenario.batch,
            "global_batch": scenario.global_batch,
            "load_over_time": over_time.load_W.tolist(),
        },
    }


def _latency(result: Result) -> dict[str, float]:
    latency, limit = result.candidate.latency, result.scenario.limit(result.candidate.layout)
    return {
        "recv": latency.receive.value,
        "compute": latency.compute.value,
        "send": latency.send.value,
        "round_trips": latency.round_trips_us,
        "total": latency.total,
        "budget": limit.ffn,
        "slowest_times_instances": result.scenario.steps.busy_us(result.candidate.layout),
        "budget_layer": limit.layer,
        "decode_step": result.candidate.step_us,
        "prompt": result.candidate.prompt_us,
        "visible_load": result.candidate.load_us,
    }


def _coupled(result: Result) -> dict[str, Any]:
    coupled = result.coupled
    return {
        "evaluated": True,
        "gpus": coupled.gpus,
        "instances": coupled.instances,
        "tuned": coupled.scenario.coupled_split is None,
        "adapters_share_of_memory": coupled.split.share,
        "cache_slots_per_instance": coupled.split.slots,
        "kv_requests_per_instance": coupled.split.requests,
        "cache_slots": coupled.adapters_in_all,
        "router": "lora-aware" if coupled.scenario.coupled_routed else "adapters assigned to instances",
        "copies_of_hot_adapters": coupled.copies,
        "iar": coupled.split.iar,
        "global_batch": coupled.scenario.global_batch,
        "decode_step_us": coupled.step_us,
        "meets_slo": coupled.holds,
        "gpus_needed": coupled.gpus_needed,
        "lora_server_worth_it": result.worth_it,
        "verdict": result.worth,
        "simulation": None if coupled.verdict is None else verdict_json(coupled.verdict),
    }


def _band(result: Result) -> dict[str, Any] | None:
    band = result.band
    if band is None:
        return None
    return {
        "steps_and_outputs": SPREAD,
        "of": "requests within the TTFT SLO" if band.simulated else "admitted at once",
        "share": [band.low, band.high],
        "holds_target": band.holds,
        "meets_tpot": band.meets_tpot,
        "simulated": band.simulated,
    }


def _simulation(result: Result) -> dict[str, Any]:
    verdict = result.verified.verdict
    if verdict is None:
        return {"simulated": False, "reason": "--no-simulate, or no feasible plan by the model"}
    verified, model_gpus = result.verified, result.verified.model_gpus
    change = result.candidate.gpus - model_gpus if result.feasible and model_gpus is not None else 0
    return {
        "simulated": True,
        **verdict_json(verdict),
        "worst_served": [
            {"adapter": result.scenario.workload.name(index), "requests": calls, "share_within_ttft_slo": share}
            for index, calls, share in verdict.worst_served()
        ],
        "refuted": [trial_json(item) for item in verified.refuted],
        "refuted_below": [trial_json(item) for item in verified.refuted_below],
        "model_gpus": model_gpus,
        "below_model": verified.below_model,
        "gpus_added": max(change, 0),
        "gpus_saved": max(-change, 0),
    }


def trial_json(item: Trial) -> dict[str, Any]:
    """Describe a layout that the simulation refuted."""
    return {
        "gpus": item.candidate.gpus,
        "layout": str(item.candidate.layout),
        "cache_slots": item.candidate.slots,
        "immediate_rate": item.verdict.immediate.mean,
        "interval": [item.verdict.immediate.low, item.verdict.immediate.high],
        "share_within_ttft_slo": item.verdict.within_ttft.mean,
        "tpot_s": None if item.verdict.tpot_s is None else item.verdict.tpot_s.mean,
    }
