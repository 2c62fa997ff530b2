"""Options of `provision` and `provision simulate`: each with its type, its default and its help, here alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated


@dataclass(frozen=True, kw_only=True)
class WorkloadFlags:
    """Options that say what is called and how often, unchecked; None where an option was not given."""

    adapters: Annotated[int | None, "Number of adapters N (required without --counts or --trace)."] = None
    zipf: Annotated[float | None, "Popularity 1/i^S; 0 is uniform (default: 1.2)."] = None
    counts: Annotated[Path | None, "Calls per adapter, and mean output tokens: JSON or CSV (default: none)."] = None
    trace: Annotated[Path | None, "CSV or JSONL trace, or a ServeGen directory (default: none)."] = None
    batch_size: Annotated[
        float | None, "Requests in flight per instance, on average (default: follows from --request-rate)."
    ] = None
    request_rate: Annotated[
        float | None, "Requests/s in all; --batch-size is then an upper limit (default: the trace's)."
    ] = None
    mean_output_tokens: Annotated[float | None, "Output tokens per request (default: 256, or the file's)."] = None
    burst_cv: Annotated[float, "Coefficient of variation of the gaps between arrivals; 1 is Poisson."] = 1.0


@dataclass(frozen=True, kw_only=True)
class PlanFlags(WorkloadFlags):
    """Options of the planner's question."""

    slo: Annotated[str, "Objectives, such as 'ttft_p95=250ms,tpot_avg=100ms' (required)."]
    model: Annotated[str, "Preset (see `provision models`) or model directory (required)."]
    instances: Annotated[
        int | None, "LLM instances L (default: for a rate, the number with the fewest GPUs in total)."
    ] = None
    lora_rank: Annotated[int, "Rank of the adapters."] = 64
    from_adapters: Annotated[
        str | None, "Read ranks and sites from a directory, a server's HOST:PORT or its list (default: none)."
    ] = None
    iar: Annotated[float | None, "Immediate admission rate to reach (default: the TTFT objective's share)."] = None
    window: Annotated[
        float | None, "Length in seconds of the trace's peak to size for (default: 1/48 of it, or 1,000 requests)."
    ] = None
    classes: Annotated[Path | None, "SLO classes, YAML: name, slo, adapters (default: --slo for all)."] = None
    gpu: Annotated[
        str, "h200, h100, hopper-96, h20, a100-80, a100-40, b200, b300, l40s, or a profile's, such as cpu."
    ] = "h200"
    gpu_memory_gib: Annotated[float | None, "Memory of a GPU in GiB (default: the preset's)."] = None
    gpus_per_node: Annotated[int, "GPUs of a node, which has a host to itself."] = 8
    max_gpus: Annotated[int, "Most GPUs of the LoRA Server to consider, spares included."] = 64
    spare_gpus: Annotated[int, "Standby GPUs on top, for failures; 1 is N+1."] = 0
    replicas: Annotated[
        int, "Copies of every shard on other nodes, the server's --replicas; all but one are spares."
    ] = 1
    whole_nodes: Annotated[bool, "Consider whole nodes only, spares included."] = False
    instance_gpus: Annotated[
        int | None, "GPUs of an LLM instance (default: the paper's, or the fewest that hold the weights)."
    ] = None
    engine_parallel: Annotated[
        str, "How the GPUs of an instance share experts: ep, or tp, whose GPUs each send all tokens."
    ] = "ep"
    base_dtype: Annotated[str, "Base weights: bf16, fp8 or mxfp4 (experts only)."] = "bf16"
    transport: Annotated[str, "How rows travel: nvshmem (as the paper's network), gpu, cuda_ipc, shm or tcp."] = (
        "nvshmem"
    )
    wire: Annotated[str, "Element size of rows: exact (2 bytes) or e4m3 (1), the server's --wire."] = "exact"
    link_gbps: Annotated[float | None, "Network per GPU and direction, Gb/s (default: 400, or the transport's)."] = None
    round_trip_us: Annotated[
        float | None, "Round trip to the server, per exchange (default: 50 over tcp, else in the fitted constants)."
    ] = None
    host_link_gb_per_s: Annotated[float | None, "Host to GPU, GB/s (default: 50, or the profile's)."] = None
    context_tokens: Annotated[float, "KV cache per request in tokens, for memory and attention time."] = 1024.0
    prefill_tokens: Annotated[float, "Largest prefill chunk; each GPU reserves its activations."] = 2048.0
    prompt_tokens: Annotated[
        float | None, "Prompt tokens per request that miss the prefix cache (default: the trace's, or by the context)."
    ] = None
    prefill: Annotated[
        str, "shared: decoding instances prefill, too, as vLLM's do; apart: other instances do, as in the paper."
    ] = "shared"
    dispatch: Annotated[
        str, "any: to the instance with the fewest requests; by-adapter: to the adapter's own, as in the paper."
    ] = "any"
    coupled_split: Annotated[
        str,
        "Adapter memory of coupled instances: tuned or a share, behind a LoRA-aware router; paper: half, none.",
    ] = "tuned"
    eq6: Annotated[str, "Eq. 6 per stage (stage), or as the paper prints it (printed)."] = "stage"
    shared_a: Annotated[bool, "gate and up share one A (fused layout)."] = False
    profile: Annotated[
        Path | None, "Measured times, written by `lora-server profile` (default: the package's, where one fits)."
    ] = None
    engine_profile: Annotated[
        Path | None,
        "Measured steps, by `lora-server profile-vllm`: simulates engines that schedule as vLLM does (default: none).",
    ] = None
    seed: Annotated[int, "Seed for adapters drawn for a trace."] = 0


@dataclass(frozen=True, kw_only=True)
class SimulateFlags(WorkloadFlags):
    """Options of `provision simulate`."""

    cache_slots: Annotated[int, "Adapters that a cache holds."]
    instances: Annotated[int, "LLM instances."] = 1
    max_batch: Annotated[int | None, "Most requests in one batch (default: unlimited)."] = None
    mode: Annotated[str, "disaggregated (one shared cache) or coupled (one cache per instance)."] = "disaggregated"
    order: Annotated[str, "fcfs, or sjf with known lengths."] = "fcfs"
    dispatch: Annotated[
        str,
        "any: the instance with the fewest requests (coupled: that has the adapter); by-adapter: the adapter's own.",
    ] = "any"
    step_ms: Annotated[float, "Time of a decode step."] = 25.0
    engine_profile: Annotated[
        Path | None,
        "Measured steps, by `lora-server profile-vllm`: schedules as vLLM does (default: none, by --step-ms).",
    ] = None
    prompt_tokens: Annotated[int, "Prompt tokens per request, with --engine-profile; a trace has its own."] = 512
    load_ms: Annotated[float, "Time that a cold adapter adds."] = 0.0
    requests: Annotated[int, "Requests per seed."] = 50_000
    seeds: Annotated[int, "Number of runs."] = 5
    ttft_slo_ms: Annotated[float, "TTFT objective for the shares in time."] = 250.0
