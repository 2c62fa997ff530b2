"""The plan as the file that `lora-server serve --config` reads, and what today's server does not meet of it."""

from __future__ import annotations

import math
from collections.abc import Iterator

from provisioning.plan.classes import served_as
from provisioning.report import words
from provisioning.report.render import headline, question, remarks, rows, sides
from provisioning.report.result import Result

COMMAND = "command: "
_ROWS = 256  # a message's rows come in multiples of this


def plan_yaml(result: Result) -> str:
    """Write the file for `lora-server serve --config`: the keys that it knows, and everything else as comments."""
    import yaml

    comments = [
        question(result),
        headline(result),
        result.worth,
        *result.warnings,
        *remarks(result),
        *(f"{what}: {value} ({remark})" for what, value, remark in rows(result)),
        *(f"{what}: {ours}; coupled: {theirs}" for what, ours, theirs in sides(result)),
        *result.notes,
        *unmet(result),
        "Flags win over this file. Yours to give: --adapters DIR, and --base-model PATH where this is a preset.",
    ]
    if result.serving_nodes > 1:
        comments.append("Each node also needs --node-rank I, and all but the first --controller HOST:PORT.")
    if result.command:
        comments.append(f"{COMMAND}{result.command}")  # `provision watch` plans anew with it
    return "".join(f"# {text}\n" for text in comments) + yaml.safe_dump(settings(result), sort_keys=False)


def settings(result: Result) -> dict[str, object]:
    """Return the server settings that the plan decides."""
    scenario, candidate = result.scenario, result.candidate
    classes = {"classes": served_as(scenario.classes)} if scenario.classes else {}
    return {
        "base_model": result.base_model,
        "layout": str(candidate.layout),
        "nodes": result.serving_nodes,
        **({"replicas": scenario.replicas} if scenario.replicas > 1 else {}),
        "device": "cuda",
        "dtype": "bfloat16",
        "device_pool": min(candidate.slots, scenario.workload.num_adapters)
        * scenario.cache.adapter_bytes(candidate.layout),
        "host_pool": _elsewhere(result) * scenario.cache.adapter_bytes(candidate.layout),
        "max_step_rows": _message_rows(result),
        "wire": scenario.model.wire,
        **classes,
    }


def unmet(result: Result) -> Iterator[str]:
    """List what the plan relies on and today's server does not do, or has never been measured doing."""
    scenario, candidate = result.scenario, result.candidate
    cluster = scenario.model.cluster
    transport = scenario.model.transport.name
    yield (
        f"Planned for transport {transport} at {words.number(cluster.link_gbps)} Gb/s per GPU: start engines with "
        f"LORA_SERVER_TRANSPORT={transport}{f', the server with {flags}' if (flags := server_flags(result)) else ''}. "
        "By default they use cuda_ipc or shm within a host and tcp between hosts; --transport plans for these."
    )
    if transport == "nvshmem":
        yield "Unmeasured: nvshmem on a GPU; it has run on emulated ones."
    if transport == "gpu":
        yield "Unmeasured: gpu between two GPUs; it has run on one."
    if scenario.prefill == "apart":
        yield "Unmeasured: engines that decode only (vLLM's --kv-transfer-config) beside this server."
    if not scenario.model.profile.points:
        yield "Unmeasured: step times, which come from the paper's Table 4; measure yours and give --profile."
    if scenario.instances > 1:
        yield "Unmeasured: several engines of this load on one server, with receive, compute and send overlapped."
    if _elsewhere(result):
        shards = math.ceil(candidate.gpus * scenario.replicas / result.serving_nodes)
        pool = _elsewhere(result) * scenario.cache.adapter_bytes(candidate.layout) * shards
        yield (
            f"Memory of the host: {words.size(pool)} a node for the {_elsewhere(result):,} adapters without a slot; "
            "with less, lower host_pool: loads from disk take longer than the plan assumes."
        )


def server_flags(result: Result) -> str:
    """Return the `lora-server serve` options of the planned transport; empty for those that every server has."""
    name, scenario = result.scenario.model.transport.name, result.scenario
    if name == "nvshmem":
        return f"--gpu-transport nvshmem --nvshmem-clients {scenario.engine_gpus}"
    return f"--gpu-transport {name}" if name in ("gpu", "cuda_ipc") else ""


def _elsewhere(result: Result) -> int:
    return max(result.scenario.workload.num_adapters - result.candidate.slots, 0)


def _message_rows(result: Result) -> int:
    """Compute rows times experts of the busiest instance's steps, up to three sigma above the mean; few have more."""
    busiest, top_k = result.scenario.busiest, result.scenario.model.spec.top_k
    entries = math.ceil(busiest + 3 * math.sqrt(busiest)) * top_k
    return min(-(-entries // _ROWS) * _ROWS, 65536)
