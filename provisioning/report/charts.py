"""The plots of a report, each a PNG. matplotlib is imported here and only when a report is asked for."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np

from provisioning.plan.candidates import candidates
from provisioning.report.result import Result

Draw = Callable[[Any, Result], None]


def png(draw: Draw, result: Result) -> bytes:
    """Draw one plot as a PNG."""
    return drawn(lambda axes: draw(axes, result), "png", 3.4)


def drawn(draw: Callable[[Any], None], kind: str, height: float) -> bytes:
    """Draw a plot on axes, as a file of this kind."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.4, height), layout="constrained")  # small, so that its text can be read on a phone
    draw(figure.add_subplot())
    figure.legend(loc="outside upper center", ncols=3, fontsize=8, frameon=False)  # beside the axes, over nothing
    stream = io.BytesIO()
    figure.savefig(stream, format=kind, dpi=160)
    return stream.getvalue()


def iar_over_slots(axes: Any, result: Result) -> None:
    """Plot `offered` for every M, the target, M* and the plan."""
    scenario, candidate = result.scenario, result.candidate
    axes.plot(scenario.cache.curve, label="offered (model)")
    axes.axhline(scenario.iar_target, color="grey", linestyle=":", label=f"target {scenario.iar_target:g}")
    axes.axvline(scenario.cache.min_cache_slots, color="tab:orange", label=f"M* = {scenario.cache.min_cache_slots:,}")
    axes.axvline(candidate.slots, color="tab:green", linestyle="--", label=f"this layout: {candidate.slots:,}")
    verdict = result.verified.verdict
    if verdict is not None:
        mean, low, high = verdict.immediate.mean, verdict.immediate.low, verdict.immediate.high
        x = min(candidate.slots, scenario.workload.num_adapters)
        axes.errorbar(
            [x], [mean], [[max(mean - low, 0)], [max(high - mean, 0)]], fmt="o", color="black", label="simulated, 95 %"
        )
    axes.set(xlabel="cache slots M", ylabel="immediate admission rate", ylim=(0, 1.03))


def region(axes: Any, result: Result) -> None:
    """Plot the slots that each GPU count offers, and the layouts that meet everything."""
    scenario = result.scenario
    most = min(max(2 * result.candidate.gpus, 8), scenario.max_gpus)
    for (gpus, slots), layouts in _points(result, most).items():
        met = [name for name, meets in layouts if meets]
        axes.scatter(gpus, slots, color="tab:green" if met else "tab:red", marker="o" if met else "x", s=22)
        if 0 < len(met) < len(layouts):
            axes.annotate(", ".join(met), (gpus, slots), xytext=(4, 3), textcoords="offset points", fontsize=7)
    axes.axhspan(scenario.cache.min_cache_slots, axes.get_ylim()[1], color="tab:green", alpha=0.08)
    axes.axhline(scenario.cache.min_cache_slots, color="tab:orange", label=f"M* = {scenario.cache.min_cache_slots:,}")
    axes.scatter([], [], color="tab:green", label="meets both SLOs (named: these layouts alone)")
    axes.scatter([], [], color="tab:red", marker="x", label="does not")
    axes.set(xlabel="LoRA Server GPUs (all layouts)", ylabel="cache slots M")


def _points(result: Result, most: int) -> dict[tuple[int, int], list[tuple[str, bool]]]:
    """Group the layouts by what the plot places them by, GPUs and slots; each with whether it meets everything."""
    points: dict[tuple[int, int], list[tuple[str, bool]]] = {}
    for gpus in range(1, most + 1):
        for item in candidates(result.asked, gpus):
            points.setdefault((gpus, item.slots), []).append((str(item.layout), not item.failed))
    return points


def latency_stack(axes: Any, result: Result) -> None:
    """Plot receive, compute and send per layout of the plan's GPU count, against Eq. 5."""
    scenario = result.scenario
    found = sorted(candidates(result.asked, result.candidate.gpus), key=lambda item: item.layout.ep)
    names = [str(item.layout) for item in found]
    base = np.zeros(len(found))
    for part in ("receive", "compute", "send"):
        heights = np.array([getattr(item.latency, part).value for item in found])
        axes.bar(names, heights, bottom=base, label=part)
        base += heights
    ffn_us = scenario.limit(result.candidate.layout).ffn
    axes.axhline(ffn_us, color="grey", linestyle=":", label=f"SLO_FFN {ffn_us:,.0f} us")
    axes.set_ylabel("us per layer")
    axes.tick_params(axis="x", rotation=30)


def coupled_bars(axes: Any, result: Result) -> None:
    """Plot the immediate admission rate and the adapters within the SLO, for this plan and coupled on the same GPUs."""
    verdict, coupled = result.verified.verdict, result.coupled
    names = ["immediate admission,\nmodel"]
    series = [[result.scenario.cache.iar(result.candidate.slots)], [coupled.split.iar]]
    if verdict is not None and coupled.verdict is not None:
        names += ["immediate admission,\nsimulated", "adapters within SLO"]
        for values, seen in zip(series, (verdict, coupled.verdict), strict=True):
            values += [seen.immediate.mean, seen.adapters_within_slo.mean]
    places = np.arange(len(names))
    for offset, label, values in zip((-0.2, 0.2), ("LoRA Server", "coupled"), series, strict=True):
        axes.bar(places + offset, values, 0.4, label=label)
    axes.set_xticks(places, names)
    axes.set_ylim(0, 1.05)
    axes.axhline(result.scenario.iar_target, color="grey", linestyle=":")


def ttft_cdf(axes: Any, result: Result) -> None:
    """Plot the simulated TTFT of all seeds."""
    shares = np.unique(np.r_[np.linspace(0, 0.99, 300), np.linspace(0.99, 1, 100)])
    for label, verdict in (("LoRA Server", result.verified.verdict), ("coupled", result.coupled.verdict)):
        if verdict is not None:
            axes.plot(np.quantile(verdict.ttft_s, shares), shares, label=label)
    slo_s = result.scenario.slo.ttft_us * 1e-6
    axes.axvline(slo_s, color="grey", linestyle=":", label=f"SLO {slo_s:g} s")
    axes.axhline(result.scenario.slo.share, color="grey", linewidth=0.5)
    axes.set(xlabel="TTFT in s (queueing + first decode step)", ylabel="share of requests", xscale="log")


def load_over_time(axes: Any, result: Result) -> None:
    """Plot a trace's load over its own time, and the window that is sized for."""
    found = result.scenario.workload.over_time
    if found is None:
        return
    unit_s, unit = (3600.0, "h") if found.load_W.size * found.window_s > 7200 else (60.0, "min")
    edges = np.arange(found.load_W.size + 1) * found.window_s / unit_s
    axes.stairs(found.load_W, edges, label="load")
    axes.axhline(1.0, color="grey", linestyle=":", label="mean")
    if not found.steady:
        ends = found.start_s / unit_s, (found.start_s + found.window_s) / unit_s
        axes.axvspan(*ends, color="tab:orange", alpha=0.3, label=f"sized for: x{found.fullest:.2f}")
    axes.set(xlabel=f"time in {unit}", ylabel="tokens/s over the mean", ylim=(0, None))


def charts(result: Result) -> tuple[tuple[str, Draw], ...]:
    """List (title, plot) of the plots that the result has data for."""
    if result.scenario.workload.over_time is None:
        return CHARTS
    return (("Load over time", load_over_time), *CHARTS)


CHARTS: tuple[tuple[str, Draw], ...] = (
    ("Immediate admission rate over cache slots", iar_over_slots),
    ("Cache slots (M) and GPUs that suffice", region),
    ("Latency per layout", latency_stack),
    ("Coupled and disaggregated on the same GPUs", coupled_bars),
    ("Simulated TTFT", ttft_cdf),
)
