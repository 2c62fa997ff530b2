"""Output of a command beside its answer: errors on one line, with exit code 2; progress; files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from lora_server.errors import LoraServerError
from provisioning.inputs import InputError

BAD_INPUT = 2
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
USAGE_ERROR: Any = typer.BadParameter.__mro__[2]  # of the click that typer uses, bundled or not: ClickException


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End the command on bad input, with exit code 2 and one line on stderr."""
    try:
        yield
    except LoraServerError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(BAD_INPUT) from None


@contextmanager
def progress(*, shown: bool) -> Iterator[Callable[[str], None]]:
    """Yield a function that replaces the progress line; the elapsed time stands beside it."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, highlight=False)
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    shown = shown and console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not shown) as line:
        task = line.add_task("", total=None)
        yield lambda text: line.update(task, description=text)


def say_json(value: Any) -> None:
    """Print one JSON document."""
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


def save(path: Path, content: str | bytes, flag: str) -> None:
    """Write a file and say so on stderr; raises InputError that names the flag."""
    try:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise InputError(f"{flag}: {path} cannot be written: {error.strerror}") from None
    typer.echo(f"{flag[2:]}: {path}", err=True)
