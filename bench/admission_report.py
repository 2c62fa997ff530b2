"""The table and the plot of bench.admission."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.table import Table

from bench import harness

BAR = 0.03  # of a rate


COLUMNS = (
    "workload {workload} | pool {pool:>} | measured {measured[mean]:.1f} ±{measured[reach]:.1f}"
    " | simulated {simulated:.1f} | difference {points:>} | as asked {as_asked:.1f}"
    " | long run {long_run[mean]:.1f} ±{long_run[reach]:.1f}"
    " | offered {offered:.1f} | literal {literal:.1f} | queued {queued:.1f} | rule {rule:.1f} | late, ms {when:>}"
)


def table(rows: Sequence[dict[str, Any]]) -> Table:
    counted = [row for row in rows if not row["late"]]
    agreed = sum(row["agrees"] for row in counted)
    title = f"immediate admission, %; within {BAR:.0%} of the simulation in {agreed} of {len(counted)} cells on time"
    return harness.table(title, map(_in_percent, rows), COLUMNS)


def _in_percent(row: dict[str, Any]) -> dict[str, Any]:
    rates = ("simulated", "as_asked", "offered", "literal", "queued", "rule")
    found = row | {key: 100 * row[key] for key in rates}
    for key in ("measured", "long_run", "difference"):
        one = row[key]
        found[key] = {"mean": 100 * one["mean"], "reach": 50 * (one["high"] - one["low"])}
    points = "{mean:+.1f} ±{reach:.1f}".format(**found["difference"])
    found["points"] = points if row["agrees"] else f"[red]{points}[/red]"
    found["when"] = f"{row['late_p95_ms']:.0f}" + (" [red]late[/red]" if row["late"] else "")
    return found


def draw(rows: Sequence[dict[str, Any]], file: Path) -> None:
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
