"""Provenance of each number: measured on a machine, extrapolated from measurements, or assumed."""

from __future__ import annotations

from typing import NamedTuple

from provisioning.model import geometry, memory
from provisioning.model.profile import Quantity
from provisioning.plan.candidates import Candidate
from provisioning.plan.question import Scenario


class PlanInput(NamedTuple):
    """kind: measured, extrapolated or assumed."""

    value: float
    unit: str
    kind: str
    source: str


def _us(quantity: Quantity) -> PlanInput:
    return PlanInput(quantity.value, "us", quantity.kind, quantity.source)


def provenance(scenario: Scenario, candidate: Candidate) -> dict[str, PlanInput]:
    """List the plan's inputs that the user did not state as the question itself."""
    return {**_times(scenario, candidate), **_machine(scenario), **_sizes(scenario, candidate), **_workload(scenario)}


def _times(scenario: Scenario, candidate: Candidate) -> dict[str, PlanInput]:
    model, latency = scenario.model, candidate.latency
    trips_us, trips = latency.round_trips_us, "of a layer's exchanges; --round-trip-us"
    prompts = "a request's: bytes, FLOPs and weights, no overhead"
    loads = "bytes over the host link, no prefetch signal"
    return {
        **({"latency_us.round_trips": PlanInput(trips_us, "us", "assumed", trips)} if trips_us else {}),
        "latency_us.recv": _us(latency.receive),
        "latency_us.compute": _us(latency.compute),
        "latency_us.send": _us(latency.send),
        "base_ffn_us": _us(model.base.ffn_us(scenario.busiest)),
        "base_attention_us": _us(model.base.attention_us(scenario.busiest)),
        "coupled_lora_us": _us(model.coupled_lora_us(scenario.batch)),
        "prompt_us": PlanInput(candidate.prompt_us, "us", "extrapolated", prompts),
        **_steps(scenario),
        "visible_load_us": PlanInput(candidate.load_us, "us", "assumed", loads),
    }


def _steps(scenario: Scenario) -> dict[str, PlanInput]:
    profile = scenario.engine_profile
    if profile is None:
        return {}
    step_us = profile.steps("server").step_s(1, 0, 1) * 1e6
    source = f"{profile.source}; of one request, as vLLM schedules"
    return {"engine_step_us": PlanInput(step_us, "us", "measured", source)}


def _machine(scenario: Scenario) -> dict[str, PlanInput]:
    model, cluster, machine = scenario.model, scenario.model.cluster, scenario.model.profile.machine
    kind, usable = ("assumed", "extrapolated") if machine is None else ("measured", "measured")
    gpu, given = cluster.gpu, "--gpu-memory-gib" if cluster.gpu.source == "given" else cluster.gpu.source
    share = "paper 6.4: 104 Mixtral adapters in two 96 GB GPUs" if machine is None else gpu.source
    host_link = "paper 5.3, PCIe 5; --host-link-gb-per-s" if machine is None else gpu.source
    link = f"per GPU over {model.transport.name}; --link-gbps"
    return {
        "gpu_memory_bytes": PlanInput(gpu.memory_bytes, "bytes", kind, f"{gpu.name}, {given}"),
        "usable_memory": PlanInput(cluster.usable_memory, "share", usable, share),
        "hbm_gb_per_s": PlanInput(gpu.hbm_gb_per_s, "GB/s", kind, gpu.source),
        "bf16_tflops": PlanInput(gpu.bf16_tflops, "TFLOP/s", kind, gpu.source),
        "link_gbps": PlanInput(cluster.link_gbps, "Gb/s", "assumed", link),
        "wire_bytes": PlanInput(geometry.WIRE_BYTES[model.wire], "bytes", "assumed", "of an element; --wire"),
        "host_link_gb_per_s": PlanInput(cluster.host_link_gb_per_s, "GB/s", kind, host_link),
    }


def _sizes(scenario: Scenario, candidate: Candidate) -> dict[str, PlanInput]:
    model, ranks = scenario.model, scenario.workload.ranks
    assumed = ", ".join(model.spec.assumed)
    source = f"geometry of {model.spec.name}" + (f", with assumed {assumed}" if assumed else "")
    layout, rank, shared_a = candidate.layout, model.lora_rank, model.shared_a
    kind = "assumed" if assumed else "extrapolated"
    adapter = model.spec.adapter_bytes(rank, shared_a=shared_a)
    seen = PlanInput(adapter, "bytes", "measured", f"mean of {ranks}, 2-byte elements")
    shard = memory.fullest_shard_bytes(model.spec, layout, rank, shared_a)
    weights = geometry.model_weight_bytes(model.spec, model.base_dtype)
    prefill = model.prefill_tokens * geometry.prefill_bytes_per_token(model.spec)

    def entry(value: float, note: str) -> PlanInput:
        return PlanInput(value, "bytes", kind, f"{source}; {note}")

    return {
        "adapter_bytes": seen if ranks else entry(adapter, "all experts, 2-byte elements"),
        "fullest_shard_bytes": entry(shard, f"one adapter on {layout}"),
        "model_weight_bytes": entry(weights, f"{model.base_dtype.ffn:.3g} bytes per element of the FFN, no embeddings"),
        "prefill_bytes": entry(
            prefill, f"activations of {model.prefill_tokens:,.0f} tokens of prefill on each GPU; --prefill-tokens"
        ),
    }


def _workload(scenario: Scenario) -> dict[str, PlanInput]:
    workload, lengths, prompts_by = scenario.workload, scenario.workload.lengths, scenario.prompts_by
    drawn = f"log-normal, CV {lengths.cv:g}; --mean-output-tokens, --counts or --trace"
    skewed = "assumed" if workload.zipf_skew is not None else "measured"
    outputs = "measured" if lengths.source else "assumed"
    prompts = "measured" if prompts_by == "the trace's" else "assumed"
    return {
        "popularity": PlanInput(workload.num_adapters, "adapters", skewed, workload.source),
        "output_tokens": PlanInput(lengths.mean_tokens, "tokens, mean", outputs, lengths.source or drawn),
        "context_tokens": PlanInput(scenario.model.context_tokens, "tokens", "assumed", "--context-tokens"),
        "prompt_tokens": PlanInput(scenario.prompt_tokens, "tokens, mean", prompts, prompts_by),
    }
