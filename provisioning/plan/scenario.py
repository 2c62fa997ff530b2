"""Turn options into a `Scenario`. Every check on an option is here, or in `inputs` with its name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lora_server import spec
from lora_server.placement import MOST_REPLICAS
from lora_server.slo import Slo
from provisioning.inputs import InputError, count, named, non_negative, normalised, one_of, positive, share
from provisioning.model import engine_steps, memory
from provisioning.model import profile as profiles
from provisioning.model.engine_steps import EngineProfile
from provisioning.model.geometry import BASE_DTYPES, BaseDtype, Wire
from provisioning.model.hardware import GIB, Cluster, gpu_named
from provisioning.model.latency import StepModel
from provisioning.model.library import read as read_library
from provisioning.model.profile import Profile
from provisioning.model.transports import Transport, transport_named
from provisioning.plan import classes
from provisioning.plan.flags import PlanFlags, WorkloadFlags
from provisioning.plan.question import Prefill, Scenario
from provisioning.workload.counts import read_counts
from provisioning.workload.workload import Workload, zipf

MOST_ADAPTERS = 1_000_000
MOST_TOKENS = 2**31
MOST_GPUS = 1024
MOST_CV = 100.0  # longer-tailed arrivals do not settle within a run
_MOST = 1e9  # of what has no limit of its own: nothing that exists comes near it
# Instance #GPU of the paper's Table 3.
_INSTANCE_GPUS = {
    "gpt-oss-20b": 1,
    "gpt-oss-20b-paper": 1,
    "qwen3-30b-a3b": 2,
    "mixtral-8x7b": 2,
    "scaled-moe": 4,
    "dbrx": 4,
}


def workload(flags: WorkloadFlags, seed: int = 0, window: float | None = None) -> Workload:
    """Read popularity, lengths, burstiness and load over time from --adapters and --zipf, --counts or --trace."""
    if window is not None and flags.trace is None:
        raise InputError("--window: only a trace has a load over time; give --trace too, or leave it out")
    if flags.counts is not None and any(given is not None for given in (flags.trace, flags.adapters, flags.zipf)):
        raise InputError("--counts: give it alone, without --trace, --adapters or --zipf")
    skew = non_negative(1.2 if flags.zipf is None else flags.zipf, "--zipf")
    if flags.trace is not None:
        from provisioning.workload import traces

        num = count(512 if flags.adapters is None else flags.adapters, "--adapters", 1, MOST_ADAPTERS)
        drawn = traces.ZipfAdapters(num_adapters=num, skew=skew, seed=seed)
        found = traces.load(flags.trace, drawn, window)
        if found.zipf_skew is None and (flags.adapters is not None or flags.zipf is not None):
            flag = "--zipf" if flags.adapters is None else "--adapters"
            raise InputError(f"{flag}: {flags.trace} says which adapters are called, and how often; leave it out")
        return _with_lengths(found, flags).sized_for(window)
    if flags.counts is not None:
        return _with_lengths(read_counts(flags.counts), flags)
    if flags.adapters is None:
        raise InputError("--adapters: missing; give --adapters N with --zipf S, or --counts FILE, or --trace FILE")
    num = count(flags.adapters, "--adapters", 1, MOST_ADAPTERS)
    popularity = normalised(zipf(skew, num), "--zipf")
    return _with_lengths(Workload(popularity=popularity, source=f"Zipf({skew:g}, {num}), given", zipf_skew=skew), flags)


def _with_lengths(found: Workload, flags: WorkloadFlags) -> Workload:
    cv = non_negative(flags.burst_cv, "--burst-cv", MOST_CV)
    if cv != 1.0 and flags.trace is not None:
        raise InputError("--burst-cv: a trace is replayed with its own gaps; leave it out")
    if cv != 1.0:
        found = replace(found, cv=cv)
    if flags.mean_output_tokens is None:
        return found
    return found.with_mean_tokens(positive(flags.mean_output_tokens, "--mean-output-tokens", MOST_TOKENS))


@dataclass(frozen=True, kw_only=True)
class Load:
    """Load at the peak: L and LB; or a rate, with the bound on its LB that the TPOT SLO sets."""

    instances: int
    global_batch: float
    request_rate: float | None = None
    free_instances: bool = False
    most_batch: float = math.inf


def load(flags: PlanFlags, found: Workload, objective: Slo) -> Load:
    """Read --instances * --batch-size, or a rate: then either of the two is a limit, and the missing one is sought.

    What is given is the mean over time, but for a limit, which holds at the peak too.
    """
    instances = None if flags.instances is None else count(flags.instances, "--instances", 1, int(_MOST))
    batch = None if flags.batch_size is None else positive(flags.batch_size, "--batch-size", _MOST)
    rate = None if flags.request_rate is None else positive(flags.request_rate, "--request-rate", _MOST)
    if rate is None and (instances is None or batch is None):
        rate = found.own_rate
    if rate is None:
        if instances is None or batch is None:
            missing = "--instances" if instances is None else "--batch-size"
            raise InputError(f"{missing}: missing; give --instances and --batch-size, or --request-rate")
        return Load(instances=instances, global_batch=instances * batch * found.peak)
    if instances is not None and batch is not None:
        raise InputError("--request-rate: give it, or --instances and --batch-size, not all three")
    return Load(
        instances=instances or 1,
        global_batch=rate * found.peak * found.lengths.mean_tokens * objective.tpot_us * 1e-6,
        request_rate=rate * found.peak,
        free_instances=instances is None,
        most_batch=batch or math.inf,
    )


def _cluster(flags: PlanFlags, transport: Transport, profile: Profile) -> Cluster:
    """Make the cluster. Without --link-gbps the link is the NICs', or what the transport uses in their place."""
    gpu, machine = gpu_named(flags.gpu, flags.gpu_memory_gib, profile), profile.machine
    host_link = Cluster(gpu=gpu).host_link_gb_per_s if machine is None else machine.load_gb_per_s
    if flags.host_link_gb_per_s is not None:
        host_link = positive(flags.host_link_gb_per_s, "--host-link-gb-per-s")
    rows = host_link if machine is None else machine.memory_gb_per_s
    own_gbps = transport.link_gbps(gpu, Cluster(gpu=gpu).link_gbps, rows)
    return Cluster(
        gpu=gpu,
        usable_memory=Cluster(gpu=gpu).usable_memory if machine is None else 1.0,
        gpus_per_node=count(flags.gpus_per_node, "--gpus-per-node", 1, MOST_GPUS),
        link_gbps=own_gbps if flags.link_gbps is None else positive(flags.link_gbps, "--link-gbps"),
        host_link_gb_per_s=host_link,
    )


def _measured(flags: PlanFlags, transport: Transport, asked: Mapping[str, Any]) -> tuple[Profile, Cluster]:
    """Return the given profile, which must fit what is asked, or one of the package's that does; and the cluster."""
    given = flags.profile is not None
    found = profiles.shipped(asked) if flags.profile is None else profiles.load(flags.profile).checked(asked)
    cluster = _cluster(flags, transport, found)
    linked = {"link_gbps": cluster.link_gbps}
    return (found.checked(linked) if given or found.differs(linked) is None else Profile()), cluster


def _prompt_tokens(flags: PlanFlags, found: Workload) -> tuple[float, str]:
    """Return (mean prompt tokens of a request, their source). The mean context includes half of the output."""
    if flags.prompt_tokens is not None:
        return non_negative(flags.prompt_tokens, "--prompt-tokens", MOST_TOKENS), "by --prompt-tokens"
    if found.trace is not None and found.trace.input_tokens is not None:
        return float(found.trace.input_tokens.mean()), "the trace's"
    context = positive(flags.context_tokens, "--context-tokens", MOST_TOKENS)
    return max(context - found.lengths.mean_tokens / 2, 1.0), "by --context-tokens"


def _replicas(flags: PlanFlags, transport: Transport) -> int:
    replicas = count(flags.replicas, "--replicas", 1, MOST_REPLICAS)
    if replicas > 1 and transport.name in ("nvshmem", "gpu"):
        raise InputError(
            f"--replicas: got {replicas} with --transport {transport.name}, expected --transport cuda_ipc, shm or tcp, "
            "with which the server has replicas"
        )
    return replicas


def _engine_profile(flags: PlanFlags, asked: Load) -> EngineProfile | None:
    if flags.engine_profile is None:
        return None
    if flags.dispatch != "any":
        raise InputError(f"--dispatch: got {flags.dispatch!r} with --engine-profile, expected 'any', as vLLM schedules")
    if flags.coupled_split == "paper":
        raise InputError("--coupled-split: got 'paper' with --engine-profile, expected 'tuned' or a share")
    if asked.request_rate is None:
        raise InputError("--batch-size: with --engine-profile the batch follows from the rate; give --request-rate")
    return engine_steps.read(flags.engine_profile)


def split_of(text: str) -> float | None:
    """Parse the share of the memory for adapters; None if it is to be searched."""
    if text in ("tuned", "paper"):
        return None if text == "tuned" else 0.5
    try:
        number = float(text)
    except ValueError:
        raise InputError(f"--coupled-split: got {text!r}, expected tuned, paper or a share such as 0.5") from None
    return share(number, "--coupled-split")


def instance_gpus(given: int | None, geometry: spec.ModelSpec, cluster: Cluster, dtype: BaseDtype) -> int:
    """Return the GPUs of an LLM instance: as given, or the paper's, or the fewest that hold the weights."""
    needed = memory.smallest_instance(geometry, cluster, dtype)
    if needed > MOST_GPUS:
        raise InputError(
            f"--gpu-memory-gib: got {cluster.gpu.memory_bytes / GIB:g}, but the weights of {geometry.name} do not fit "
            f"on {MOST_GPUS:,} such GPUs; give more memory"
        )
    if given is None:
        return max(_INSTANCE_GPUS.get(geometry.name, 1), needed)
    return checked_instance_gpus(given, "--instance-gpus", geometry, cluster, dtype)


def checked_instance_gpus(given: int, flag: str, geometry: spec.ModelSpec, cluster: Cluster, dtype: BaseDtype) -> int:
    """Return the given number if the weights fit; raises InputError."""
    gpus = count(given, flag, 1, MOST_GPUS)
    if memory.instance_free_bytes(geometry, cluster, gpus, dtype) <= 0:
        raise InputError(
            f"{flag}: got {gpus}, but the weights of {geometry.name} do not fit; "
            f"give {memory.smallest_instance(geometry, cluster, dtype)} or more"
        )
    return gpus


def scenario(flags: PlanFlags) -> Scenario:
    """Make the planner's question from flags; raises InputError with one line that names the flag."""
    objective, geometry = named("--slo", Slo.parse, flags.slo), named("--model", spec.load, flags.model)
    dtype = BASE_DTYPES[one_of("--base-dtype", flags.base_dtype, *BASE_DTYPES)]
    library = None if flags.from_adapters is None else read_library(flags.from_adapters)
    if library is not None and flags.adapters is None and flags.counts is None and flags.trace is None:
        flags = replace(flags, adapters=len(library.names))
    found = workload(flags, count(flags.seed, "--seed", 0), flags.window)
    rank = float(count(flags.lora_rank, "--lora-rank", 1, int(_MOST)))
    attention = 0.0
    if library is not None:
        found, rank, attention = library.sized(found, geometry, shared_a=flags.shared_a)
    transport = transport_named(flags.transport)
    round_trip = flags.round_trip_us
    efficiency = transport.efficiency(None if round_trip is None else non_negative(round_trip, "--round-trip-us", 1e6))
    wire: Wire = one_of("--wire", flags.wire, "exact", "e4m3")
    measured = {
        "model": geometry.name,
        "geometry": geometry.geometry,
        "gpu": flags.gpu.lower(),
        "lora_rank": rank,
        "wire": wire,
        "transport": transport.name,
    }
    profile, cluster = _measured(flags, transport, measured)
    prompts, prompts_by = _prompt_tokens(flags, found)
    prefill: Prefill = one_of("--prefill", flags.prefill, "shared", "apart")
    asked = load(flags, found, objective)
    engine_profile = _engine_profile(flags, asked)
    if engine_profile is not None:
        engine_profile.check(geometry.geometry, rank)
    most_gpus = count(flags.max_gpus, "--max-gpus", 1, MOST_GPUS)
    target = objective.share if flags.iar is None else share(flags.iar, "--iar")
    return Scenario(
        slo=objective,
        workload=found,
        model=StepModel(
            spec=geometry,
            cluster=cluster,
            popularity=found.in_flight,
            lora_rank=rank,
            attention_share=attention,
            tensor_parallel=one_of("--engine-parallel", flags.engine_parallel, "ep", "tp") == "tp",
            transport=transport,
            efficiency=efficiency.with_attention() if attention else efficiency,
            prompt_tokens=prompts if prefill == "shared" else 0.0,
            output_tokens=found.lengths.mean_tokens,
            instance_gpus=instance_gpus(flags.instance_gpus, geometry, cluster, dtype),
            context_tokens=positive(flags.context_tokens, "--context-tokens", MOST_TOKENS),
            shared_a=flags.shared_a,
            wire=wire,
            base_dtype=dtype,
            prefill_tokens=non_negative(flags.prefill_tokens, "--prefill-tokens", MOST_TOKENS),
            profile=profile,
        ),
        **vars(asked),
        prefill=prefill,
        prompt_tokens=prompts,
        prompts_by=prompts_by,
        settled=asked.request_rate is None,
        iar_target=target,
        dispatch=one_of("--dispatch", flags.dispatch, "any", "by-adapter"),
        eq6=one_of("--eq6", flags.eq6, "stage", "printed"),
        iar_asked=flags.iar is not None,
        coupled_split=split_of(flags.coupled_split),
        coupled_routed=flags.coupled_split != "paper",
        max_gpus=most_gpus,
        spare_gpus=count(flags.spare_gpus, "--spare-gpus", 0, most_gpus - 1),
        replicas=_replicas(flags, transport),
        whole_nodes=flags.whole_nodes,
        engine_profile=engine_profile,
        classes=() if flags.classes is None else classes.read(flags.classes, found, objective),
    )
