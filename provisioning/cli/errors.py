"""Bad input on the command line: one line, exit code 2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer

from lora_server.errors import LoraServerError

BAD_INPUT = 2
USAGE_ERROR: Any = typer.BadParameter.__mro__[2]  # of the click that typer uses, bundled or not: ClickException


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End the command on bad input, with exit code 2 and one line on stderr."""
    try:
        yield
    except LoraServerError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(BAD_INPUT) from None
