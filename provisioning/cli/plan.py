"""`provision` without a subcommand: the plan. Heavy imports wait until it runs, so that --help is quick."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from lora_server import __version__
from provisioning.cli.console import Json, one_line_errors, progress, save, say_json
from provisioning.cli.flags import plan_flags, with_flags
from provisioning.inputs import InputError, count, positive
from provisioning.plan.flags import PlanFlags

INFEASIBLE = 3


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"provision {__version__}")
        raise typer.Exit


@with_flags(PlanFlags, optional=True)
def plan(
    context: typer.Context,
    price_per_gpu_hour: Annotated[
        float | None, typer.Option(help="Price of a GPU hour, in any currency (default: none).")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Simulated seeds, at least 5.")] = 5,
    no_simulate: Annotated[bool, typer.Option("--no-simulate", help="Use the model alone.")] = False,
    as_json: Json = False,
    out: Annotated[
        Path | None, typer.Option(help="Write a file for `lora-server serve --config` (default: none).")
    ] = None,
    emit: Annotated[
        Path | None,
        typer.Option(help="Write the load as a trace, and the servers' commands, to this directory (default: none)."),
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write a self-contained HTML report (default: none).")] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    **given: Any,
) -> None:
    """Plan the GPUs of a LoRA Server for SLOs. Exit codes: 0 feasible, 2 bad input, 3 infeasible."""
    if context.invoked_subcommand is not None:
        return
    if len(sys.argv) == 1 and given["slo"] is None and given["model"] is None:
        typer.echo(context.get_help())
        raise typer.Exit
    with one_line_errors():
        _plan(dict(context.params))


def _plan(given: dict[str, Any]) -> None:
    from provisioning.plan.scenario import scenario
    from provisioning.report.result import answer

    question = scenario(plan_flags(given))
    price = given["price_per_gpu_hour"]
    price = None if price is None else positive(price, "--price-per-gpu-hour")
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
    from provisioning.report import document, emitted, html, screen, serve_file

    for name in ("out", "emit"):
        if given[name] is not None and not result.feasible:
            typer.echo(f"{name}: {given[name]} not written, there is no plan", err=True)
    if given["out"] is not None and result.feasible:
        save(given["out"], serve_file.plan_yaml(result), "--out")
    if given["emit"] is not None and result.feasible:
        try:
            given["emit"].mkdir(exist_ok=True)
        except OSError as error:
            raise InputError(f"--emit: {given['emit']} cannot be made: {error.strerror}") from None
        for name, text in emitted.files(result).items():
            save(given["emit"] / name, text, "--emit")
    if given["report"] is not None:
        save(given["report"], html.html(result), "--report")
    if given["as_json"]:
        say_json(document.document(result))
    else:
        screen.print_plan(result, screen.console())
