"""A plan on the terminal: no word broken at 80 columns, colours that show on light and on dark, none in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from provisioning.report import render
from provisioning.report.provenance import provenance
from provisioning.report.result import Result
from provisioning.report.serve_file import unmet

_UNBOUNDED = 10_000  # columns: in a pipe a line is as long as what it says


def console() -> Console:
    """Open a console on stdout: as wide as the terminal; in a pipe, as wide as the text."""
    width = None if sys.stdout.isatty() else _UNBOUNDED
    return Console(width=width, highlight=False, markup=False, emoji=False)


def table(*headings: str, numbers: tuple[str, ...] = (), rows: Iterable[Sequence[str]] = ()) -> Table:
    """Make a table without lines; columns named in `numbers` are aligned to the right."""
    made = Table(box=None, pad_edge=False)
    for heading in headings:
        made.add_column(heading, justify="right" if heading in numbers else "left", overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def print_plan(result: Result, on: Console) -> None:
    """Print question, answer, whether it is worth it, constraints, refutations, sensitivity, cost, notes."""
    on.print(render.question(result))
    on.print(render.headline(result), style="bold" if result.feasible else "bold red")
    on.print(result.worth, style="green" if result.feasible and result.worth_it else "yellow")
    for warning in result.warnings:
        on.print(f"Warning: {warning}", style="bold yellow")
    on.print()
    limits = table("", "plan", "limit")
    for row in render.rows(result):
        limits.add_row(*row, style="red" if row[2].endswith("REFUTED") else None)
    on.print(limits)
    for line in render.remarks(result):
        on.print(line)
    on.print()
    on.print(table("", "with a LoRA Server", "coupled", rows=render.sides(result)))
    on.print()
    plan = "this plan" if result.feasible else str(result.candidate.layout)
    changes = ("if", "GPUs", "layout", f"immediate admission of {plan}", "meets, by the model")
    on.print(table(*changes, numbers=("GPUs",), rows=render.changes(result)))
    for line in render.summary(result):
        on.print(line)
    costs = table("cost", "", numbers=("",), rows=render.costs(result))
    if costs.row_count:
        on.print()
        on.print(costs)
    kinds = [entry.kind for entry in provenance(result.scenario, result.candidate).values()]
    counted = ", ".join(f"{kinds.count(kind)} {kind}" for kind in ("measured", "extrapolated", "assumed"))
    on.print()
    on.print(f"Provenance: {counted}; each in --json.")
    for note in (*result.notes, *unmet(result)):
        on.print(note)
