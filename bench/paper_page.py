"""docs/paper.md, from the CSVs of `paper_figures`: each figure, and what the paper's text says beside what we find."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from bench import paper_measured

Rows = list[dict[str, str]]
HEAD = """# The paper's evaluation, rerun

The method of this project is InfiniLoRA's (arXiv 2604.07173). `make paper` makes every figure and table on this page,
and the page: in simulation, from the latency model that [Plan GPUs](provisioning.md) describes, with assumptions that
were written before the first run (`bench/provision_setups.py`, `bench/paper_more.py`). No figure here is of a GPU;
Table 4's cell of EP4 has [two that are](../bench/results/gpu-h200-2026-11.md).
Figure 11 takes half an hour: `make paper ARGS="--figures 11"`.

"The paper" is what its text and tables say; of its plots no values are known. Stars in a plot are the paper's values.
Rows where we find something else than the paper come first.
"""
WORDS = "Words: [Glossary](glossary.md)"
TAIL = """
## Not simulated

- Figures 2 to 4 and 7 to 10 are diagrams, Table 2 is notation and Table 3 the set-ups' input.
- Figure 19 compares kernels on a GPU: `make gpu` runs ours beside vLLM's, SGLang's and Punica's
  ([the GPU run](gpu-run.md)); the peers have not run yet.
- Push beside pull was measured on CPUs alone: 1.04x to 2.43x over TCP, where the paper has 2.63x at 4 MB between GPUs
  ([figures](../bench/results/pull-cpu-2026-11.md)).
- Other engines beside ours, measured on CPUs: [Is it for you?](decide.md#measured).
"""


class Claim(NamedTuple):
    """A sentence of the paper: what it says, the figures that `find` finds in our rows, how they are shown, and whether
    they agree with it."""

    figure: str
    what: str
    paper: str
    find: Callable[[Rows], Sequence[float]]
    shown: str
    agrees: Callable[..., bool]


class Picture(NamedTuple):
    """A section of the page: a figure or a table, and what we say about it."""

    figure: str
    title: str
    text: str


def _of(rows: Rows, key: str, **where: str) -> float:
    """Return a number of the only row that `where` fits."""
    (row,) = [row for row in rows if all(row[name] == value for name, value in where.items())]
    return float(row[key])


def _most(rows: Rows, key: str, case: str) -> float:
    return max(float(row[key]) for row in rows if row["case"] == case)


def _tpot_change(rows: Rows, before: dict[str, str], after: dict[str, str]) -> float:
    """Return the relative change of TPOT from one row to another."""
    return _of(rows, "tpot_ms", **after) / _of(rows, "tpot_ms", **before) - 1


def _tpot_change_at(rows: Rows, rate: str, before: str, after: str) -> float:
    """Return the relative change of TPOT from one case to another at a rate."""
    return _tpot_change(rows, {"case": before, "rate": rate}, {"case": after, "rate": rate})


def _ttft(rows: Rows, case: str) -> float:
    return _of(rows, "ttft_p95_s", case=case)


def _nvlink_changes(rows: Rows) -> list[float]:
    links = ("InfiniBand", "NVLink")
    return [_tpot_change(rows, *({"case": link, "instances": n} for link in links)) for n in "123"]


def _mean_gain(rows: Rows, rival: str) -> float:
    """Return the mean over models of the LoRA Server's serviceable rate over a rival's."""
    rates = {(row["model"], row["case"]): float(row["serviceable_rate"]) for row in rows}
    models = list(dict.fromkeys(model for model, _ in rates))
    return sum(rates[model, "LoRA Server"] / rates[model, rival] for model in models) / len(models)


def _near(expected: float) -> Callable[..., bool]:
    """Return whether the first figure is within a quarter of the paper's."""
    return lambda found, *_: math.isclose(found, expected, rel_tol=0.25)


LAYOUT_12 = "ep4-pp1, per stage"
SIX, FOUR = "6 instances", "ep4-pp1 (113)"
CLAIMS = (
    Claim(
        "5",
        "TTFT p95 at a cache ratio of 10 %",
        "hundreds of seconds",
        lambda rows: [_ttft(rows, "10%")],
        "{:.0f} s",
        lambda ttft_s: ttft_s > 100,
    ),
    Claim(
        "1b",
        "TPOT of 2 x 8 GPUs against 8 x 2 at 96 requests/s",
        "significantly higher",
        lambda rows: [_tpot_change_at(rows, "96.0", "8 x 2 GPUs", "2 x 8 GPUs")],
        "{:+.0%}",
        lambda change: change > 0.1,
    ),
    Claim(
        "11",
        "serviceable rate over S-LoRA as the paper splits memory, mean of five models",
        "3.05x",
        lambda rows: [_mean_gain(rows, "S-LoRA"), _mean_gain(rows, "S-LoRA, tuned")],
        "{:.2f}x; {:.2f}x over a tuned S-LoRA",
        _near(3.05),
    ),
    Claim(
        "12",
        "TPOT from one instance to six",
        "+10.5 %",
        lambda rows: [_tpot_change(rows, *({"instances": one, "case": LAYOUT_12} for one in "16"))],
        "{:+.0%} with ep4-pp1",
        lambda change: change < 0.25,
    ),
    Claim(
        "12b",
        "active adapters of six instances, at most",
        "the cache's capacity",
        lambda rows: [_most(rows, "active", SIX)],
        "{:.0f} of 208",
        lambda most: most >= 200,
    ),
    Claim(
        "13b",
        "active adapters of four GPUs, at most",
        "the cache's capacity",
        lambda rows: [_most(rows, "active", FOUR)],
        "{:.0f} of 113",
        lambda most: most >= 110,
    ),
    Claim(
        "14",
        "TTFT p95, S-LoRA to +disagg",
        "0.78 s to 0.99 s",
        lambda rows: [_ttft(rows, "S-LoRA"), _ttft(rows, "+disagg")],
        "{:.3f} s to {:.3f} s",
        _near(0.78),
    ),
    Claim(
        "14",
        "TTFT p95, +disagg to all optimisations",
        "11x lower",
        lambda rows: [_ttft(rows, "+disagg") / _ttft(rows, "+kernel")],
        "{:.1f}x lower",
        _near(11),
    ),
    Claim(
        "14",
        "TPOT, +disagg to all optimisations",
        "-30 %",
        lambda rows: [_tpot_change(rows, {"case": "+disagg"}, {"case": "+kernel"})],
        "{:+.0%}",
        _near(-0.3),
    ),
    Claim(
        "17",
        "TPOT with NVLink, one to three instances",
        "-14.6 % on average",
        _nvlink_changes,
        "{:+.1%}, {:+.1%}, {:+.1%}",
        lambda *changes: math.isclose(sum(changes) / 3, -0.146, rel_tol=0.25),
    ),
    Claim(
        "18",
        "TPOT of ep4-pp2 against ep2-pp4 at 100 requests/s",
        "lower",
        lambda rows: [_tpot_change_at(rows, "100.0", "ep2-pp4", "ep4-pp2")],
        "{:+.1%}",
        lambda change: change < 0,
    ),
    Claim(
        "table4",
        "all 32 cells, in us",
        "measured",
        lambda rows: [max(abs(float(row["us"]) / float(row["paper_us"]) - 1) for row in rows)],
        "within {:.0%}; fitted to batch 128",
        lambda error: error < 0.25,
    ),
)
PICTURES = (
    Picture("1a", "Figure 1a: what an instance's memory holds", "GB. Half of what the weights leave is for adapters."),
    Picture(
        "1b",
        "Figure 1b: scale out, scale up",
        """We find the opposite of the paper: our model of an engine has no collectives between its own GPUs, whose
cost is what makes scaling up slow there.""",
    ),
    Picture("5", "Figure 5: cache ratio", "S-LoRA, 256 adapters, four instances."),
    Picture("6", "Figure 6: batch over time", "The same set-ups."),
    Picture(
        "11", "Figure 11: five models", "What it says is in [Plan GPUs](provisioning.md#the-papers-figures-rerun)."
    ),
    Picture("12", "Figure 12a: instances", "At our steps fewer requests are in flight than at the paper's."),
    Picture("12b", "Figure 12b: active adapters", "The cache of 208 does not run out, for that reason."),
    Picture("13", "Figure 13a: layouts", "Qwen3, 35 requests/s."),
    Picture("13b", "Figure 13b: active adapters", "In brackets the slots."),
    Picture(
        "14",
        "Figure 14: ablation",
        """As in the paper, +disagg alone is slower than S-LoRA. At 25 requests/s our caches hardly run out, so TTFT has
less to gain, and the base GEMM hides what +kernel adds.""",
    ),
    Picture("15", "Figure 15: popularity and number of adapters", "70 requests/s."),
    Picture("16", "Figure 16: terms over the batch", "A stage of four GPUs. Stars: Table 4, ep4-pp2."),
    Picture("17", "Figure 17: NVLink, InfiniBand", "With more than one instance our base GEMM hides both."),
    Picture("18", "Figure 18: two layouts, equal slots", "They differ where a stage is busy."),
    Picture("table1", "Table 1: ways to spread adapters", "Mixtral, batch 128, two client GPUs, eight of the server."),
    Picture("table4", "Table 4: microseconds of a layer", "The paper's, and the model's."),
)


def csv_of(name: str, folder: Path) -> Path:
    """Return the file of a figure or a table."""
    return folder / (f"paper_{name}.csv" if name.startswith("table") else f"paper_fig{name}.csv")


def page(folder: Path) -> str:
    """Build the page from the CSVs in a folder."""
    rows = {one.figure: _read(csv_of(one.figure, folder)) for one in PICTURES}
    found = [(one, one.find(rows[one.figure])) for one in CLAIMS]
    lines = ["| | | the paper | simulated | within a quarter |", "|---|---|---|---|---|"]
    for one, its in sorted(found, key=lambda pair: pair[0].agrees(*pair[1])):
        verdict = "yes" if one.agrees(*its) else "**no**"
        lines.append(f"| {_short(one.figure)} | {one.what} | {one.paper} | {one.shown.format(*its)} | {verdict} |")
    parts = [
        HEAD,
        "\n".join(lines),
        *(_section(one, rows[one.figure], folder) for one in PICTURES),
        paper_measured.section(),
        TAIL.strip(),
        WORDS,
    ]
    return "\n".join([parts[0], "\n\n".join(parts[1:])]) + "\n"


def _short(figure: str) -> str:
    return f"Table {figure.removeprefix('table')}" if figure.startswith("table") else f"Fig. {figure}"


def _section(one: Picture, rows: Rows, folder: Path) -> str:
    file = csv_of(one.figure, folder)
    link = f"[{file.name}](img/{file.name})"
    shown = f"![{_short(one.figure)}](img/{file.stem}.png)" if file.with_suffix(".png").exists() else _table(rows)
    return f"## {one.title}\n\n{one.text} {link}\n\n{shown}"


def _table(rows: Rows) -> str:
    names = list(rows[0])
    lines = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row.values())} |" for row in rows)])


def _read(file: Path) -> Rows:
    with file.open(newline="") as stream:
        return list(csv.DictReader(stream))
