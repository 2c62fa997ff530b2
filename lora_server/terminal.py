"""Text for people. In a terminal it fits the width, and no word is broken; in a pipe every row is one line.

Colours are those that read on a light and on a dark background; none with NO_COLOR, or in a pipe.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

WIDE = 100_000  # a pipe
NARROWEST = 12  # of a column that is wrapped
GAP = 2
COLOURS = {
    **dict.fromkeys(("ready", "up", "ok", "equal"), "green"),
    **dict.fromkeys(("loading", "starting", "draining", "warning"), "yellow"),
    **dict.fromkeys(("failed", "refused", "not ready", "DIFFERENT"), "red"),
}


def open_console(stderr: bool = False) -> Console:
    """Of stdout, or stderr."""
    console = Console(stderr=stderr, highlight=False, soft_wrap=True)
    return Console(
        stderr=stderr,
        highlight=False,
        soft_wrap=True,
        width=None if console.file.isatty() else WIDE,  # whatever COLUMNS is: readline sets it for child processes
        color_system=None if console.no_color else "auto",  # rich's own NO_COLOR leaves bold and dim
    )


def wrap(text: str, width: int) -> list[str]:
    """Lines of at most `width`, broken at spaces. What alone is longer, a path say, has lines of its own, broken
    after - / _ and the like, and in mid-word only if it has none of them.
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
    """A paragraph, its second line indented; a label in front has its colour."""
    lines = wrap(f"{label}: {text}" if label else text, console.width - 2)
    shown = Text("\n  ".join(lines))
    shown.stylize(COLOURS.get(label, ""), 0, len(label))
    console.print(shown)


def table(console: Console, columns: Mapping[str, str], rows: Sequence[Sequence[str]], wrapped: str) -> None:
    """`columns`: heading to < or >, how it is aligned. Only `wrapped` gives way where there is no room."""
    names = list(columns)
    widths = [max(map(cell_len, cells)) for cells in zip(names, *rows, strict=True)]
    index = names.index(wrapped)
    others = sum(widths) - widths[index] + GAP * (len(names) - 1)
    widths[index] = min(widths[index], max(NARROWEST, cell_len(wrapped), console.width - others))
    console.print(_line(dict(zip(names, names, strict=True)), widths, columns, "bold"))
    for row in rows:
        cells = [[cell] for cell in row]
        cells[index] = wrap(row[index], widths[index])
        for line in itertools.zip_longest(*cells, fillvalue=""):
            console.print(_line(dict(zip(names, line, strict=True)), widths, columns))


def _line(cells: Mapping[str, str], widths: Sequence[int], columns: Mapping[str, str], style: str = "") -> Text:
    line = Text(style=style)
    for (name, cell), width in zip(cells.items(), widths, strict=True):
        space = " " * (width - cell_len(cell))
        line.append(space if columns[name] == ">" else "")
        line.append(cell, COLOURS.get(cell.split(" ")[0], "") if name == "state" else "")
        line.append(" " * GAP if columns[name] == ">" else space + " " * GAP)
    line.rstrip()
    return line


def pairs(console: Console, values: Mapping[str, str]) -> None:
    """Names and their values below each other; a value that does not fit beside its name is below it."""
    widest = max(map(len, values)) + GAP
    for name, value in values.items():
        if cell_len(value) <= console.width - GAP - widest:
            lines = [f"{name:<{widest}}{value}"]
        else:
            lines = [name, *(" " * GAP + line for line in wrap(value, console.width - 2 * GAP))]
        for line in lines:
            console.print(Text(" " * GAP + line))


def progress(transient: bool = False) -> Progress:
    """Bars on stderr, which are gone at the end if they are `transient`."""
    bar = BarColumn(style="dim", complete_style="cyan", finished_style="green", pulse_style="cyan")
    columns = (TextColumn("{task.description}"), bar, MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=open_console(stderr=True), transient=transient)
