"""`provision simulate`: the simulator on its own, beside what the three models say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from provisioning.cli.errors import one_line_errors


def simulate(
    cache_slots: Annotated[int, typer.Option(help="Adapters that a cache holds.")],
    adapters: Annotated[
        int | None, typer.Option(help="Number of adapters N (required without --counts or --trace).")
    ] = None,
    zipf: Annotated[float | None, typer.Option(help="Popularity 1/i^S, 0 is uniform (default: 1.2).")] = None,
    counts: Annotated[
        Path | None, typer.Option(help="Calls per adapter: JSON, or CSV `adapter,count` (default: none).")
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
    step_ms: Annotated[float, typer.Option(help="Time of a decode step.")] = 25.0,
    load_ms: Annotated[float, typer.Option(help="What a cold adapter adds.")] = 0.0,
    mean_output_tokens: Annotated[
        float | None, typer.Option(help="Of a request (default: 256, or the trace's).")
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
        found = run(Experiment(**{name: given[name] for name in keys}))
    if as_json:
        typer.echo(json.dumps(found, indent=2, allow_nan=False))
        return
    _print(found)


def _print(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("", "mean", "95 % interval", box=None, pad_edge=False)
    for name, value in found["simulated"].items():
        low, high = value["interval"]
        table.add_row(name.replace("_", " "), f"{value['mean']:.4f}", f"[{low:.4f}, {high:.4f}]")
    for name, rate in found["model_iar"].items():
        table.add_row(f"IAR, {name}", f"{rate:.4f}", "model")
    Console().print(table)
