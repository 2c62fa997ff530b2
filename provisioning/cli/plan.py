"""`provision` on its own: the plan. Heavy imports wait until it runs, so that --help is quick."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from lora_server import __version__
from provisioning.cli.errors import one_line_errors
from provisioning.cli.progress import progress
from provisioning.cli.save import save

INFEASIBLE = 3
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"provision {__version__}")
        raise typer.Exit


def plan(
    context: typer.Context,
    slo: Annotated[str | None, typer.Option(help="Such as 'ttft_p95=250ms,tpot_avg=100ms' (required).")] = None,
    model: Annotated[
        str | None, typer.Option(help="Preset (see `provision models`) or model directory (required).")
    ] = None,
    gpu: Annotated[str, typer.Option(help="h200, h100, hopper-96, h20, a100-80, a100-40, b200, b300, l40s.")] = "h200",
    lora_rank: Annotated[int, typer.Option(help="Rank of the adapters.")] = 64,
    from_adapters: Annotated[
        str | None,
        typer.Option(help="Adapters as they are: a directory, a server's HOST:PORT or its list (default: none)."),
    ] = None,
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
    instances: Annotated[
        int | None, typer.Option(help="LLM instances L (default: those with the fewest GPUs in all, for a rate).")
    ] = None,
    batch_size: Annotated[
        float | None, typer.Option(help="Requests in flight per instance, on average (default: by --request-rate).")
    ] = None,
    request_rate: Annotated[
        float | None, typer.Option(help="Requests/s in all; --batch-size is then a limit (default: the trace's).")
    ] = None,
    mean_output_tokens: Annotated[
        float | None, typer.Option(help="Of a request (default: 256, or the file's).")
    ] = None,
    burst_cv: Annotated[float, typer.Option(help="CV of the gaps between arrivals; 1 is Poisson.")] = 1.0,
    iar: Annotated[float | None, typer.Option(help="IAR target (default: ttft's percentile).")] = None,
    instance_gpus: Annotated[
        int | None,
        typer.Option(help="GPUs of an LLM instance (default: the paper's, or the fewest that hold the weights)."),
    ] = None,
    gpus_per_node: Annotated[int, typer.Option(help="Node size.")] = 8,
    whole_nodes: Annotated[bool, typer.Option("--whole-nodes", help="Only whole nodes, spares included.")] = False,
    max_gpus: Annotated[int, typer.Option(help="Most GPUs of the server to consider, spare ones included.")] = 64,
    spare_gpus: Annotated[int, typer.Option(help="GPUs on top that stand by for ones that fail; 1 is N+1.")] = 0,
    gpu_memory_gib: Annotated[float | None, typer.Option(help="GiB of a GPU (default: the preset's).")] = None,
    link_gbps: Annotated[float, typer.Option(help="Per GPU and direction, Gb/s.")] = 400.0,
    host_link_gb_per_s: Annotated[float, typer.Option(help="Host to GPU, GB/s.")] = 50.0,
    context_tokens: Annotated[float, typer.Option(help="KV cache per request, for memory and time.")] = 1024.0,
    prefill_tokens: Annotated[
        float, typer.Option(help="Largest chunk of prefill: each GPU keeps room for its activations.")
    ] = 2048.0,
    base_dtype: Annotated[str, typer.Option(help="bf16, fp8 or mxfp4 (experts only): base weights.")] = "bf16",
    dispatch: Annotated[
        str, typer.Option(help="any: the instance with the fewest requests; by-adapter: as the paper does.")
    ] = "any",
    eq6: Annotated[str, typer.Option(help="stage: what a stage serves; printed: as the paper has it.")] = "stage",
    coupled_split: Annotated[
        str, typer.Option(help="Memory for adapters where coupled: tuned, paper (0.5) or a share.")
    ] = "tuned",
    shared_a: Annotated[bool, typer.Option("--shared-a", help="gate and up share one A (fused layout).")] = False,
    wire: Annotated[str, typer.Option(help="exact, 2 bytes an element, or e4m3, 1: the server's --wire.")] = "exact",
    profile: Annotated[Path | None, typer.Option(help="Measured times, JSON of bench/ (default: none).")] = None,
    price_per_gpu_hour: Annotated[float | None, typer.Option(help="In any currency (default: none).")] = None,
    window: Annotated[
        float | None,
        typer.Option(help="Seconds of the trace's peak, which is sized for (default: 1/48 of it, or 1,000 requests)."),
    ] = None,
    classes: Annotated[
        Path | None, typer.Option(help="SLO classes, YAML: name, slo, adapters (default: --slo for all).")
    ] = None,
    seed: Annotated[int, typer.Option(help="For adapters drawn for a trace.")] = 0,
    seeds: Annotated[int, typer.Option(help="Simulated seeds, at least 5.")] = 5,
    no_simulate: Annotated[bool, typer.Option("--no-simulate", help="Model only.")] = False,
    as_json: Json = False,
    out: Annotated[
        Path | None, typer.Option(help="Write a file for `lora-server serve --config` (default: none).")
    ] = None,
    emit: Annotated[
        Path | None, typer.Option(help="Write the load as a trace, and the servers' commands, into it (default: none).")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write a self-contained HTML report (default: none).")] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say it, and exit.")
    ] = False,
) -> None:
    """From SLOs to LoRA Server GPUs. Exit codes: 0 feasible, 2 bad input, 3 infeasible."""
    if context.invoked_subcommand is not None:
        return
    if len(sys.argv) == 1 and slo is None and model is None:
        typer.echo(context.get_help())
        raise typer.Exit
    given = dict(context.params)
    with one_line_errors():
        _plan(given)


def _plan(given: dict[str, Any]) -> None:
    from dataclasses import fields

    from provisioning.inputs import InputError, count, positive
    from provisioning.plan.scenario import Flags, scenario
    from provisioning.report.result import answer

    for name in ("slo", "model"):
        if given[name] is None:
            raise InputError(f"--{name}: missing; see provision --help")
    question = scenario(Flags(**{item.name: given[item.name] for item in fields(Flags)}))
    price = given["price_per_gpu_hour"]
    if price is not None:
        price = positive(price, "--price-per-gpu-hour")
    seeds = count(given["seeds"], "--seeds", 5, 1000)
    for name in ("out", "report", "emit"):
        if given[name] is not None and not given[name].parent.is_dir():
            raise InputError(f"--{name}: no directory {given[name].parent}; create it first")
    seeds = 0 if given["no_simulate"] else seeds
    with progress(shown=not given["as_json"]) as say:
        result = answer(
            question,
            seeds=seeds,
            price_per_gpu_hour=price,
            base_model=given["model"],
            command=shlex.join(["provision", *sys.argv[1:]]),
            say=say,
        )
    _write(result, given)
    if not result.feasible:
        raise typer.Exit(INFEASIBLE)


def _write(result: Any, given: dict[str, Any]) -> None:
    if given["out"] is not None and result.feasible:
        from provisioning.report.serve_file import plan_yaml

        save(given["out"], plan_yaml(result), "--out")
    elif given["out"] is not None:
        typer.echo(f"out: {given['out']} not written, there is no plan", err=True)
    if given["emit"] is not None and result.feasible:
        _emit(given["emit"], result)
    elif given["emit"] is not None:
        typer.echo(f"emit: {given['emit']} not written, there is no plan", err=True)
    if given["report"] is not None:
        from provisioning.report.html import html

        save(given["report"], html(result), "--report")
    if given["as_json"]:
        import json

        from provisioning.report.document import document

        typer.echo(json.dumps(document(result), indent=2, allow_nan=False))
    else:
        from provisioning.report import screen

        screen.print_plan(result, screen.console())


def _emit(directory: Path, result: Any) -> None:
    from provisioning.inputs import InputError
    from provisioning.report import emitted
    from provisioning.report.serve_file import plan_yaml

    try:
        directory.mkdir(exist_ok=True)
    except OSError as error:
        raise InputError(f"--emit: {directory} cannot be made: {error.strerror}") from None
    texts = {emitted.TRACE: emitted.trace, emitted.COMMANDS: emitted.commands, emitted.PLAN: plan_yaml}
    for name, write in texts.items():
        save(directory / name, write(result), "--emit")
