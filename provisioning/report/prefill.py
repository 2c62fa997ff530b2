"""Prompts: what of the instances' time and of the server's links they take, and where."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from provisioning.report import words
from provisioning.report.result import Result


def rows(result: Result) -> Iterator[tuple[str, str, str]]:
    """Build (what, value, remark) rows about prompts; none for a plan without prompts."""
    scenario, candidate = result.scenario, result.candidate
    if not scenario.model.prompt_tokens:
        return
    tokens = words.number(scenario.model.prompts(scenario.batch))
    busy = words.time(candidate.mean_step_us - candidate.decode_step_us)
    yield "prompts in a step", f"{tokens} tokens, {busy}", f"{words.number(scenario.prompt_tokens)} a request"
    receive, send, links = (words.number(value, 3) for value in _gb_per_s(result))
    yield "rows of prompts", f"{receive} GB/s in, {send} GB/s back", f"<= {links} GB/s, the server's links"


def sentence(result: Result) -> str:
    """State the share of the instances' time that prompts take, or the number of other instances that prefill."""
    scenario, coupled = result.scenario, result.coupled
    what = f"Prompts, {words.number(scenario.prompt_tokens)} tokens a request ({scenario.prompts_by}),"
    if scenario.prefill == "shared":
        batch = coupled.scenario.global_batch / coupled.instances
        theirs = 1 - coupled.scenario.model.without_prompts().coupled_step_us(batch) / coupled.step_us
        return f"{what} take {_share(result):.1%} of an instance's time; coupled, {theirs:.1%}."
    each = words.count(scenario.model.instance_gpus, "GPU")
    others = words.count(math.ceil(_prefill_instances(result)), "other instance")
    return f"{what} are computed by {others} of {each}, by FLOPs, on both sides; they are in no count here."


def as_json(result: Result) -> dict[str, Any]:
    """Return plain values; those of the server's links are null if other instances compute prompts."""
    scenario = result.scenario
    found: dict[str, Any] = {"tokens": scenario.prompt_tokens, "source": scenario.prompts_by}
    if scenario.prefill == "apart":
        return {**found, "prefill_instances": _prefill_instances(result)}
    receive, send, links = _gb_per_s(result)
    return {
        **found,
        "tokens_per_step": scenario.model.prompts(scenario.batch),
        "share_of_instances": _share(result),
        "server_receive_gb_per_s": receive,
        "server_send_gb_per_s": send,
        "server_links_gb_per_s": links,
    }


def _share(result: Result) -> float:
    return 1 - result.candidate.decode_step_us / result.candidate.mean_step_us


def _gb_per_s(result: Result) -> tuple[float, float, float]:
    """Compute (GB/s to the server, back, and what its links carry each way)."""
    scenario, candidate = result.scenario, result.candidate
    prompt = scenario.model.prompt(candidate.layout.ep)
    per_us = scenario.rate(candidate.mean_step_us) * scenario.model.prompt_tokens * scenario.model.spec.layers * 1e-6
    links = candidate.gpus * scenario.model.cluster.link_bytes_per_us * scenario.model.efficiency.link
    return per_us * prompt.receive_bytes * 1e-3, per_us * prompt.send_bytes * 1e-3, links * 1e-3


def _prefill_instances(result: Result) -> float:
    scenario = result.scenario
    per_us = scenario.rate(result.candidate.mean_step_us) * scenario.prompt_tokens * 1e-6
    return per_us * scenario.model.base.prefill_us
