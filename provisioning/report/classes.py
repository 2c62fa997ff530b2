"""Outcome of a plan for tenants' SLO classes, in sentences and as JSON."""

from __future__ import annotations

from collections.abc import Iterator

from provisioning.plan.classes import ClassOutcome, served
from provisioning.report import words
from provisioning.report.result import Result


def by_class(result: Result) -> list[ClassOutcome]:
    """Return the outcome of each SLO class; empty without --classes."""
    candidate, verdict = result.candidate, result.verified.verdict
    in_time = None if verdict is None else verdict.by_adapter
    found = served(result.asked.classes, result.asked.workload, candidate.step_us, candidate.load_us, in_time)
    return list(found)


def sentences(result: Result) -> Iterator[str]:
    """Yield a line for each class: met, or what fails and by how much."""
    candidate = result.candidate
    for one in by_class(result):
        who = f"Class {one.name}, {words.count(one.adapters, 'adapter')}"
        reasons = {
            "tpot": f"tpot (a step takes {words.time(candidate.step_us)}, {words.time(one.slo.tpot_us)} is asked)",
            "ttft": f"ttft (step and load take {words.time(candidate.step_us + candidate.load_us)}, "
            f"{words.time(one.slo.ttft_us)} is asked)",
            "admission": f"admission (p{one.slo.percentile:g} is asked)",
        }
        seen = "" if one.share_within_ttft is None else f", {one.share_within_ttft:.2%} within its TTFT SLO, simulated"
        worst = "".join(f", {name} {share:.1%}" for name, share in one.worst)
        said = f"FAILS {' and '.join(reasons[what] for what in one.fails)}" if one.fails else "met"
        yield f"{who}: {said}{seen}{f'; served worst{worst}' if worst else ''}."
