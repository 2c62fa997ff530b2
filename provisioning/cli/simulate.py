"""`provision simulate`: the simulator on its own, beside what the three models say."""

from __future__ import annotations

from typing import Any

from provisioning.cli.console import Json, one_line_errors, progress, say_json
from provisioning.cli.flags import with_flags
from provisioning.plan.flags import SimulateFlags


@with_flags(SimulateFlags)
def simulate(as_json: Json = False, **given: Any) -> None:
    """Simulate decode instances with a LoRA cache: rates, TTFT and attainment, with intervals."""
    with one_line_errors():
        from provisioning.cli.experiment import run

        with progress(shown=not as_json) as say:
            found = run(SimulateFlags(**given), say)
    if as_json:
        say_json(found)
    else:
        _print(found)


_LABELS = {
    "immediate_rate": "immediate admission",
    "ttft_p50_s": "TTFT p50",
    "ttft_p95_s": "TTFT p95",
    "ttft_p99_s": "TTFT p99",
    "tpot_p50_s": "TPOT p50",
    "tpot_p95_s": "TPOT p95",
    "share_within_slo": "requests within the TTFT SLO",
    "adapters_with_90_percent_within_slo": "adapters with 90 % of theirs within",
}


def _print(found: dict[str, Any]) -> None:
    from provisioning.report import screen, words
    from provisioning.simulation.measure import Estimate

    on, load = screen.console(), found["load"]
    at_peak = " at the peak" if load["peak"] > 1 else ""
    on.print(
        f"{words.count(load['adapters'], 'adapter')}, {words.number(load['request_rate'])} requests/s, "
        f"{words.number(load['global_batch'])} in flight on average{at_peak}, {words.count(found['seeds'], 'run')}"
    )
    table = screen.table("", "mean [95 % interval]")
    for name, value in found["simulated"].items():
        estimate = Estimate(mean=value["mean"], low=value["interval"][0], high=value["interval"][1])
        table.add_row(_LABELS[name], words.times(estimate) if name.endswith("_s") else words.rate(estimate))
    for name, rate in found["model_iar"].items():
        table.add_row(f"immediate admission, model {name}", f"{rate:.4f}")
    on.print(table)
