"""Tables and files of a race."""

from __future__ import annotations

import importlib.metadata
import json
import math
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from bench import harness
from bench.race.score import ENOUGH, TPOT_SECONDS, TTFT_SECONDS, Row, highest_rate
from bench.race.systems import ROOT, SGLANG

PACKAGES = ("vllm", "torch", "transformers", "peft")
COLUMNS = (
    "load {load} {rate:g} | adapters {adapters} {sites} | system {system} | "
    "TTFT s, p50/p95/p99 {ttft_p50_s:.2f}/{ttft_p95_s:.2f}/{ttft_p99_s:.2f} | "
    "TPOT ms, p50/p95/p99 {tpot_p50_ms:.0f}/{tpot_p95_ms:.0f}/{tpot_p99_ms:.0f} | "
    "within SLO {within:.0%} | tokens/s {tokens_per_s:.0f} | equal {tokens} | notes {notes}"
)
Pair = tuple[Row, Row]
HEADER = "| requests | adapters | vLLM's own LoRA | ours | |\n|---|---|---|---|---|"


def line(row: Row) -> str:
    """Describe a row while the race runs."""
    one = _readable(row)
    load = f"{one['load']} {one['rate']:g}, {one['adapters']} {one['sites']}"
    times = f"TTFT {one['ttft_p50_s']:.2f}/{one['ttft_p95_s']:.2f} s, TPOT {one['tpot_p50_ms']:.0f} ms"
    speed = f"{one['tokens_per_s']:.0f} tokens/s, within {one['within']:.0%}"
    return f"{load}: {one['system']}: {times}, {speed} {one['tokens']} {one['notes']}".rstrip()


def tables(found: Mapping[str, Any]) -> list[Table | str]:
    """Build the table of all rows, and the README's."""
    title = f"SLO: TTFT {TTFT_SECONDS:g} s, TPOT {TPOT_SECONDS * 1e3:g} ms. {found['hardware']}"
    return [harness.table(title, map(_readable, found["rows"]), COLUMNS), readme(found)]


def readme(found: Mapping[str, Any]) -> str:
    """Build the README's table: the worst ratios, the load that ours serves worst, the best, closed loops."""
    pairs = [pair for pair in map(_pair, _loads(found["rows"])) if pair]
    opened = sorted((one for one in pairs if one[0]["load"] != "closed"), key=_gain)
    closed = sorted((one for one in pairs if one[0]["load"] == "closed"), key=_speed)
    hardest = sorted(opened, key=lambda one: one[1]["within"])[:1]
    chosen = {id(one[0]): one for one in (*opened[:3], *hardest, *opened[-2:], *closed[:2])}
    return "\n".join([HEADER, *map(_readme_row, chosen.values()), *_rates(found["rows"]), *_of_base(found["rows"])])


def _readme_row(pair: Pair) -> str:
    theirs, _ = pair
    adapters, way = f"{theirs['adapters']}, {theirs['sites']} sites", f"{theirs['system'].split(', ')[1]}: "
    if theirs["load"] == "closed":
        speeds = " | ".join(f"{one['tokens_per_s']:.0f} tokens/s" for one in pair)
        return f"| {theirs['rate']:g} in flight | {adapters} | {way}{speeds} | {_speed(pair):.2f}x the tokens/s |"
    cells = " | ".join(
        f"TTFT {one['ttft_p50_s']:.2f}/{one['ttft_p95_s']:.2f} s, TPOT {one['tpot_p50_s'] * 1e3:.0f} ms, "
        f"{one['within']:.0%}"
        for one in pair
    )
    return f"| {theirs['load']}, {theirs['rate']:g}/s | {adapters} | {way}{cells} | {_gain(pair):.1f}x lower TTFT p95 |"


def write(found: Mapping[str, Any], out: Path, only: str = "") -> None:
    """Write out/race-cpu-YEAR-MONTH.json and .md, of `only` one peer race_PEER-cpu-YEAR-MONTH."""
    out.mkdir(parents=True, exist_ok=True)
    stem = f"race{only and f'_{only}'}-cpu-{time.strftime('%Y-%m')}"
    rows = [{key: None if value != value else value for key, value in row.items()} for row in found["rows"]]
    (out / f"{stem}.json").write_text(json.dumps({**found, "rows": rows}, indent=1, allow_nan=False) + "\n")
    (out / f"{stem}.md").write_text(markdown(found, stem))


def markdown(found: Mapping[str, Any], stem: str) -> str:
    """Build the page of a race."""
    columns = [column.partition("{") for column in COLUMNS.split(" | ")]
    head = f"| {' | '.join(name.strip() for name, _, _ in columns)} |\n|{'---|' * len(columns)}"
    rows = "\n".join(
        f"| {' | '.join((brace + rest).format_map(_readable(row)) for _, brace, rest in columns)} |"
        for row in found["rows"]
    )
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    summary = f"{readme(found)}\n\nTTFT p50/p95, TPOT p50, requests within the SLO.\n\n"
    return f"""# The race, {stem.partition("-cpu-")[2]}

`{found["command"]}`, {found["seconds"]} s. {found["hardware"]}; {versions}. What each system is, and how rows are
counted: `bench/race/__main__.py`. SLO: TTFT {TTFT_SECONDS:g} s and TPOT {TPOT_SECONDS * 1e3:g} ms. Every row is in
`{stem}.json` beside this page.

{summary if any(map(_pair, _loads(found["rows"]))) else ""}## All rows

`equal`: calls whose tokens are those of ours, of those that both answered.

{head}
{rows}
"""


def versions() -> dict[str, str]:
    """Return the versions of what races."""
    pinned = re.findall(r"^(sglang)==(.*)$", (ROOT / "constraints-sglang.txt").read_text(), re.MULTILINE)
    return {name: importlib.metadata.version(name) for name in PACKAGES} | (dict(pinned) if SGLANG.exists() else {})


def _readable(row: Row) -> Row:
    notes = [f"{row['calls'] - row['complete']} incomplete"] * (row["calls"] > row["complete"])
    notes += [f"{row['failed']} failed"] * bool(row["failed"])
    notes += [f"sent {row['late_p99_s']:.2f} s late"] * bool(row["is_late"])
    times = {f"tpot_p{one}_ms": row[f"tpot_p{one}_s"] * 1e3 for one in (50, 95, 99)}
    tokens = f"{row['equal']}/{row['compared']}" if row["compared"] else ""
    return row | times | {"tokens": tokens, "notes": ", ".join(notes)}


def _loads(rows: Iterable[Row]) -> list[list[Row]]:
    by_load: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        by_load.setdefault(tuple(row[key] for key in ("load", "adapters", "sites", "rate")), []).append(row)
    return list(by_load.values())


def _pair(rows: list[Row]) -> Pair | None:
    """Return (vLLM's LoRA, ours) of a load that has both; of the former, the setting that serves this load best."""
    best = "tokens_per_s" if rows[0]["load"] == "closed" else "within"
    theirs = [row for row in rows if row["system"].startswith("vLLM's")]
    ours = [row for row in rows if row["system"] == "ours"]
    return (max(theirs, key=lambda row: (row[best], -row["ttft_p95_s"])), ours[0]) if theirs and ours else None


def _gain(pair: Pair) -> float:
    return _ratio(pair[0]["ttft_p95_s"], pair[1]["ttft_p95_s"])


def _speed(pair: Pair) -> float:
    return _ratio(pair[1]["tokens_per_s"], pair[0]["tokens_per_s"])


def _ratio(over: float, under: float) -> float:
    return over / under if under else math.inf


def _rates(rows: Iterable[Row]) -> list[str]:
    """Say the highest rates, by adapters and sites."""
    lines = []
    poisson = [row for row in rows if row["load"] == "poisson"]
    for kind in dict.fromkeys((row["adapters"], row["sites"]) for row in poisson):
        mine = [row for row in poisson if (row["adapters"], row["sites"]) == kind]
        best = [
            f"{system} {highest_rate(row for row in mine if row['system'] == system):g}"
            for system in dict.fromkeys(row["system"] for row in mine)
        ]
        tried = sorted({row["rate"] for row in mine})
        lines.append(
            f"Highest of the rates {', '.join(f'{one:g}' for one in tried)}/s with {ENOUGH:.0%} within the SLO, "
            f"{kind[0]} adapters, {kind[1]}: {', '.join(best)}."
        )
    return ["", *lines]


def _of_base(rows: Iterable[Row]) -> list[str]:
    """Say what adapters cost in a closed loop."""
    lines = []
    for load in _loads(row for row in rows if row["load"] == "closed"):
        by_system = {row["system"]: row["tokens_per_s"] for row in load}
        if "base" in by_system:
            over = {name: _ratio(by_system["ours"], speed) for name, speed in by_system.items() if "base" in name}
            shares = [f"{ratio:.2f} of {name}" for name, ratio in over.items()]
            lines.append(
                f"Closed loop, {load[0]['adapters']} adapters, {load[0]['sites']}: ours is {', '.join(shares)}."
            )
    return lines
