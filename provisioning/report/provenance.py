"""Provenance of each number: measured on a machine, extrapolated from measurements, or assumed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from provisioning.model import geometry, memory
from provisioning.model.profile import Quantity
from provisioning.plan.candidates import Candidate
from provisioning.plan.question import Scenario


@dataclass(frozen=True, kw_only=True)
class PlanInput:
    """kind: measured, extrapolated or assumed."""

    value: float
    unit: str
    kind: str
    source: str

    def as_json(self) -> dict[str, Any]:
        """Return the provenance as plain values."""
        return asdict(self)


def _us(quantity: Quantity) -> PlanInput:
    return PlanInput(value=quantity.value, unit="us", kind=quantity.kind, source=quantity.source)


def provenance(scenario: Scenario, candidate: Candidate) -> dict[str, PlanInput]:
    """List the plan's inputs that the user did not state as the question itself."""
    return {**_times(scenario, candidate), **_machine(scenario), **_sizes(scenario, candidate), **_workload(scenario)}


def _times(scenario: Scenario, candidate: Candidate) -> dict[str, PlanInput]:
    model, latency = scenario.model, candidate.latency
    trips_us, trips = latency.round_trips_us, "of a layer's exchanges; --round-trip-us"
    waits = {"latency_us.round_trips": PlanInput(value=trips_us, unit="us", kind="assumed", source=trips)}
    return {
        **(waits if trips_us else {}),
        "latency_us.recv": _us(latency.receive),
        "latency_us.compute": _us(latency.compute),
        "latency_us.send": _us(latency.send),
        "base_ffn_us": _us(model.base.ffn_us(scenario.busiest)),
        "base_attention_us": _us(model.base.attention_us(scenario.busiest)),
        "coupled_lora_us": _us(model.coupled_lora_us(scenario.batch)),
        "prompt_us": PlanInput(
            value=candidate.prompt_us,
            unit="us",
            kind="extrapolated",
            source="a request's: bytes, FLOPs and weights, no overhead",
        ),
        **_steps(scenario),
        "visible_load_us": PlanInput(
            value=candidate.load_us, unit="us", kind="assumed", source="bytes over the host link, no prefetch signal"
        ),
    }


def _steps(scenario: Scenario) -> dict[str, PlanInput]:
    profile = scenario.engine_profile
    if profile is None:
        return {}
    step_us = profile.steps("server").step_s(1, 0, 1) * 1e6
    source = f"{profile.source}; of one request, as vLLM schedules"
    return {"engine_step_us": PlanInput(value=step_us, unit="us", kind="measured", source=source)}


def _machine(scenario: Scenario) -> dict[str, PlanInput]:
    cluster, machine = scenario.model.cluster, scenario.model.profile.machine
    kind = "assumed" if machine is None else "measured"
    gpu, given = cluster.gpu, "--gpu-memory-gib" if cluster.gpu.source == "given" else cluster.gpu.source
    return {
        "gpu_memory_bytes": PlanInput(value=gpu.memory_bytes, unit="bytes", kind=kind, source=f"{gpu.name}, {given}"),
        "usable_memory": PlanInput(
            value=cluster.usable_memory,
            unit="share",
            kind="extrapolated" if machine is None else kind,
            source="paper 6.4: 104 Mixtral adapters in two 96 GB GPUs" if machine is None else gpu.source,
        ),
        "hbm_gb_per_s": PlanInput(value=gpu.hbm_gb_per_s, unit="GB/s", kind=kind, source=gpu.source),
        "bf16_tflops": PlanInput(value=gpu.bf16_tflops, unit="TFLOP/s", kind=kind, source=gpu.source),
        "link_gbps": PlanInput(
            value=cluster.link_gbps,
            unit="Gb/s",
            kind="assumed",
            source=f"per GPU over {scenario.model.transport.name}; --link-gbps",
        ),
        "wire_bytes": PlanInput(
            value=geometry.WIRE_BYTES[scenario.model.wire], unit="bytes", kind="assumed", source="of an element; --wire"
        ),
        "host_link_gb_per_s": PlanInput(
            value=cluster.host_link_gb_per_s,
            unit="GB/s",
            kind=kind,
            source=gpu.source if machine else "paper 5.3, PCIe 5; --host-link-gb-per-s",
        ),
    }


def _sizes(scenario: Scenario, candidate: Candidate) -> dict[str, PlanInput]:
    model = scenario.model
    assumed = ", ".join(model.spec.assumed)
    source = f"geometry of {model.spec.name}" + (f", with assumed {assumed}" if assumed else "")
    layout, rank, shared_a = candidate.layout, model.lora_rank, model.shared_a
    kind = "assumed" if assumed else "extrapolated"

    def entry(value: float, note: str) -> PlanInput:
        return PlanInput(value=value, unit="bytes", kind=kind, source=f"{source}; {note}")

    return {
        "adapter_bytes": PlanInput(
            value=model.spec.adapter_bytes(rank, shared_a=shared_a),
            unit="bytes",
            kind="measured",
            source=f"mean of {scenario.workload.ranks}, 2-byte elements",
        )
        if scenario.workload.ranks
        else entry(model.spec.adapter_bytes(rank, shared_a=shared_a), "all experts, 2-byte elements"),
        "fullest_shard_bytes": entry(
            memory.fullest_shard_bytes(model.spec, layout, rank, shared_a), f"one adapter on {layout}"
        ),
        "model_weight_bytes": entry(
            geometry.model_weight_bytes(model.spec, model.base_dtype),
            f"{model.base_dtype.ffn:.3g} bytes per element of the FFN, no embeddings",
        ),
        "prefill_bytes": entry(
            model.prefill_tokens * geometry.prefill_bytes_per_token(model.spec),
            f"activations of {model.prefill_tokens:,.0f} tokens of prefill on each GPU; --prefill-tokens",
        ),
    }


def _workload(scenario: Scenario) -> dict[str, PlanInput]:
    workload, lengths = scenario.workload, scenario.workload.lengths
    return {
        "popularity": PlanInput(
            value=workload.num_adapters,
            unit="adapters",
            kind="assumed" if workload.zipf_skew is not None else "measured",
            source=workload.source,
        ),
        "output_tokens": PlanInput(
            value=lengths.mean_tokens,
            unit="tokens, mean",
            kind="measured" if lengths.source else "assumed",
            source=lengths.source or f"log-normal, CV {lengths.cv:g}; --mean-output-tokens, --counts or --trace",
        ),
        "context_tokens": PlanInput(
            value=scenario.model.context_tokens, unit="tokens", kind="assumed", source="--context-tokens"
        ),
        "prompt_tokens": PlanInput(
            value=scenario.prompt_tokens,
            unit="tokens, mean",
            kind="measured" if scenario.prompts_by == "the trace's" else "assumed",
            source=scenario.prompts_by,
        ),
    }
