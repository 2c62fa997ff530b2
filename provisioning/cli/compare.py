"""`provision compare`: what each way to serve costs, over the rate."""

from __future__ import annotations

import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from provisioning.cli.console import Json, one_line_errors, progress, save, say_json
from provisioning.cli.flags import given_by, plan_flags
from provisioning.inputs import InputError, count, positive

if TYPE_CHECKING:
    from provisioning.plan.question import Scenario
    from provisioning.report.fronts import Comparison

_FACTORS = tuple(2.0 ** (step / 2) for step in range(-4, 5))


def compare(
    context: typer.Context,
    budget: Annotated[
        int | None, typer.Option(help="Also state the rate that so many GPUs serve (default: none).")
    ] = None,
    sizes: Annotated[
        str | None, typer.Option(help="GPUs per instance to try, such as 2,4,8 (default: `provision`'s).")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write the plot: a file .svg or .png (default: none).")] = None,
    report: Annotated[Path | None, typer.Option(help="Write a self-contained HTML report (default: none).")] = None,
    as_json: Json = False,
) -> None:
    """Compare GPUs over requests/s, by the model: coupled, disaggregated, 8-bit wire, hot-merged, merged base.

    The question takes `provision`'s own options: --slo, --model, --adapters, --request-rate and so on.
    """
    with one_line_errors():
        if plot is not None and plot.suffix.lower() not in (".svg", ".png"):
            raise InputError(f"--plot: got {plot}, expected a file that ends in .svg or .png")
        with progress(shown=not as_json) as say:
            found = _compared(context, budget, sizes, say)
        from provisioning.report import fronts

        if plot is not None:
            save(plot, fronts.plot(found, plot.suffix[1:].lower()), "--plot")
        if report is not None:
            save(report, fronts.html(found), "--report")
    if as_json:
        say_json(found.as_json())
    else:
        _print(found)


def _compared(context: typer.Context, budget: int | None, sizes: str | None, say: Any) -> Comparison:
    from provisioning.plan import fronts
    from provisioning.plan.scenario import scenario
    from provisioning.report import words
    from provisioning.report.fronts import Comparison
    from provisioning.report.render import question_with

    given = given_by(context.find_root().command, context.args)
    asked = scenario(plan_flags(given))
    if asked.request_rate is None or given["instances"] is not None:
        raise InputError("--request-rate: give it, or a trace, and no --instances: instances and batches are sought")
    if asked.engine_profile is not None:
        raise InputError("--engine-profile: `compare` asks the model alone; leave it out, or ask `provision`")
    each = _sizes(sizes, asked)
    within = None
    if budget is not None:
        count(budget, "--budget", 1, 100_000)
        within = {}
        for line in fronts.LINES:
            say(f"{line} on {budget:,} GPUs")
            within[line] = fronts.within(line, asked, budget, each)
    found = {}
    for line in fronts.LINES:
        say(f"{line}, {len(_FACTORS)} rates")
        found[line] = fronts.front(line, asked, _FACTORS, each)
    price = given["price_per_gpu_hour"]
    return Comparison(
        question=question_with(asked, f", {words.number(asked.workload.lengths.mean_tokens)} tokens a request"),
        command=shlex.join(["provision", *sys.argv[1:]]),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        rates=tuple(asked.request_rate * factor for factor in _FACTORS),
        asked=len(_FACTORS) // 2,
        fronts=found,
        hottest=float(asked.workload.in_flight.max()),
        budget=budget,
        within=within,
        price_per_gpu_hour=None if price is None else positive(price, "--price-per-gpu-hour"),
    )


def _sizes(text: str | None, asked: Scenario) -> list[int]:
    from provisioning.plan.scenario import checked_instance_gpus

    if text is None:
        return [asked.model.instance_gpus]
    try:
        numbers = sorted({int(piece) for piece in text.split(",")})
    except ValueError:
        raise InputError(f"--sizes: got {text!r}, expected numbers of GPUs such as 2,4,8") from None
    model = asked.model
    return [checked_instance_gpus(size, "--sizes", model.spec, model.cluster, model.base_dtype) for size in numbers]


def _print(found: Comparison) -> None:
    from provisioning.report import fronts, screen

    on = screen.console()
    on.print(found.question)
    on.print(found.answer, style="bold")
    on.print()
    lines = tuple(found.fronts)
    costs = screen.table("requests/s", *lines, numbers=("requests/s", *lines))
    for place, row in enumerate(fronts.rows(found)):
        costs.add_row(*row, style="bold" if place == found.asked else None)
    on.print(costs)
    on.print()
    on.print(screen.table(*fronts.HEADINGS, numbers=fronts.HEADINGS[1:4], rows=fronts.chosen(found)))
    for note in found.notes:
        on.print(note)
