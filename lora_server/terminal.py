"""Text for people: in a terminal it fits the width and breaks no word; in a pipe every row is one line.

Colours are those that read on a light and on a dark background; none with NO_COLOR, or in a pipe.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

WIDE = 100_000  # a pipe
GAP = 2
COLOURS = {
    **dict.fromkeys(("ready", "up", "ok", "equal"), "green"),
    **dict.fromkeys(("loading", "starting", "draining", "warning"), "yellow"),
    **dict.fromkeys(("failed", "refused", "not ready", "DIFFERENT"), "red"),
}


def open_console(stderr: bool = False) -> Console:
    """Open stdout, or stderr, without a limit to the width where it is a pipe."""
    console = Console(stderr=stderr, highlight=False, soft_wrap=True)
    return Console(
        stderr=stderr,
        highlight=False,
        soft_wrap=True,
        width=None if console.file.isatty() else WIDE,  # whatever COLUMNS is: readline sets it for child processes
        color_system=None if console.no_color else "auto",  # rich's own NO_COLOR leaves bold and dim
    )


def wrap(text: str, width: int) -> list[str]:
    """Break `text` at spaces into lines of at most `width`.

    A longer word, such as a path, gets lines of its own, broken after - / _ and the like, else in mid-word.
    """
    lines, line = [], ""
    for word in text.split():
        if cell_len(word) > width:
            lines += [line] if line else []
            *full, line = _break(word, width)
            lines += full
        elif line and cell_len(line) + 1 + cell_len(word) > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}" if line else word
    return [*lines, line]


def _break(word: str, width: int) -> list[str]:
    lines = [""]
    for piece in re.findall(r"[^-/_,:=]*[-/_,:=]|[^-/_,:=]+", word):
        for part in (piece[start : start + width] for start in range(0, len(piece), width)):
            if cell_len(lines[-1]) + cell_len(part) <= width:
                lines[-1] += part
            else:
                lines.append(part)
    return lines


def say(console: Console, text: str, label: str = "") -> None:
    """Print a paragraph, further lines indented, behind a label in its colour."""
    lines = wrap(f"{label}: {text}" if label else text, console.width - 2)
    shown = Text("\n  ".join(lines))
    shown.stylize(COLOURS.get(label, ""), 0, len(label))
    console.print(shown)


def table(
    console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: Collection[str], wrapped: str
) -> None:
    """Print rows below their headings. `left` are columns of text; only cells of `wrapped` are broken into lines."""
    shown = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    for name in columns:
        align: JustifyMethod = "left" if name in left else "right"
        shown.add_column(name, justify=align, no_wrap=name != wrapped, overflow="fold")
    for row in rows:
        cells = zip(columns, row, strict=True)
        shown.add_row(
            *(Text(cell, COLOURS.get(cell.split(" ")[0], "") if name == "state" else "") for name, cell in cells)
        )
    console.print(shown, soft_wrap=False)


def pairs(console: Console, values: Mapping[str, str]) -> None:
    """Print names and values, one pair per line; a value too long to stand beside its name stands below it."""
    widest = max(map(len, values)) + GAP
    for name, value in values.items():
        if cell_len(value) <= console.width - GAP - widest:
            lines = [f"{name:<{widest}}{value}"]
        else:
            lines = [name, *(" " * GAP + line for line in wrap(value, console.width - 2 * GAP))]
        for line in lines:
            console.print(Text(" " * GAP + line))


def progress(transient: bool = False) -> Progress:
    """Make progress bars on stderr; `transient` ones vanish at the end."""
    bar = BarColumn(style="dim", complete_style="cyan", finished_style="green", pulse_style="cyan")
    columns = (TextColumn("{task.description}"), bar, MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=open_console(stderr=True), transient=transient)
