"""The paper's figures and tables, rerun in simulation: a CSV and a PNG each, and the page docs/paper.md.

    make paper                              all but Figure 11, which takes half an hour: its committed CSV is used
    make paper ARGS="--figures 11"

Prints every assumption first (`provision_setups.ASSUMPTIONS`, fixed before the first run). Figures 5, 11, 12, 13 and 15
are here, the others in `paper_more`.
"""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from bench import harness, paper_more, paper_page
from bench.paper_more import Rows, row
from bench.provision_plots import draw
from bench.provision_setups import ASSUMPTIONS, TABLE_3, Setup, serviceable_rate, tuned
from lora_server.placement import Layout
from provisioning.model.latency import Eq6

FORMS: dict[str, Eq6] = {"per stage": "stage", "as printed": "printed"}


def systems(model: str) -> dict[str, Setup]:
    """The four of Figure 11, and what a sceptic asks for."""
    _, instance_gpus, total = TABLE_3[model]
    everything, half = total // instance_gpus, total // 2
    server = Setup(model=model, instances=half // instance_gpus, layout=Layout(4, half // 4))
    return {
        "S-LoRA": Setup(model=model, instances=everything),
        "S-LoRA w/ SJF": Setup(model=model, instances=everything, order="sjf"),
        "S-LoRA w/ less LoRA": Setup(model=model, instances=everything, lora_share=0.4),
        "LoRA Server": server,
        "LoRA Server, Eq. 6 as printed": replace(server, eq6="printed"),
        "LoRA Server, any instance": replace(server, any_instance=True),
    }


def figure_5() -> Rows:
    """Mixtral, four coupled instances, 256 adapters, cache ratio 10 to 50 %."""
    rows = []
    for ratio in (0.1, 0.2, 0.3, 0.4, 0.5):
        setup = Setup(model="mixtral-8x7b", instances=4, adapters=256, slots=max(int(256 * ratio / 4), 1))
        rows.append({"ratio": ratio, **row(f"{ratio:.0%}", setup, 48.0)})
    return rows


def figure_11() -> Rows:
    """Serviceable rates, then TTFT, attainment, throughput and TPOT at eight loads up to 1.2 of the highest."""
    rows: Rows = []
    for model in TABLE_3:
        setups = systems(model)
        best = {name: serviceable_rate(setup) for name, setup in setups.items()}
        setups["S-LoRA, tuned"] = tuned(setups["S-LoRA"], best["S-LoRA"])
        best["S-LoRA, tuned"] = serviceable_rate(setups["S-LoRA, tuned"], about=best["S-LoRA"])
        print(f"{model}: tuned to {setups['S-LoRA, tuned'].lora_share:.0%} for adapters", flush=True)
        for name, setup in setups.items():
            for step in range(1, 9):
                rate = 0.15 * step * max(*best.values(), 1.0)
                entry = row(name, setup, rate)
                rows.append({"model": model, "serviceable_rate": round(best[name], 2), **entry})
        print(model, {name: round(rate, 2) for name, rate in best.items()}, flush=True)
    return rows


def figure_12() -> Rows:
    """Mixtral, one to six instances at 12 requests/s each, four-GPU servers; S-LoRA with six beside them."""
    rows = []
    for instances in range(1, 7):
        for layout in (Layout(4, 1), Layout(2, 2)):
            for name, eq6 in FORMS.items():
                server = Setup(model="mixtral-8x7b", instances=instances, layout=layout, eq6=eq6)
                rows.append({"instances": instances, **row(f"{layout}, {name}", server, 12.0 * instances)})
    return [*rows, {"instances": 6, **row("S-LoRA", Setup(model="mixtral-8x7b", instances=6), 72.0)}]


def figure_13() -> Rows:
    """Qwen3, four instances, 35 requests/s, servers of 4, 6 and 8 GPUs."""
    rows = []
    for layout in ("ep4-pp1", "ep2-pp3", "ep2-pp4", "ep4-pp2", "ep8-pp1"):
        for name, eq6 in FORMS.items():
            setup = Setup(model="qwen3-30b-a3b", instances=4, layout=Layout.parse(layout), eq6=eq6)
            rows.append({"gpus": setup.layout.num_shards, "eq6": name, **row(layout, setup, 35.0)})
    return rows


def figure_15() -> Rows:
    """Mixtral at 70 requests/s, over s (512 adapters) and over N (s = 1.2)."""
    rows = []
    for skew, adapters in ((0.9, 512), (1.2, 512), (1.5, 512), (1.2, 256), (1.2, 1024)):
        layout = Layout(4, 1) if skew == 1.5 or adapters == 256 else Layout(4, 2)
        options = {"model": "mixtral-8x7b", "adapters": adapters, "skew": skew}
        for name, setup in (
            *(
                (f"LoRA Server, {name}", Setup(instances=4, layout=layout, eq6=eq6, **options))
                for name, eq6 in FORMS.items()
            ),
            ("S-LoRA", Setup(instances=8, **options)),
        ):
            rows.append({"s": skew, "N": adapters, "layout": str(setup.layout or ""), **row(name, setup, 70.0)})
    return rows


FIGURES: dict[str, Callable[[], Rows]] = {
    "5": figure_5,
    "11": figure_11,
    "12": figure_12,
    "13": figure_13,
    "15": figure_15,
    **paper_more.FIGURES,
}
LONG = ("11",)
WITHOUT_PLOT = ("1a", "table1", "table4")


def ratios(rows: Rows) -> list[str]:
    """Serviceable rates and adapters within the SLO of a LoRA Server over an S-LoRA: the worst for us first."""
    lines = []
    for server in ("LoRA Server, Eq. 6 as printed", "LoRA Server", "LoRA Server, any instance"):
        for rival in ("S-LoRA, tuned", "S-LoRA"):
            found = {model: _ratio(rows, model, server, rival) for model in TABLE_3}
            lines.append(f"{server} over {rival} (the paper: 3.05x, +54.0 points):")
            for model in sorted(found, key=found.__getitem__):
                gain = 100 * (_within(rows, model, server) - _within(rows, model, rival))
                lines.append(f"  {model:18} {found[model]:5.2f}x  {gain:+6.1f} points")
            ratio = list(found.values())
            lines.append(
                f"  geometric mean {math.prod(ratio) ** (1 / len(ratio)):.2f}x, mean {sum(ratio) / len(ratio):.2f}x"
            )
    return lines


def _ratio(rows: Rows, model: str, server: str, rival: str) -> float:
    rates = {str(entry["case"]): float(str(entry["serviceable_rate"])) for entry in rows if entry["model"] == model}
    return rates[server] / rates[rival] if rates[rival] else float("inf")


def _within(rows: Rows, model: str, case: str) -> float:
    shares = [float(str(entry["adapters_90"])) for entry in rows if (entry["model"], entry["case"]) == (model, case)]
    return sum(shares) / len(shares)


def main() -> None:
    figures = ",".join(name for name in FIGURES if name not in LONG)
    arguments = harness.flags(__doc__, json=False, out=Path("docs/img"), figures=figures, page=Path("docs/paper.md"))
    print(ASSUMPTIONS, flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in arguments.figures.split(","):
        start = time.time()
        rows = FIGURES[name]()
        file = paper_page.csv_of(name, arguments.out)
        with file.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        if name not in WITHOUT_PLOT:
            draw(name, rows, file.with_suffix(".png"))
        print(f"figure {name}: {file} ({time.time() - start:.0f} s)", flush=True)
        if name == "11":
            print("\n".join(ratios(rows)), flush=True)
    arguments.page.write_text(paper_page.page(arguments.out))
    print(f"page: {arguments.page}")


if __name__ == "__main__":
    main()
