"""A plan in words: sentences, and the rows of its tables."""

from __future__ import annotations

from collections.abc import Iterator

from provisioning.plan.band import SPREAD
from provisioning.plan.question import Scenario
from provisioning.plan.sensitivity import several_servers
from provisioning.plan.verify import Trial
from provisioning.report import classes, prefill, words
from provisioning.report.result import Result


def question(result: Result) -> str:
    """Say in one line what was asked."""
    scenario, workload = result.scenario, result.scenario.workload
    instances = words.count(scenario.instances, "instance")
    zipf = "" if workload.zipf_skew is None else f" (Zipf {workload.zipf_skew:g})"
    rate, tokens, peak = scenario.request_rate, workload.lengths.mean_tokens, workload.peak
    if rate is None:
        load = f"{instances} with {words.number(scenario.batch)} requests each in flight"
        load += " at the peak" if peak > 1 else ""
    else:
        load = f"{words.number(rate / peak)} requests/s of {words.number(tokens)} tokens"
        load += f" ({words.number(rate)} at the peak)" if peak > 1 else ""
    return question_with(scenario, f"{zipf}, {load}")


def question_with(scenario: Scenario, load: str) -> str:
    """Say the model, the GPUs, the adapters with their `load`, and the SLOs of a question."""
    model, slo, workload = scenario.model, scenario.slo, scenario.workload
    adapters, ranks = words.count(workload.num_adapters, "adapter"), workload.ranks or f"rank {model.lora_rank:,.12g}"
    return (
        f"{model.spec.name} on {model.cluster.gpu.name}: {adapters} of {ranks}{load}, "
        f"TTFT p{slo.percentile:g} within {words.time(slo.ttft_us)}, TPOT within {words.time(slo.tpot_us)}"
    )


def headline(result: Result) -> str:
    """Give the answer in one line."""
    scenario, candidate, choice = result.scenario, result.candidate, result.verified.choice
    if not result.feasible:
        return (
            f"INFEASIBLE with up to {words.count(scenario.max_gpus, 'GPU')}; binding constraint: {choice.binding}; "
            f"closest was {candidate.layout}{_several(result)}"
        )
    gpus, nodes = words.count(candidate.gpus, "LoRA Server GPU"), words.count(result.nodes, "node")
    instances, each = words.count(scenario.instances, "instance"), words.count(scenario.model.instance_gpus, "GPU")
    spare = f" and {candidate.spare_gpus:,} spare" if candidate.spare_gpus else ""
    spare += f" ({scenario.replicas} replicas)" if scenario.replicas > 1 else ""
    transport = f" over {scenario.model.transport.name}"
    return (
        f"{gpus} as {candidate.layout} on {nodes}{spare}, beside {instances} of {each}{transport}; "
        f"binding: {choice.binding}"
    )


def _several(result: Result) -> str:
    found = several_servers(result.variants)
    if found is None or found.gpus is None:
        return ""
    each = words.count(found.instances, "instance")
    return f". By the model {found.change} do: {words.count(found.gpus, 'GPU')} as {found.layout} beside {each} each"


def rows(result: Result) -> Iterator[tuple[str, str, str]]:
    """Build (what, value, limit or remark) rows of the plan."""
    scenario, candidate = result.scenario, result.candidate
    latency, limit, model = candidate.latency, scenario.limit(candidate.layout), scenario.model
    num = scenario.workload.num_adapters
    yield "cache slots", f"{candidate.slots:,}", f">= {scenario.cache.min_cache_slots:,} of {num:,} adapters"
    yield "immediate admission, model", f"{scenario.cache.iar(candidate.slots):.4f}", f">= {scenario.iar_target:g}"
    yield from _simulated(result)
    yield from _band(result)
    parts = f"{latency.receive.value:,.0f} + {latency.compute.value:,.0f} + {latency.send.value:,.0f}"
    parts += f" + {latency.round_trips_us:,.0f} of round trips" if latency.round_trips_us else ""
    yield "recv + comp + send", f"{parts} = {latency.total:,.0f} us", f"<= {limit.ffn:,.0f} us (Eq. 5)"
    form = "Eq. 6" if scenario.eq6 == "stage" else "Eq. 6, printed"
    busy_us = scenario.steps.busy_us(candidate.layout)
    yield f"slowest, {scenario.instances:,} served", f"{busy_us:,.0f} us", f"<= {limit.layer:,.0f} us ({form})"
    yield from prefill.rows(result)
    which = "requests, busiest inst." if scenario.dispatch == "by-adapter" else "requests per instance"
    yield which, words.number(scenario.busiest), f"<= {scenario.kv_requests:,} by KV memory"
    yield "decode step", words.time(candidate.step_us), f"TPOT SLO {words.time(scenario.slo.tpot_us)}"
    yield "visible load", words.time(candidate.load_us), f"TTFT SLO {words.time(scenario.slo.ttft_us)}, with a step"
    yield (
        "adapter memory per GPU",
        words.size(model.cluster.adapter_memory_bytes),
        f"{model.cluster.usable_memory:.0%} of {model.cluster.gpu.name}",
    )


def summary(result: Result) -> Iterator[str]:
    """Build the lines on cost and headroom."""
    cost, rival = result.cost(), result.coupled.gpus_needed
    if cost:
        beside = "" if rival is None else f"; coupled, {words.number(cost['coupled_per_hour'])}"
        yield f"Cost per hour, all GPUs: {words.number(cost['total_per_hour'])}{beside}."
    if result.headroom is not None:
        yield f"The load may grow by x{result.headroom:.2f} before this plan fails, by the model."


def remarks(result: Result) -> Iterator[str]:
    """Build the sentences below the tables."""
    yield from load_over_time(result)
    yield from worst_served(result)
    yield from sizing(result)
    yield from dispatch(result)
    yield from classes.sentences(result)
    yield prefill.sentence(result)


def load_over_time(result: Result) -> Iterator[str]:
    """Describe the load of a trace, and say whether the plan is sized for its peak."""
    found = result.scenario.workload.over_time
    if found is None:
        return
    yield f"Load over time: {words.sparkline(found.load_W.tolist())}"
    width, most = words.moment(found.window_s), f"{found.fullest:.2f} times the mean"
    if found.steady:
        yield f"It is steady: the fullest window of {width} has {most}, which chance explains."
    else:
        since = words.moment(found.start_s)
        yield f"Sized for its peak, {most}: {width} from {since} after its start (--window)."
    verdict = result.verified.verdict
    if verdict is not None and verdict.own is not None:
        yield (
            f"Of this very trace, {verdict.own:.1%} within the TTFT SLO{'' if found.steady else ' at its peak'}; the "
            f"intervals are the 5th and 95th percentile of {verdict.seeds} days of a process that is fitted to it."
        )
    if verdict is not None and verdict.worst_window is not None:
        start_s, share = verdict.worst_window
        yield f"Served worst for {width} from {words.moment(start_s)} after its start: {share:.1%} within the TTFT SLO."


def _simulated(result: Result) -> Iterator[tuple[str, str, str]]:
    verdict, scenario = result.verified.verdict, result.scenario
    if verdict is None:
        yield "within TTFT, simulated", "not simulated", ""
        return
    what = "seeds" if verdict.own is None else "days"
    held = f"{verdict.seeds} {what}: {'holds' if verdict.holds else 'REFUTED'}"
    yield "within TTFT, simulated", words.rate(verdict.within_ttft), f">= {verdict.target:.12g}, {held}"
    asked = "" if verdict.iar is None else f">= {verdict.iar:.12g}, by --iar"
    yield "immediate admission, simulated", words.rate(verdict.immediate), asked
    what = f"TTFT p{scenario.slo.percentile:g}, simulated"
    yield what, words.times(verdict.ttft_s_at_percentile), "without prefill" if verdict.tpot_s is None else ""
    if verdict.tpot_s is not None:
        yield "TPOT, simulated", words.times(verdict.tpot_s), f"<= {words.time(scenario.slo.tpot_us)}, by the mean"
    yield "adapters within SLO", f"{verdict.adapters_within_slo.mean:.1%}", ">= 90 % of their requests in time"


def _band(result: Result) -> Iterator[tuple[str, str, str]]:
    band = result.band
    if band is None:
        return
    what = "in time" if band.simulated else "immediate admission"
    missed = [what for what, met in ((what, band.holds), ("TPOT", band.meets_tpot)) if not met]
    longer = f"+{SPREAD * 100:g} %"
    yield (
        f"{what}, assumptions ±{SPREAD * 100:g} %",
        f"{band.low:.4f} to {band.high:.4f}",
        f"{longer}: {' and '.join(missed)} missed" if missed else f"{longer}: holds",
    )


def worst_served(result: Result) -> Iterator[str]:
    """Name the adapters with the smallest share of requests in time, if it is below the target."""
    verdict, workload = result.verified.verdict, result.scenario.workload
    worst = verdict.worst_served() if verdict is not None else []
    if worst:
        named = (f"{workload.name(index)} {share:.1%} of {calls:,}" for index, calls, share in worst)
        yield f"Served worst (requests within the TTFT SLO): {', '.join(named)}."


def sizing(result: Result) -> Iterator[str]:
    """Explain how the simulation moved the plan: the sizes it refuted, and smaller ones that hold."""
    verified, gpus = result.verified, words.count(result.candidate.gpus, "GPU")
    for place, item in enumerate(verified.refuted):
        which = "the model's plan" if verified.model_gpus and not place else "a plan"
        yield f"The simulation refuted {which} of {_tried(item)}."
    if verified.choice.binding == "simulation":
        yield f"GPUs or slots were added: {gpus} with {words.count(result.candidate.slots, 'slot')} suffice."
    if verified.below_model:
        model = f"asks for {words.count(verified.model_gpus, 'GPU')}" if verified.model_gpus else "has no plan"
        yield (
            f"The model {model} (M* = {result.scenario.cache.min_cache_slots:,}), but in the simulation the target "
            f"holds with {gpus}: the model's figures below are too pessimistic."
        )
    for item in verified.refuted_below:
        yield f"Fewer slots do not suffice: the simulation refuted {_tried(item)}."


def _tried(item: Trial) -> str:
    candidate, verdict = item.candidate, item.verdict
    tpot = "" if verdict.tpot_s is None else f", TPOT {words.time(verdict.tpot_s.mean * 1e6)}"
    return (
        f"{words.count(candidate.gpus, 'GPU')} ({candidate.layout}, {words.count(candidate.slots, 'slot')}; simulated "
        f"immediate admission {words.rate(verdict.immediate)}, within the TTFT SLO {verdict.within_ttft.mean:.4f}"
        f"{tpot})"
    )


def dispatch(result: Result) -> Iterator[str]:
    """State the gain of serving any adapter on any instance."""
    scenario = result.scenario
    if scenario.instances == 1:
        return
    busiest, mean = words.number(scenario.batch * scenario.loads.hottest), words.number(scenario.batch)
    if scenario.dispatch == "by-adapter":
        yield (
            f"Adapters are assigned to instances: the busiest holds {words.number(scenario.busiest)} requests, "
            f"where the mean is {mean}."
        )
        return
    yield (
        f"Any instance serves any adapter, so each holds {mean} requests; were adapters assigned to instances, "
        f"the busiest would hold {busiest} (x{scenario.loads.hottest:.2f}){_assigned(result)}."
    )


def _assigned(result: Result) -> str:
    found = next(item for item in result.variants if item.change == "dispatch by adapter")
    if not result.feasible:
        return ""
    if found.gpus is None:
        return ", and by the model no plan would meet the SLOs"
    scenario = result.scenario
    server = found.gpus + scenario.spares(found.gpus)
    more = server + found.instances * scenario.model.instance_gpus - result.candidate.all_gpus
    return f": by the model, {words.count(more, 'GPU')} more" if more > 0 else ""


def changes(result: Result) -> Iterator[tuple[str, str, str, str, str]]:
    """List (if, GPUs, layout, its immediate admission rate, whether it meets all, by the model) of each variant."""
    for item in result.variants:
        own = "" if item.instances == result.scenario.instances else f" + {item.instances:,} inst."
        met = "yes" if item.meets_at_plan else f"no: {item.binding_constraint.replace(',', ', ')}"
        gpus = f"{item.gpus:,}" if item.gpus is not None else "-"
        yield item.change, gpus, f"{item.layout}{own}" if item.layout else "-", f"{item.iar_at_plan:.4f}", met


def costs(result: Result) -> Iterator[tuple[str, str]]:
    """List (what, amount) of the costs."""
    for name, value in (result.cost() or {}).items():
        yield name.replace("_", " ").replace("lora server", "LoRA Server").replace("gpu", "GPU"), words.number(value)


def sides(result: Result) -> Iterator[tuple[str, str, str]]:
    """List (what, with a LoRA Server, coupled on as many GPUs): what both hold, admit and cost."""
    scenario, candidate, coupled = result.scenario, result.candidate, result.coupled
    yield (
        "GPUs",
        f"{scenario.engine_gpus:,} + {candidate.gpus + candidate.spare_gpus:,}",
        f"{coupled.instances * scenario.model.instance_gpus:,}",
    )
    apart = f"{coupled.instances:,} x {coupled.split.slots:,}, {coupled.split.share:.0%} of free memory"
    yield "adapter slots", f"{candidate.slots:,}, shared", apart
    if coupled.copies:
        yield "copies of hot adapters", "-", f"{coupled.copies:,}, about"
    yield "requests by KV memory", f"{scenario.kv_requests:,} an instance", f"{coupled.split.requests:,} an instance"
    yield "immediate admission, model", f"{scenario.cache.iar(candidate.slots):.4f}", f"{coupled.split.iar:.4f}"
    ours, theirs = result.verified.verdict, coupled.verdict
    if ours and theirs:
        yield "within TTFT, simulated", f"{ours.within_ttft.mean:.4f}", f"{theirs.within_ttft.mean:.4f}"
        yield "immediate admission, simulated", f"{ours.immediate.mean:.4f}", f"{theirs.immediate.mean:.4f}"
    yield "decode step", words.time(candidate.mean_step_us), words.time(coupled.step_us)
    needed = "over 64 instances" if coupled.gpus_needed is None else f"{coupled.gpus_needed:,}"
    yield "GPUs that do", f"{candidate.all_gpus:,}" if result.feasible else "-", needed
    cost = result.cost()
    if cost:
        rival = cost.get("coupled_per_hour")
        yield "cost per hour", words.number(cost["total_per_hour"]), "-" if rival is None else words.number(rival)
