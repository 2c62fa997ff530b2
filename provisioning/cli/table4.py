"""`provision table4`."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def table4(as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False) -> None:
    """The latency model beside the paper's Table 4, with residuals; * is what it was fitted to."""
    from provisioning.model import table4 as table

    if as_json:
        typer.echo(json.dumps(table.as_json(), indent=2))
        return
    from provisioning.report import screen

    cells = table.residuals()
    shown = screen.table("layout", "batch", *table.COLUMNS, numbers=("batch",))
    for layout, batch in table.PAPER:
        row = [cell for cell in cells if (cell.layout, cell.batch) == (layout, batch)]
        texts = (f"{c.paper_us:.0f}/{c.model_us:.0f} {c.relative:+.1%}{'*' if c.in_sample else ''}" for c in row)
        shown.add_row(layout, str(batch), *texts)
    on = screen.console()
    on.print("Microseconds a layer: paper/model, and how far off the model is; * is what it was fitted to.")
    on.print(shown)
