"""The plan as the file that `lora-server serve --config` reads, and what today's server does not meet of it."""

from __future__ import annotations

import math
from collections.abc import Iterator

from provisioning.report import words
from provisioning.report.render import headline, question, remarks, rows
from provisioning.report.result import NOTES, Result
from provisioning.report.tables import sides

COMMAND = "command: "
_ROWS = 256  # a message's rows come in multiples of this


def plan_yaml(result: Result) -> str:
    """Keys that `lora-server serve --config` knows; everything else is a comment."""
    import yaml

    comments = [
        question(result),
        headline(result),
        result.worth,
        *result.warnings,
        *remarks(result),
        *(f"{what}: {value} ({remark})" for what, value, remark in rows(result)),
        *(f"{what}: {ours}; coupled: {theirs}" for what, ours, theirs in sides(result)),
        *NOTES,
        *unmet(result),
        "Flags win over this file. Yours to give: --adapters DIR, and --base-model PATH where this is a preset.",
    ]
    if result.serving_nodes > 1:
        comments.append("Each node also needs --node-rank I, and all but the first --controller HOST:PORT.")
    if result.command:
        comments.append(f"{COMMAND}{result.command}")  # `provision watch` plans anew with it
    return "".join(f"# {text}\n" for text in comments) + yaml.safe_dump(settings(result), sort_keys=False)


def settings(result: Result) -> dict[str, object]:
    """What the plan decides of a server's settings."""
    scenario, candidate = result.scenario, result.candidate
    return {
        "base_model": result.base_model,
        "layout": str(candidate.layout),
        "nodes": result.serving_nodes,
        "device": "cuda",
        "dtype": "bfloat16",
        "device_pool": candidate.slots * scenario.adapter_bytes(candidate.layout),
        "host_pool": _elsewhere(result) * scenario.adapter_bytes(candidate.layout),
        "max_step_rows": _message_rows(result),
        "wire": scenario.model.wire,
    }


def unmet(result: Result) -> Iterator[str]:
    """What the plan counts on and today's server does not do, or nobody has seen it do."""
    scenario, candidate = result.scenario, result.candidate
    cluster = scenario.model.cluster
    yield (
        f"Not met today: the plan's wire is {words.number(cluster.link_gbps)} Gb/s per GPU, driven from the GPUs as in "
        "the paper. The server has CUDA IPC within a host, and TCP between hosts."
    )
    if not scenario.model.profile.points:
        yield "Not seen: step times are modelled, from the paper's Table 4; measure yours, and give --profile."
    if scenario.instances > 1:
        yield "Not seen: several engines of this load on one server, with receive, compute and send overlapped."
    if _elsewhere(result):
        shards = math.ceil(candidate.gpus / result.serving_nodes)
        pool = _elsewhere(result) * scenario.adapter_bytes(candidate.layout) * shards
        yield (
            f"Memory of the host: {words.size(pool)} a node for the {_elsewhere(result):,} adapters without a slot; "
            "with less, lower host_pool: what then comes from disk takes longer than the plan's load."
        )


def _elsewhere(result: Result) -> int:
    return max(result.scenario.workload.num_adapters - result.candidate.slots, 0)


def _message_rows(result: Result) -> int:
    """Rows times experts of a step of the busiest instance, in one message as modelled; now and then there are more."""
    busiest, top_k = result.scenario.busiest, result.scenario.model.spec.top_k
    entries = math.ceil(busiest + 3 * math.sqrt(busiest)) * top_k
    return min(-(-entries // _ROWS) * _ROWS, 65536)
