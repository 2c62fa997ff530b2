"""Seed 002's experiment: one adapter in the base weights, over its share of the requests.

    .venv-vllm/bin/python -m bench.merge --json > merge.json
    .venv/bin/python -m bench.merge --plot merge.json                          # merge.png

not merged    vLLM on one core and a LoRA server of one shard on the other
merged        the same, on weights that contain the hot adapter
vLLM's LoRA   vLLM's own, on both cores, with a place for every adapter

All engines run side by side and take turns. A closed loop keeps `--width` requests in flight, all with an adapter: the
hot one by its share, else any other. `entries`: what the server computed per row and site, 1 without a merge; `KiB`:
what travelled per row, both ways. `equal`: calls whose tokens are those of `not merged`, of those that both answered.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench import harness
from bench.race import load, score
from bench.race.load import Call, Job, Seen
from bench.race.make import make
from bench.race.systems import START_SECONDS, Contestant, System, running
from lora_server.adapters import validate_adapter
from lora_server.demo import children
from lora_server.merge import Merge
from lora_server.spec import load as load_spec

SHARES = [0.0, 0.2, 0.4, 0.5, 0.6, 0.8, 1.0]
MODEL: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 1024,
}
SITES = 2  # of a layer, for adapters of attention: qkv and o
QUIET_SECONDS = 2.5  # without a change, after which a shard's report is complete
COLUMNS = (
    "hot share {share:.1f} | system {system} | tokens/s {tokens_per_s:.0f} | TTFT ms, p50 {ttft_p50_ms:.0f} | "
    "p95 {ttft_p95_ms:.0f} | entries {entries:.2f} | KiB {kib:.1f} | equal {equal} of {compared}"
)
Row = dict[str, Any]


def main() -> None:
    """Command line."""
    given = harness.flags(__doc__, adapters=8, width=16, seconds=15.0, shares=SHARES, plot=Path())
    if given.plot != Path():
        draw(json.loads(given.plot.read_text())["rows"], given.plot.with_suffix(".png"))
        return
    with children.ending_on_signals(), tempfile.TemporaryDirectory(prefix="merge-") as scratch:
        found = {
            "load_average": os.getloadavg(),
            "rows": measure(Path(scratch), given.adapters, given.width, given.seconds, given.shares),
        }
    harness.show(given, found, harness.table("one adapter in the base weights", found["rows"], COLUMNS), width=140)


def measure(work: Path, count: int, width: int, seconds: float, shares: Sequence[float]) -> list[Row]:
    """Run every share on every system."""
    names = make(work, MODEL, {"attention": count})
    adapter, version = validate_adapter(work / "adapters" / names[0], load_spec(work / "base"))
    with adapter:
        Merge(work / "base", adapter, version, names[0], work / "merged").run()
    systems = [
        System("not merged", "ours", 1),
        System("merged", "ours", 1, base="merged"),
        System("vLLM's LoRA", "own", 2, places=count),
    ]
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        all_running = [stack.enter_context(running(one, work, names)) for one in systems]
        for one in all_running:
            one.answer(START_SECONDS)
            one.ask(Job(load.every(names), 0, START_SECONDS))
        for turn, share in enumerate(harness.progress(shares, "shares")):
            job = Job(calls(names, share, 256, seed=turn), width, seconds)
            first = turn % len(all_running)
            order = [*all_running[first:], *all_running[:first]]
            seen = {one.system.name: run(one, job) for one in order}
            base = seen["not merged"][1]
            for name, (row, answers) in seen.items():
                equal, compared = score.compare(answers, base)
                rows.append({"share": share, "system": name, **row, "equal": equal, "compared": compared})
    return sorted(rows, key=lambda row: (row["share"], [one.name for one in systems].index(row["system"])))


def calls(names: Sequence[str], share: float, count: int, seed: int) -> list[Call]:
    """Draw calls, `share` of them for the first adapter."""
    dice, made = np.random.default_rng(seed), []
    for _ in range(count):
        other = names[1 + int(dice.integers(len(names) - 1))]
        prompt = dice.integers(3, 250, int(dice.integers(*load.PROMPT_TOKENS))).tolist()
        adapter = names[0] if dice.random() < share else other
        made.append(Call(0.0, adapter, prompt, int(dice.integers(*load.NEW_TOKENS))))
    return made


def run(one: Contestant, job: Job) -> tuple[Row, list[Seen]]:
    """Run a job, and count what its server did meanwhile."""
    before = settled(one.server)
    seen = one.ask(job)
    entries, nbytes = (now - then for now, then in zip(settled(one.server), before, strict=True))
    scored = score.row(job, seen)
    num_rows = sum(len(job.calls[call.call].prompt) + len(call.tokens) - 1 for call in seen if call.tokens)
    return {
        "tokens_per_s": scored["tokens_per_s"],
        "ttft_p50_ms": scored["ttft_p50_s"] * 1e3,
        "ttft_p95_ms": scored["ttft_p95_s"] * 1e3,
        "failed": scored["failed"],
        "entries": entries / (max(1, num_rows) * MODEL["num_hidden_layers"] * SITES),
        "kib": nbytes / max(1, num_rows) / 1024,
    }, seen


def settled(server: str) -> tuple[int, int]:
    """Return the entries that a server's shard has computed, and the bytes that travelled, once they rest."""
    if not server:
        return 0, 0
    seen, since = (-1, -1), time.monotonic()
    while time.monotonic() < since + QUIET_SECONDS:
        stats = harness.status(server).shards[0].stats
        now = stats.entries, stats.request_bytes + stats.response_bytes
        if now != seen:
            seen, since = now, time.monotonic()
        time.sleep(harness.POLL_SECONDS)
    return seen


def draw(rows: Sequence[Row], out: Path) -> None:
    """Draw throughput, time to first token and bytes over the hot share."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.2), layout="constrained")
    axes = figure.subplots(1, 3)
    panels = (
        ("tokens_per_s", "tokens/s"),
        ("ttft_p50_ms", "TTFT p50, ms"),
        ("kib", "KiB per row, to the server and back"),
    )
    for axis, (key, label) in zip(axes, panels, strict=True):
        for system in dict.fromkeys(row["system"] for row in rows):
            points = [(row["share"], row[key]) for row in rows if row["system"] == system]
            axis.plot(*zip(*points, strict=True), marker="o", label=system)
        axis.axvline(0.5, color="grey", linestyle=":")
        axis.set(xlabel="share of the hot adapter", ylabel=label, ylim=(0, None))
    axes[0].legend(fontsize=7)
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main()
