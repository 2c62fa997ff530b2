"""The report of a run: gpu_NAME_DATE.md to read, kernels_NAME_DATE.json, and profile_NAME_DATE.json for the planner."""

from __future__ import annotations

import json
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.gpu_run import mps, planner
from bench.gpu_run.record import picked
from bench.gpu_run.stages import STAGES, Stage
from bench.gpu_run.state import ROOT, Outcome, Results
from bench.kernels import report as kernels_report
from bench.kernels.report import text_table
from lora_server.errors import ConfigError

Lines = list[dict[str, Any]]
SLICED = {stage.name for stage in STAGES if stage.sliced}
SLICED_NOTE = (
    "Time-sliced: processes take turns on one GPU, so no time here is a latency of the path (`inproc` has those)."
)
SHARED_NOTE = "Under MPS: the processes share the GPU, so the engine's kernels and the shard's take from each other."
CELL = kernels_report.CELL
TRANSPORT = "gpu"  # of the profile: the one whose kernels these are
Section = Callable[[dict[str, Outcome]], str]


def write(stages: Sequence[Stage], results: Results, out: Path, gpu: str) -> Path:
    """All three files, as far as there is something to say; the Markdown's path."""
    outcomes = {stage.name: found for stage in stages if (found := results.load(stage.name)) is not None}
    date = min((outcome.began for outcome in outcomes.values()), default=_today())[:10]
    out.mkdir(parents=True, exist_ok=True)
    kernels = kernels_document(outcomes)
    if kernels["cells"]:
        (out / f"kernels_{gpu}_{date}.json").write_text(json.dumps(kernels, indent=2) + "\n")
    if "headline" in outcomes:
        with suppress(ConfigError):  # it has no cell yet
            profile = planner.profile(outcomes["headline"].lines, TRANSPORT)
            (out / f"profile_{gpu}_{date}.json").write_text(json.dumps(profile, indent=2) + "\n")
    path = out / f"gpu_{gpu}_{date}.md"
    path.write_text(text(stages, outcomes, gpu, date))
    return path


def _today() -> str:
    return datetime.now(UTC).isoformat()


def lines_of(outcomes: dict[str, Outcome], stage: str, kind: str) -> Lines:
    """Return the lines of one kind that a stage recorded, even if it was cut later."""
    return picked(outcomes[stage].lines, kind) if stage in outcomes else []


def kernels_document(outcomes: dict[str, Outcome]) -> dict[str, Any]:
    """{cells, overhead_us, command, hardware} of the stages ours and peers; no cells before ours measured one."""
    sites = lines_of(outcomes, "ours", "site")
    peers = lines_of(outcomes, "peers", "peer")
    overhead = lines_of(outcomes, "ours", "overhead")
    hardware = lines_of(outcomes, "ours", "hardware") or lines_of(outcomes, "probe", "hardware")
    commands = [outcomes[stage].command for stage in ("ours", "peers") if stage in outcomes]
    return {
        "cells": kernels_report.cells(sites, peers),
        "overhead_us": overhead[-1]["overhead_us"] if overhead else None,
        "command": "; ".join(commands),
        "hardware": {key: value for key, value in hardware[-1].items() if key != "kind"} if hardware else {},
    }


def text(stages: Sequence[Stage], outcomes: dict[str, Outcome], gpu: str, date: str) -> str:
    """The whole report."""
    parts = [f"# GPU run: {gpu}, {date}", "`python -m bench.gpu_run`; what its stages are: docs/gpu-run.md."]
    parts += _code(outcomes)
    parts += _sections(FIRST, outcomes)
    parts += [_stages(stages, outcomes), *_sections(SECTIONS, outcomes)]
    parts += [_log(outcome) for outcome in outcomes.values() if outcome.ending in ("failed", "cut")]
    whole = "\n\n".join(parts) + "\n"
    return whole.replace(SLICED_NOTE, SHARED_NOTE) if gpu.endswith(mps.SUFFIX) else whole


def _sections(sections: Sequence[tuple[str, Section]], outcomes: dict[str, Outcome]) -> list[str]:
    """Return the sections that are not empty, each after its title."""
    return [part for title, section in sections if (found := section(outcomes)) for part in (f"## {title}", found)]


def _code(outcomes: dict[str, Outcome]) -> list[str]:
    versions = sorted({outcome.code for outcome in outcomes.values()})
    if len(versions) < 2:
        return [f"Sources: {version}." for version in versions]
    ran = (f"{v} ({', '.join(o.stage for o in outcomes.values() if o.code == v)})" for v in versions)
    return [f"**Stages ran with different sources:** {'; '.join(ran)}."]


def _stages(stages: Sequence[Stage], outcomes: dict[str, Outcome]) -> str:
    rows = []
    for stage in stages:
        outcome = outcomes.get(stage.name)
        ended = (outcome.ending, outcome.seconds, _cell(outcome.reason)) if outcome else ("not run", None, "")
        rows.append((stage.name, *ended))
    return text_table(("stage", "ended", "s", "reason"), rows)


def _cell(text: str) -> str:
    return clean(text).replace("|", "/").replace("\n", " ")


def clean(text: str) -> str:
    """Without what names this machine: a report may be kept and shown."""
    places = {sys.base_prefix: "PYTHON", sys.prefix: "PYTHON", tempfile.gettempdir(): "TMP", str(ROOT): "."}
    for path, name in sorted(places.items(), key=lambda place: -len(place[0])):  # one may lie in another
        text = text.replace(f"{path}/", f"{name}/")
    return text.replace(f'"{socket.gethostname()}:', '"HOST:')


def _log(outcome: Outcome) -> str:
    fence = "~~~~"
    return f"## What {outcome.stage} said last\n\n{fence}\n{clean(outcome.log[-1500:]).replace(fence, '')}\n{fence}"


def _facts(stage: str, *kinds: str) -> Callable[[dict[str, Outcome]], str]:
    """name: value, of every line."""

    def section(outcomes: dict[str, Outcome]) -> str:
        rows = [
            (name, _cell(str(value)))
            for kind in kinds
            for line in lines_of(outcomes, stage, kind)
            for name, value in line.items()
            if name != "kind"
        ]
        return _noted(stage, text_table(("what", "found"), rows)) if rows else ""

    return section


def _noted(stage: str, table: str) -> str:
    """Put a warning before figures of a stage with processes that share the GPU."""
    return f"{SLICED_NOTE}\n\n{table}" if stage in SLICED else table


def _lines(stage: str, kind: str, columns: Sequence[str]) -> Callable[[dict[str, Outcome]], str]:
    """A row per line."""

    def section(outcomes: dict[str, Outcome]) -> str:
        found = lines_of(outcomes, stage, kind)
        rows = [[_plain(line.get(column)) for column in columns] for line in found]
        return _noted(stage, text_table(columns, rows)) if rows else ""

    return section


def _plain(value: Any) -> Any:
    """Convert a value to a table cell; numbers stay numbers."""
    if isinstance(value, dict | list):
        return _cell(json.dumps(value))
    return _cell(value) if isinstance(value, str) else value


def _tests(outcomes: dict[str, Outcome]) -> str:
    found = lines_of(outcomes, "tests", "test")
    if not found:
        return ""
    counts = {ending: sum(line["outcome"] == ending for line in found) for ending in ("passed", "failed", "skipped")}
    slow = sorted(found, key=lambda line: -line["seconds"])[:5]
    bad = [line for line in found if line["outcome"] == "failed"]
    parts = [", ".join(f"{count} {ending}" for ending, count in counts.items()) + ".", "Slowest:"]
    parts.append(text_table(("test", "s"), [(_cell(line["name"]), line["seconds"]) for line in slow]))
    if bad:
        rows = [(_cell(line["name"]), _cell(line.get("reason", ""))) for line in bad]
        parts += ["Failed:", text_table(("test", "reason"), rows)]
    return "\n\n".join(parts)


def _correctness(outcomes: dict[str, Outcome]) -> str:
    found = lines_of(outcomes, "correctness", "case")
    if not found:
        return ""
    worst = max(line["error"] for line in found)
    bad = [line for line in found if not line["good"]]
    said = f"{len(found)} cases, {len(bad)} wrong; the largest error is {worst:.2g} of the result's norm."
    return "\n\n".join([said, *([text_table(("case", "error", "same_bits"), [(_cell(line["name"]), line["error"],
                        line["same_bits"]) for line in bad])] if bad else [])])  # fmt: skip


def _cells(outcomes: dict[str, Outcome]) -> str:
    cells = kernels_document(outcomes)["cells"]
    return kernels_report.picked(CELL, cells) if cells else ""


PUSH_PULL = ("bytes", "raw_put_us", "copy_us", "push_us", "pull_us", "push_over_raw", "pull_over_push", "push_step_us",
             "pull_step_us", "step_pull_over_push")  # fmt: skip


def _starts(outcomes: dict[str, Outcome]) -> str:
    rows = [
        (stage, line["shard"], line["seconds"]) for stage in outcomes for line in lines_of(outcomes, stage, "start")
    ]
    return text_table(("stage", "shard", "s"), rows) if rows else ""


HEADLINE = ("tokens", "us", "paper_us", "target_us", "floor_us", "floor_ratio", "max_rel_err")
INPROC = ("cell", "us", "p95_us", "warm_us", "put_us", "answer_us", "add_us", "target_us", "max_rel_err", "reason")
STEPS = ("cell", "steps", "us", "p99_us", "longest_us", "loads", "load_ms")
FIRST: Sequence[tuple[str, Section]] = (  # what is looked for at once
    ("The paper's cell, kernels alone", _lines("headline", "headline", HEADLINE)),
    ("The persistent path, put to add", _lines("inproc", "inproc", INPROC)),
    ("What the GPU and its driver do", _lines("first", "first", ("question", "answer", "seconds"))),
)
SECTIONS: Sequence[tuple[str, Section]] = (
    ("The persistent path: multiprocessors and adapters", _facts("inproc", "setting")),
    ("The persistent path, beside loads", _lines("inproc", "steps", STEPS)),
    ("Starts of shards", _starts),
    ("Registers, as loaded", _facts("probe", "registers")),
    ("Hardware and driver", _facts("probe", "hardware", "driver", "tools", "memory", "latencies")),
    ("Compiling", _lines("probe", "compiled", ("name", "seconds"))),
    ("Tests", _tests),
    ("Correctness", _correctness),
    ("Sanitizer", _lines("sanitizer", "check", ("tool", "name", "good", "seconds", "reason"))),
    ("CUDA IPC", _lines("ipc", "scenario", ("name", "good", "found", "reason"))),
    ("Links that no host touches", _lines("ipc-gpu", "scenario", ("name", "good", "found", "reason"))),
    (
        "A kernel that serves, and its client in another process",
        _lines("served", "latency", ("what", "median_us", "p95_us")),
    ),
    ("A serving engine's pass", _lines("passes", "latency", ("what", "median_us"))),
    ("Rows in 8 bits, and exact ones", _lines("codes", "latency", ("what", "median_us"))),
    ("Put, serve, wait", _lines("put", "latency", ("what", "bytes", "median_us", "p95_us"))),
    ("Push and pull", _lines("push-pull", "push_pull", PUSH_PULL)),
    ("Put beside a GEMM", _lines("put", "overlap", ("priority", "gemm_alone_us", "gemm_us", "put_us", "put_alone_us"))),
    ("Cells (gate_up and down together, routing left out)", _cells),
    ("Overhead", _facts("ours", "overhead")),
    ("Sites", _lines("ours", "site", kernels_report.SITE)),
    ("Variants", _lines("ours", "variant", ("model", "site", "tokens", "variant", "us", "floor_ratio", "reason"))),
    ("Nsight Compute", _lines("ours", "ncu", ("model", "site", "tokens", "metric", "unit", "value", "reason"))),
    ("Peers", _lines("peers", "peer", (*kernels_report.PEER, "error"))),
    ("Engine", _facts("engine", "exactness", "speed")),  # of each transport, one after the other
    ("Engine, --gpu-transport gpu", _facts("engine-gpu", "exactness", "speed")),
    ("NVSHMEM", _lines("nvshmem", "check", ("pes", "name", "good", "found", "reason"))),
    ("NVSHMEM's world", _lines("world", "check", ("name", "good", "seconds", "found", "reason"))),
)
