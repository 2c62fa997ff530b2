"""A plan as a rich table, and as the file that `lora-server serve --config` reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from provisioning.plan.verify import Trial
from provisioning.report.provenance import provenance
from provisioning.report.result import NOTES, Result

if TYPE_CHECKING:
    from rich.console import Console

_GIB = 2**30


def headline(result: Result) -> str:
    """One line: the answer."""
    scenario, candidate, choice = result.scenario, result.candidate, result.verified.choice
    if not result.feasible:
        return (
            f"INFEASIBLE with up to {scenario.max_gpus} GPUs; binding constraint: {choice.binding}; "
            f"closest was {candidate.layout}"
        )
    return (
        f"{candidate.gpus} LoRA Server GPUs as {candidate.layout} ({result.nodes} node(s)) beside "
        f"{scenario.instances} instances of {scenario.model.instance_gpus} GPU(s); binding: {choice.binding}"
    )


def rows(result: Result) -> Iterator[tuple[str, str, str]]:
    """(what, value, limit or remark) of the plan."""
    scenario, candidate = result.scenario, result.candidate
    latency, limit, model = candidate.latency, scenario.limit, scenario.model
    num = scenario.workload.num_adapters
    yield "cache slots", f"{candidate.slots}", f">= {scenario.min_cache_slots} of {num} adapters"
    yield "IAR, model", f"{scenario.iar(candidate.slots):.4f}", f">= {scenario.iar_target:g}"
    yield from _simulated(result)
    parts = f"{latency.receive.value:.0f} + {latency.compute.value:.0f} + {latency.send.value:.0f}"
    yield "recv + comp + send", f"{parts} = {latency.total:.0f} us", f"<= {limit.ffn:.0f} us (Eq. 5)"
    busiest = latency.longest * scenario.instances
    yield f"slowest x {scenario.instances}", f"{busiest:.0f} us", f"<= {limit.layer:.0f} us (Eq. 6)"
    yield "decode step", f"{candidate.step_us / 1e3:.1f} ms", f"TPOT SLO {scenario.slo.tpot_us / 1e3:g} ms"
    yield (
        "visible load",
        f"{candidate.load_us / 1e3:.1f} ms",
        f"TTFT SLO {scenario.slo.ttft_us / 1e3:g} ms, with a step",
    )
    memory = model.cluster.adapter_memory_bytes / _GIB
    yield (
        "adapter memory per GPU",
        f"{memory:.1f} GiB",
        f"{model.cluster.usable_memory:.0%} of {model.cluster.gpu.name}",
    )


def _simulated(result: Result) -> Iterator[tuple[str, str, str]]:
    verdict, scenario = result.verified.verdict, result.scenario
    if verdict is None:
        yield "IAR, simulated", "not simulated", ""
        return
    low, high = verdict.immediate.low, verdict.immediate.high
    held = "holds" if verdict.holds else "REFUTED"
    yield "IAR, simulated", f"{verdict.immediate.mean:.4f} [{low:.4f}, {high:.4f}]", f"{verdict.seeds} seeds: {held}"
    at = verdict.ttft_s_at_percentile
    what = f"TTFT p{scenario.slo.percentile:g}, simulated"
    yield what, f"{at.mean * 1e3:.1f} ms [{at.low * 1e3:.1f}, {at.high * 1e3:.1f}]", "without prefill"
    adapters = verdict.adapters_within_slo
    yield "adapters within SLO", f"{adapters.mean:.1%}", ">= 90 % of their requests in time"


def print_table(result: Result, console: Console) -> None:
    """Headline, constraints, refutations, coupled verdict, sensitivity, cost, notes."""
    from rich.table import Table

    console.print(headline(result), style="bold")
    table = Table("", "plan", "limit", box=None, pad_edge=False)
    for row in rows(result):
        table.add_row(*row)
    console.print(table)
    for line in sizing(result):
        console.print(line)
    console.print(result.as_json()["coupled"]["verdict"])
    _print_sensitivity(result, console)
    if result.headroom is not None:
        console.print(f"The load may grow by x{result.headroom:.2f} before this plan fails, by the model.")
    cost = result.cost()
    if cost is not None:
        console.print("  ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in cost.items()))
    kinds = [entry.kind for entry in provenance(result.scenario, result.candidate).values()]
    counted = ", ".join(f"{kinds.count(kind)} {kind}" for kind in ("measured", "extrapolated", "assumed"))
    console.print(f"Provenance: {counted}; each in --json.", style="dim")
    for note in NOTES:
        console.print(note, style="dim")


def sizing(result: Result) -> Iterator[str]:
    """How the simulation moved the plan: what it refuted, above and below the model's, and where it went lower."""
    verified = result.verified
    for item in verified.refuted:
        whose = "The model's plan of" if item.candidate.gpus == verified.model_gpus else "A plan of"
        yield f"{whose} {_tried(item)} was refuted."
    if verified.choice.binding == "simulation":
        yield f"GPUs or slots were added: {result.candidate.gpus} GPU(s) with {result.candidate.slots} slots hold."
    if verified.below_model:
        model = f"asks for {verified.model_gpus} GPU(s)" if verified.model_gpus else "has no plan"
        yield (
            f"The model {model} (M* = {result.scenario.min_cache_slots}), but the simulation went below it: "
            f"{result.candidate.gpus} GPU(s) hold the target. What follows by the model is too pessimistic."
        )
    for item in verified.refuted_below:
        yield f"Fewer slots do not: {_tried(item)} was refuted."


def _tried(item: Trial) -> str:
    layout, immediate, late = item.candidate.layout, item.verdict.immediate, item.verdict.within_ttft
    return (
        f"{item.candidate.gpus} GPU(s) ({layout}, {item.candidate.slots} slots; simulated immediate rate "
        f"{immediate.mean:.4f} [{immediate.low:.4f}, {immediate.high:.4f}], within the TTFT SLO {late.mean:.4f})"
    )


def _print_sensitivity(result: Result, console: Console) -> None:
    from rich.table import Table

    if not result.variants:
        return
    plan = "this plan" if result.feasible else str(result.candidate.layout)
    table = Table("if", "GPUs", "layout", f"IAR of {plan}", "meets, by the model", box=None, pad_edge=False)
    for item in result.variants:
        met = "yes" if item.meets_at_plan else f"no: {item.binding_constraint}"
        table.add_row(item.change, str(item.gpus or "-"), item.layout or "-", f"{item.iar_at_plan:.4f}", met)
    console.print(table)


def plan_yaml(result: Result) -> str:
    """Keys that `lora-server serve --config` knows; everything else is a comment."""
    import yaml

    layout, name = str(result.candidate.layout), result.base_model
    comments = [
        headline(result),
        *sizing(result),
        *(f"{what}: {value} ({remark})" for what, value, remark in rows(result)),
        *NOTES,
    ]
    comments += [
        "Flags win over this file. Yours to give: --adapters DIR, and --base-model PATH where this is a preset."
    ]
    settings: dict[str, object] = {"base_model": name, "layout": layout}
    if result.nodes > 1:
        comments += ["Each node also needs --node-rank I and --controller HOST:PORT."]
        settings["nodes"] = result.nodes
    return "".join(f"# {text}\n" for text in comments) + yaml.safe_dump(settings, sort_keys=False)
