"""Tables and files of a race."""

from __future__ import annotations

import importlib.metadata
import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from bench import harness
from bench.race.score import ENOUGH, TPOT_SECONDS, TTFT_SECONDS, Row, highest_rate

PACKAGES = ("vllm", "torch", "transformers", "peft")
COLUMNS = (
    "load {load} | adapters {adapters} | sites {sites} | rate {rate:g} | system {system} | TTFT p50 {ttft_p50_s:.2f} | "
    "p95 {ttft_p95_s:.2f} | p99 {ttft_p99_s:.2f} | TPOT p50 {tpot_p50_ms:.0f} | p95 {tpot_p95_ms:.0f} | "
    "p99 {tpot_p99_ms:.0f} | within {within:.0%} | tokens/s {tokens_per_s:.0f} | equal {tokens} | notes {notes}"
)
HEADER = "| load | vLLM's LoRA | ours | |\n|---|---|---|---|"


def line(row: Row) -> str:
    """Describe a row while the race runs."""
    one = _readable(row)
    load = f"{one['load']} {one['rate']:g}, {one['adapters']} {one['sites']}"
    times = f"TTFT {one['ttft_p50_s']:.2f}/{one['ttft_p95_s']:.2f} s, TPOT {one['tpot_p50_ms']:.0f} ms"
    speed = f"{one['tokens_per_s']:.0f} tokens/s, within {one['within']:.0%}"
    return f"{load}: {one['system']}: {times}, {speed} {one['tokens']} {one['notes']}".rstrip()


def tables(found: Mapping[str, Any]) -> list[Table | str]:
    """Build the table of all rows, and the README's."""
    title = f"SLO: TTFT {TTFT_SECONDS:g} s, TPOT {TPOT_SECONDS * 1e3:g} ms. {found['hardware']}. TTFT in s, TPOT in ms"
    return [harness.table(title, map(_readable, found["rows"]), COLUMNS), readme(found)]


def readme(found: Mapping[str, Any]) -> str:
    """Build the README's table, at most eight rows, the worst ratio of each kind of load first."""
    pairs = [pair for pair in map(_pair, _loads(found["rows"])) if pair]
    opened = sorted((one for one in pairs if one[0]["load"] != "closed"), key=_gain)
    closed = sorted((one for one in pairs if one[0]["load"] == "closed"), key=_speed)
    chosen = [*opened[:3], *opened[-1:], *closed[:2]]
    lines = [HEADER]
    for theirs, ours in dict.fromkeys(map(_key, chosen)) and {_key(one): one for one in chosen}.values():
        load = f"{theirs['load']} {theirs['rate']:g}{'' if theirs['load'] == 'closed' else '/s'}"
        load += f", {theirs['adapters']} adapters, {theirs['sites']}"
        if theirs["load"] == "closed":
            cells = [f"{one['tokens_per_s']:.0f} tokens/s" for one in (theirs, ours)]
            lines.append(f"| {load} | {cells[0]} | {cells[1]} | {_speed((theirs, ours)):.2f}x tokens/s |")
        else:
            cells = [f"{one['ttft_p95_s']:.2f} s, {one['within']:.0%}" for one in (theirs, ours)]
            lines.append(f"| {load} | {cells[0]} | {cells[1]} | {_gain((theirs, ours)):.1f}x lower TTFT p95 |")
    return "\n".join([*lines, *_rates(found["rows"]), *_of_base(found["rows"])])


def write(found: Mapping[str, Any], out: Path) -> None:
    """Write out/race-cpu-YEAR-MONTH.json and .md."""
    out.mkdir(parents=True, exist_ok=True)
    stem = f"race-cpu-{time.strftime('%Y-%m')}"
    (out / f"{stem}.json").write_text(json.dumps(found, indent=1) + "\n")
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
    return f"""# The race, {stem.removeprefix("race-cpu-")}

`{found["command"]}`, {found["seconds"]} s. {found["hardware"]}; {versions}. What each system is, and how rows are
counted: `bench/race/__main__.py`. SLO: TTFT {TTFT_SECONDS:g} s and TPOT {TPOT_SECONDS * 1e3:g} ms. Every row is in
[{stem}.json]({stem}.json).

{readme(found)}

## All rows

TTFT in seconds, TPOT in ms. `equal`: calls whose tokens are those of ours, of those that both answered.

{head}
{rows}
"""


def versions() -> dict[str, str]:
    """Return the versions of what races."""
    return {name: importlib.metadata.version(name) for name in PACKAGES}


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


Pair = tuple[Row, Row]


def _pair(rows: list[Row]) -> Pair | None:
    """Return (vLLM's LoRA, ours) of a load that has both."""
    theirs = [row for row in rows if row["system"].startswith("vLLM's")]
    ours = [row for row in rows if row["system"] == "ours"]
    return (theirs[0], ours[0]) if theirs and ours else None


def _gain(pair: Pair) -> float:
    return float(pair[0]["ttft_p95_s"] / pair[1]["ttft_p95_s"])


def _speed(pair: Pair) -> float:
    return float(pair[1]["tokens_per_s"] / pair[0]["tokens_per_s"])


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
        if "base" in by_system and by_system["base"]:
            shares = [f"{by_system['ours'] / by_system[name]:.2f} of {name}" for name in by_system if "base" in name]
            lines.append(f"Closed loop, {load[0]['adapters']} adapters, {load[0]['sites']}: ours is {', '.join(shares)}.")
    return lines
