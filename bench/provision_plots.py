"""The plots of `paper_figures`: one panel per metric, one line per system, and the paper's own values as stars."""

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
PANELS = {
    "6": (("batch", "requests per instance", None),),
    "12b": (("active", "active adapters", None),),
    "13b": (("active", "active adapters", None),),
    "16": (("us", "us of a layer", None),),
}
AXIS = {"5": "ratio", "11": "rate", "12": "instances", "13": "case", "15": "label", "1b": "rate", "6": "time_s"}
AXIS |= {"12b": "time_s", "13b": "time_s", "14": "case", "16": "batch", "17": "instances", "18": "rate"}
# the values that its text and tables give: model, where on the axis, metric, value; Figure 16's are Table 4's of EP4
PAPER: dict[str, tuple[tuple[str, object, str, float], ...]] = {
    "14": (
        ("", "S-LoRA", "ttft_p95_s", 0.78),
        ("", "+disagg", "ttft_p95_s", 0.99),
        ("", "+kernel", "adapters_90", 1.0),
    ),
    "16": tuple(
        ("mixtral-8x7b", batch, "us", us)
        for batch, terms in ((128, (145, 142, 207)), (256, (246, 204, 396)))
        for us in terms
    ),
}


def draw(name: str, rows: Rows, file: Path) -> None:
    """Figure 11 has a row of panels per model, the others one row."""
    if name == "15":
        rows = [entry | {"label": f"s={entry['s']} N={entry['N']}"} for entry in rows]
    models = list(dict.fromkeys(str(entry.get("model", "")) for entry in rows))
    metrics = PANELS.get(name, METRICS)
    figure = Figure(figsize=(13 if len(metrics) > 1 else 7, 2.7 * len(models) + 0.4), layout="constrained")
    panels = figure.subplots(len(models), len(metrics), squeeze=False)
    for line, model in zip(panels, models, strict=True):
        chosen = [entry for entry in rows if str(entry.get("model", "")) == model]
        for axes, metric in zip(line, metrics, strict=True):
            _panel(axes, name, chosen, metric)
            stars = [(x, value) for of, x, key, value in PAPER.get(name, ()) if (of, key) == (model, metric[0])]
            if stars:
                axes.plot(*zip(*stars, strict=True), "k*", ms=9, label="the paper's")
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
    if name in ("13", "14", "15"):
        axes.tick_params(axis="x", rotation=35, labelsize=7)


def _system(name: str, entry: dict[str, object]) -> str:
    if name in ("5", "14"):
        return "S-LoRA" if name == "5" else "simulated"
    return str(entry["eq6" if name == "13" else "case"])
