"""`provision simulate`: the simulator on its own, beside what the three models say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from provisioning.cli.errors import one_line_errors
from provisioning.cli.progress import progress


def simulate(
    cache_slots: Annotated[int, typer.Option(help="Adapters that a cache holds.")],
    adapters: Annotated[
        int | None, typer.Option(help="Number of adapters N (required without --counts or --trace).")
    ] = None,
    zipf: Annotated[float | None, typer.Option(help="Popularity 1/i^S, 0 is uniform (default: 1.2).")] = None,
    counts: Annotated[
        Path | None, typer.Option(help="Calls per adapter, and mean output tokens: JSON or CSV (default: none).")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="CSV or JSONL trace, or a ServeGen directory (default: none).")
    ] = None,
    instances: Annotated[int, typer.Option(help="LLM instances.")] = 1,
    batch_size: Annotated[
        float | None, typer.Option(help="Requests in flight per instance, on average (default: by --request-rate).")
    ] = None,
    request_rate: Annotated[
        float | None, typer.Option(help="Requests/s in all, instead of a batch (default: the trace's).")
    ] = None,
    max_batch: Annotated[int | None, typer.Option(help="Most requests in one batch (default: unlimited).")] = None,
    mode: Annotated[str, typer.Option(help="disaggregated (one cache) or coupled (one each).")] = "disaggregated",
    order: Annotated[str, typer.Option(help="fcfs, or sjf with known lengths.")] = "fcfs",
    dispatch: Annotated[
        str, typer.Option(help="any: the instance with the fewest requests; by-adapter, as coupled always is.")
    ] = "any",
    step_ms: Annotated[float, typer.Option(help="Time of a decode step.")] = 25.0,
    load_ms: Annotated[float, typer.Option(help="What a cold adapter adds.")] = 0.0,
    mean_output_tokens: Annotated[
        float | None, typer.Option(help="Of a request (default: 256, or the file's).")
    ] = None,
    burst_cv: Annotated[float, typer.Option(help="CV of the gaps between arrivals; 1 is Poisson.")] = 1.0,
    requests: Annotated[int, typer.Option(help="Per seed.")] = 50_000,
    seeds: Annotated[int, typer.Option(help="Number of runs.")] = 5,
    ttft_slo_ms: Annotated[float, typer.Option(help="For the share in time.")] = 250.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Simulate decode instances with a LoRA cache: rates, TTFT and attainment, with intervals."""

    given = dict(locals())
    with one_line_errors():
        from provisioning.cli.experiment import Experiment, run

        keys = Experiment.__dataclass_fields__
        with progress(shown=not as_json) as say:
            found = run(Experiment(**{name: given[name] for name in keys}), say)
    if as_json:
        typer.echo(json.dumps(found, indent=2, allow_nan=False))
        return
    _print(found)


_LABELS = {
    "immediate_rate": "immediate admission",
    "ttft_p50_s": "TTFT p50",
    "ttft_p95_s": "TTFT p95",
    "ttft_p99_s": "TTFT p99",
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
        table.add_row(f"IAR, model {name}", f"{rate:.4f}")
    on.print(table)
