"""The table and the plot of bench.admission."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.table import Table

BAR = 0.03  # of a rate


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Rates in percent."""
    counted = [row for row in rows if not row["late"]]
    agreed = sum(row["agrees"] for row in counted)
    title = f"immediate admission, %; within {BAR:.0%} of the simulation in {agreed} of {len(counted)} cells on time"
    grid = Table(title=title, title_justify="left")
    for column in ("workload", "pool", "measured", "simulated", "difference", "as asked", "long run"):
        grid.add_column(column, justify="left" if column == "workload" else "right", no_wrap=True)
    for column in ("offered", "literal", "queued", "rule", "late, ms"):
        grid.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        late = f"{row['late_p95_ms']:.0f}" + (" [red]late[/red]" if row["late"] else "")
        points = _interval(row["difference"], "+.1f")
        points = points if row["agrees"] else f"[red]{points}[/red]"
        rates = [f"{100 * row[key]:.1f}" for key in ("offered", "literal", "queued", "rule")]
        middle = [f"{100 * row['simulated']:.1f}", points, f"{100 * row['as_asked']:.1f}", _interval(row["long_run"])]
        grid.add_row(row["workload"], row["pool"], _interval(row["measured"]), *middle, *rates, late)
    return grid


def _interval(found: dict[str, float], form: str = ".1f") -> str:
    mean, low, high = (100 * found[key] for key in ("mean", "low", "high"))
    return f"{mean:{form}} ±{(high - low) / 2:.1f}"


def draw(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Measured over simulated, and each model over simulated."""
    figure = Figure(figsize=(6, 5.5), layout="constrained")
    axes = figure.add_subplot()
    x = np.array([row["simulated"] for row in rows])
    axes.plot([0, 1], [0, 1], color="grey", lw=0.8)
    axes.fill_between([0, 1], [-BAR, 1 - BAR], [BAR, 1 + BAR], color="grey", alpha=0.2, label="3 points")
    for model, mark in (("offered", "^"), ("queued", "s"), ("rule", "x")):
        axes.plot(x, [row[model] for row in rows], mark, ms=4, alpha=0.6, label=model)
    y, reach = np.array(
        [[row["measured"]["mean"], row["measured"]["high"] - row["measured"]["mean"]] for row in rows]
    ).T
    axes.errorbar(x, y, reach, fmt="ko", ms=4, lw=0.8, label="measured")
    low = max(min(x.min(), y.min()) - 0.1, 0)
    axes.set(xlabel="simulated, the same calls", ylabel="immediate admission", xlim=(low, 1.01), ylim=(low, 1.01))
    axes.legend()
    figure.savefig(file, dpi=100)
