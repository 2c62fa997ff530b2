"""The part of docs/paper.md that was measured on CPUs: the last race's rows, with intervals."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.race.score import ENOUGH, highest_rate

RESULTS = Path(__file__).parent / "results"
Z = 1.96  # of a normal's middle 95 %
TEXT = """## Measured on CPUs

Figure 11's question, how many requests a second engines serve within the SLO, of [the last race]({page}):
`{command}`, {hardware}, a dense model, {adapters} adapters of ranks 8 to 64 on attention
sites, Zipf 1.0. *Coupled* is vLLM with its own LoRA, the better of its settings at each rate. In brackets stand 95 %
intervals of a share of so many requests (Wilson's). TTFT p95 is of one run, so it has none.

{rows}

Highest rate with {enough:.0%} within the SLO: coupled {own:g}, ours {ours:g}{more}: **{gain}{times}**, where the
paper has 3.05x, and the simulation 1.79x over a tuned S-LoRA. The ablation (Figure 14), layouts (13, 18) and instances
(12) were not measured: on two cores a second shard or engine takes its core from the first, and that is what one would
measure."""


def wilson(share: float, count: int) -> tuple[float, float]:
    """Return the 95 % interval of a share of `count` independent requests."""
    middle = (share + Z * Z / (2 * count)) / (1 + Z * Z / count)
    half = Z * math.sqrt(share * (1 - share) / count + Z * Z / (4 * count * count)) / (1 + Z * Z / count)
    return max(0.0, middle - half), min(1.0, middle + half)


def section() -> str:
    """Build the section from the newest race in the results."""
    file = max(RESULTS.glob("race-cpu-*.json"))
    race = json.loads(file.read_text())
    count = next(row["adapters"] for row in race["rows"])
    poisson = [row for row in race["rows"] if row["load"] == "poisson"]
    poisson = [row for row in poisson if (row["adapters"], row["sites"]) == (count, "attention")]
    lines = ["| requests/s | calls | coupled: within SLO | TTFT p95 | ours: within SLO | TTFT p95 |", f"|{'---|' * 6}"]
    own, ours = list[Mapping[str, Any]](), [row for row in poisson if row["system"] == "ours"]
    rates = sorted(float(row["rate"]) for row in ours)  # vLLM without adapters goes higher
    for rate in rates:
        (mine,) = (row for row in ours if row["rate"] == rate)
        rivals = [row for row in poisson if row["rate"] == rate and row["system"].startswith("vLLM's LoRA")]
        best = max(rivals, key=lambda row: (row["within"], -row["ttft_p95_s"]), default=None)
        own += [best] if best else []
        shown = _shown(best) if best else "not run: it served less than half at the rate before | "
        lines.append(f"| {rate:g} | {mine['calls']} | {shown} | {_shown(mine)} |")
    highest = highest_rate(own), highest_rate(ours)
    bounded = highest[1] == rates[-1]
    return TEXT.format(
        page=f"../bench/results/{file.with_suffix('.md').name}", command=race["command"], hardware=race["hardware"],
        adapters=count, rows="\n".join(lines), enough=ENOUGH, own=highest[0], ours=highest[1],
        more=", the highest that was tried" if bounded else "", gain="at least " if bounded else "",
        times=f"{highest[1] / highest[0]:.2f}x" if highest[0] else "any factor, as coupled serves none",
    )  # fmt: skip


def _shown(row: Mapping[str, Any]) -> str:
    low, high = wilson(row["within"], row["calls"])
    return f"{row['within']:.0%} ({low:.0%} to {high:.0%}) | {row['ttft_p95_s']:.2f} s"
