"""The demo: start a sharded server and two engines, compare their tokens with PEFT's, and time several layouts."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.progress import Progress

from lora_server import spec, terminal
from lora_server.adapters import find_adapters
from lora_server.control.members.agreement import require_work
from lora_server.demo import children, tiny
from lora_server.demo.check import against_peft
from lora_server.demo.engine import EngineResult, Job, Sequence
from lora_server.demo.launch import finish_engine, running_server, start_engine
from lora_server.demo.report import LayoutTimes, as_json, show
from lora_server.errors import ConfigError
from lora_server.placement import Layout, Placement

NUM_ADAPTERS, RANKS, ZIPF = 16, (4, 8, 16, 32, 64), 1.2
ENGINES, BATCHES, BATCH_SIZE, NEW_TOKENS = 2, 2, 8, 24
TIMED_LAYOUTS = ("ep1-pp1", "ep4-pp1", "ep2-pp2", "ep1-pp4")
TIMED_BATCH, TIMED_TOKENS = 16, 16


def run_demo(model: Path | None, adapters: Path | None, layout: str, json_output: bool) -> bool:
    """Run the demo; return whether all tokens equal PEFT's. `model` and `adapters` default to small random ones."""
    if (model is None) != (adapters is None):
        raise ConfigError("demo: give both --model and --adapters, or neither")
    with (
        children.ending_on_signals(),
        tempfile.TemporaryDirectory(prefix="lora-demo-") as scratch,
        terminal.progress() as progress,
        without_known_warnings(),
    ):
        work = Path(scratch)
        if model is None or adapters is None:
            model, adapters = work / "model", work / "adapters"
            _make(model, adapters, progress)
        served = spec.load(model)
        require_work(Placement(served, Layout.parse(layout)))
        names = list(find_adapters(adapters))
        if not names:
            raise ConfigError(f"demo: no adapters in {adapters}")
        batches = _batches(names, served, ENGINES * BATCHES, BATCH_SIZE, seed=1)
        results = _serve_and_generate(model, adapters, layout, batches, work, progress)
        answers = [answer for result in results for batch in result.answers for answer in batch]
        flat = [sequence for batch in batches for sequence in batch]
        task = progress.add_task("same prompts with PEFT", total=len(flat))
        verdict = against_peft(
            model,
            adapters,
            zip(flat, answers, strict=True),
            NEW_TOKENS,
            lambda done: progress.advance(task, done),
        )
        layouts = _time_layouts(model, adapters, names, work, progress)
    if json_output:
        sys.stdout.write(as_json(verdict, layouts) + "\n")
    else:
        show(verdict, layouts, terminal.open_console())
    return verdict.passed


@contextlib.contextmanager
def without_known_warnings() -> Iterator[None]:
    """Silence PEFT's use of a deprecated part of transformers: it warns once per adapter, and no user can act on it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        yield


def _make(model_path: Path, adapters: Path, progress: Progress) -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    task = progress.add_task("a small Mixtral and its adapters", total=NUM_ADAPTERS + 1)
    model = tiny.make_model("mixtral", hidden_size=128, intermediate_size=192, vocab_size=512)
    tiny.save_model(model, model_path)
    progress.advance(task)
    for index in range(NUM_ADAPTERS):
        tiny.make_adapter(
            model,
            adapters / f"tenant-{index:02d}",
            lora_rank=RANKS[index % len(RANKS)],
            seed=index,
            targets=("experts", "all")[index % 2],
            style=("fused", "per_expert")[index // 2 % 2],
        )
        progress.advance(task)


def _batches(names: list[str], model: spec.ModelSpec, count: int, size: int, seed: int) -> list[list[Sequence]]:
    """Draw prompts of mixed lengths, for Zipf-popular adapters and, one in eight, the base model."""
    rng = np.random.default_rng(seed)
    weights = np.arange(1, len(names) + 1, dtype=float) ** -ZIPF
    chosen = rng.choice(len(names), size=(count, size), p=weights / weights.sum())
    batches = []
    for row in chosen:
        batch = [Sequence(rng.integers(3, 250, rng.integers(4, 20)).tolist(), names[index]) for index in row]
        batch[-1].adapter = None
        batches.append(batch)
    return batches


def _flags(model: Path, adapters: Path, layout: str) -> list[str]:
    return ["--base-model", str(model), "--adapters", str(adapters), "--require-all-adapters", "--layout", layout]


def _serve_and_generate(
    model: Path, adapters: Path, layout: str, batches: list[list[Sequence]], work: Path, progress: Progress
) -> list[EngineResult]:
    task = progress.add_task(f"server {layout}, {ENGINES} engines", total=ENGINES + 1)
    with running_server(work / "server.log", _flags(model, adapters, layout)) as server:
        progress.advance(task)
        share = len(batches) // ENGINES
        engines = [
            start_engine(Job(str(model), server.address, batches[i * share : (i + 1) * share], NEW_TOKENS))
            for i in range(ENGINES)
        ]
        results = []
        try:
            for engine in engines:
                results.append(finish_engine(engine))
                progress.advance(task)
        finally:
            for engine in engines:
                engine.kill()
    return results


def _time_layouts(model: Path, adapters: Path, names: list[str], work: Path, progress: Progress) -> list[LayoutTimes]:
    served = spec.load(model)
    layouts = [layout for layout in TIMED_LAYOUTS if _fits(served, layout)]
    task = progress.add_task("timing layouts", total=len(layouts))
    batch = _batches(names, served, 1, TIMED_BATCH, seed=2)
    rows = []
    for layout in layouts:
        with running_server(work / f"{layout}.log", _flags(model, adapters, layout)) as server:
            engine = start_engine(Job(str(model), server.address, batch, TIMED_TOKENS))
            rows.append(LayoutTimes(layout, finish_engine(engine)))
        progress.advance(task)
    return rows


def _fits(served: spec.ModelSpec, layout: str) -> bool:
    try:
        require_work(Placement(served, Layout.parse(layout)))
    except ConfigError:
        return False
    return True
