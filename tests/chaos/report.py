"""The counts of a run as a table, and whether they keep within the bars."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

MOST_TIMES = 3.0  # a well-behaved client's p99 under a flood, against its own before it
LEAK_BYTES, LEAK_DESCRIPTORS = 192 << 20, 64  # of all processes of a server


@dataclass
class Line:
    """One kind of harm. `answers`: outcomes of the clients that did nothing wrong."""

    kind: str
    times: int
    answers: Counter[str] = field(default_factory=Counter)
    late: int = 0  # not all right again within the deadline
    lost: int = 0  # leases of bystanders
    ratio: float = 0.0  # of p99
    most: float = MOST_TIMES  # that it may be

    def counts(self) -> list[int]:
        """Return the counts that must be 0: wrong answers, untyped errors, late, lost."""
        untyped = sum(count for outcome, count in self.answers.items() if outcome.startswith("untyped"))
        return [self.answers["wrong"], untyped, self.late, self.lost]

    @property
    def holds(self) -> bool:
        return not any(self.counts()) and self.ratio <= self.most


@dataclass
class Held:
    """The resources of one server's processes, before and after."""

    what: str
    before: tuple[int, int]  # bytes, descriptors
    after: tuple[int, int]

    @property
    def holds(self) -> bool:
        grown = [after - before for before, after in zip(self.before, self.after, strict=True)]
        return grown[0] <= LEAK_BYTES and grown[1] <= LEAK_DESCRIPTORS


def show(lines: list[Line], held: list[Held], seed: int) -> bool:
    console = Console()
    table = Table(
        title=f"Chaos, seed {seed}: leases that bystanders lost, p99 against that before", title_justify="left"
    )
    for column in ("kind", "times", "answers", "wrong", "untyped", "late", "leases", "p99 x", ""):
        table.add_column(column, justify="left" if column in ("kind", "") else "right")
    for line in lines:
        ratio = f"{line.ratio:.2f}" if line.ratio else ""
        cells = [f"{line.times:,}", f"{line.answers.total():,}", *map(str, line.counts()), ratio]
        table.add_row(line.kind, *cells, "" if line.holds else "[red]NO[/]")
    console.print(table)
    for one in held:
        before, after = (f"{nbytes / 2**20:,.0f} MB and {fds:,} descriptors" for nbytes, fds in (one.before, one.after))
        console.print(f"{one.what}: {before} before, {after} after{'' if one.holds else '  [red]a leak[/]'}")
    return all(one.holds for one in (*lines, *held))
