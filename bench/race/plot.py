"""The plot of a race: `python -m bench.race.plot [RESULT.json]`, the newest by default; a PNG beside it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bench.race.score import ENOUGH, TTFT_SECONDS

RESULTS = Path(__file__).parents[1] / "results"
PANELS = (("ttft_p95_s", "TTFT p95, s", True), ("within", "requests within the SLO", False))


def draw(found: dict[str, Any], out: Path) -> None:
    """Draw TTFT p95 and attainment over the rate, of the adapters that have most rates."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    rows = [row for row in found["rows"] if row["load"] == "poisson"]
    kind = (rows[0]["adapters"], rows[0]["sites"])
    rows = [row for row in rows if (row["adapters"], row["sites"]) == kind]
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), constrained_layout=True)
    for axis, (key, label, is_log) in zip(axes, PANELS, strict=True):
        for system in dict.fromkeys(row["system"] for row in rows):
            points = sorted((row["rate"], row[key]) for row in rows if row["system"] == system)
            axis.plot(*zip(*points, strict=True), marker="o", label=system)
        axis.axhline(TTFT_SECONDS if is_log else ENOUGH, color="gray", linestyle=":")
        axis.set(xlabel="requests/s", ylabel=label, yscale="log" if is_log else "linear")
    axes[0].legend(fontsize=7)
    figure.suptitle(f"{kind[0]} adapters, {kind[1]} sites; {found['hardware']}", fontsize=8)
    figure.savefig(out, dpi=120)
    plt.close(figure)


def main() -> None:
    """Command line."""
    newest = sorted(RESULTS.glob("race-cpu-*.json"))[-1:]
    for file in [Path(name) for name in sys.argv[1:]] or newest:
        draw(json.loads(file.read_text()), file.with_suffix(".png"))
        print(file.with_suffix(".png"))


if __name__ == "__main__":
    main()
