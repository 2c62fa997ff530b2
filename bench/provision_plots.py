"""The plots of `paper_figures`: one panel per metric, one line per system."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

Rows = list[dict[str, object]]
METRICS = (
    ("ttft_p95_s", "TTFT p95, s", 0.25),
    ("adapters_90", "adapters within SLO", None),
    ("tokens_per_s", "tokens/s", None),
    ("tpot_ms", "mean TPOT, ms", 100),
)
AXIS = {"5": "ratio", "11": "rate", "12": "instances", "13": "case", "15": "label"}


def draw(name: str, rows: Rows, file: Path) -> None:
    """Figure 11 has a row of panels per model, the others one row."""
    if name == "15":
        rows = [entry | {"label": f"s={entry['s']} N={entry['N']}"} for entry in rows]
    models = list(dict.fromkeys(str(entry.get("model", "")) for entry in rows))
    figure = Figure(figsize=(13, 2.7 * len(models) + 0.4), layout="constrained")
    panels = figure.subplots(len(models), len(METRICS), squeeze=False)
    for line, model in zip(panels, models, strict=True):
        chosen = [entry for entry in rows if str(entry.get("model", "")) == model]
        for axes, metric in zip(line, METRICS, strict=True):
            _panel(axes, name, chosen, metric)
        line[0].set_title(model or f"Figure {name}", fontsize=10, loc="left")
    panels[0][-1].legend(fontsize=7)
    figure.savefig(file, dpi=90)


def _panel(axes: object, name: str, rows: Rows, metric: tuple[str, str, float | None]) -> None:
    key, label, limit = metric
    cases = list(dict.fromkeys(_system(name, entry) for entry in rows))
    for case in cases:
        chosen = [entry for entry in rows if _system(name, entry) == case]
        axes.plot(
            [entry[AXIS[name]] for entry in chosen], [entry[key] for entry in chosen], marker="o", ms=3, label=case
        )
    if limit is not None:
        axes.axhline(limit, color="grey", linestyle=":")
    if key == "ttft_p95_s":
        axes.set_yscale("log")
    axes.set_xlabel(AXIS[name])
    axes.set_ylabel(label)
    if name in ("13", "15"):
        axes.tick_params(axis="x", rotation=35, labelsize=7)


def _system(name: str, entry: dict[str, object]) -> str:
    if name == "5":
        return "S-LoRA"
    return str(entry["eq6" if name == "13" else "case"])
