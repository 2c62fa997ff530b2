"""`provision glossary`."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def glossary(as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False) -> None:
    """The words of a plan: immediate admission, M*, Eq. 5, visible load and others."""
    from provisioning.report import screen
    from provisioning.report.glossary import TERMS

    if as_json:
        typer.echo(json.dumps(TERMS, indent=2))
        return
    shown = screen.table("word", "means")
    for word, meaning in TERMS.items():
        shown.add_row(word, meaning)
    screen.console().print(shown)
