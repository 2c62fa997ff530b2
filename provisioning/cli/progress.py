"""Progress of long work: one transient line on stderr in a terminal, nothing in a pipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


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
