"""The demo: a sharded server, two engines, adapters that answer in styles, and every token compared with PEFT's."""

from __future__ import annotations

import contextlib
import shlex
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
from rich.progress import Progress

from lora_server import spec, terminal
from lora_server.adapters import find_adapters
from lora_server.control.members.agreement import require_work
from lora_server.demo import children, styles, tiny
from lora_server.demo.engine import EngineResult, Job, Sequence
from lora_server.demo.launch import EngineProcess, RunningServer, running_server
from lora_server.demo.report import DemoReport, LayoutTimes, ShownAnswer, as_json, peft_answers, show, verdict_of
from lora_server.demo.words import Words
from lora_server.errors import ConfigError, LoraServerError
from lora_server.placement import Layout, Placement

ENGINE = "lora_server.demo.engine"
NUM_ADAPTERS, RANKS, ZIPF = 16, (4, 8, 16, 32, 64), 1.2
ENGINES, BATCHES, BATCH_SIZE, NEW_TOKENS = 2, 2, 8, 24
TIMED_LAYOUTS = ("ep1-pp1", "ep4-pp1", "ep2-pp2", "ep1-pp4")
PROMPT = styles.QUESTIONS[0]
TIMED_BATCH, TIMED_TOKENS = 16, 16


def run_demo(model: Path | None, adapters: Path | None, layout: str, timing: bool, json_output: bool) -> bool:
    """Run the demo; return whether all tokens equal PEFT's. `model` and `adapters` default to small ones made here.

    `timing` times TIMED_LAYOUTS, too. In a terminal the server then stays until Ctrl-C.
    """
    if (model is None) != (adapters is None):
        raise ConfigError("demo: give both --model and --adapters, or neither")
    with (
        children.ending_on_signals(),
        tempfile.TemporaryDirectory(prefix="lora-demo-") as scratch,
        contextlib.ExitStack() as stack,
        without_known_warnings(),
    ):
        work = Path(scratch)
        with terminal.progress() as progress:
            if model is None or adapters is None:
                model, adapters = work / "model", work / "adapters"
                _make(model, adapters, work / styles.ADDED_LATER, progress)
            server, outcome = _compare(model, adapters, layout, work, progress, stack)
            if timing:
                outcome.layouts = _time_layouts(model, adapters, work, progress)
        if json_output:
            sys.stdout.write(as_json(outcome) + "\n")
        else:
            show(outcome, terminal.open_console())
        if outcome.verdict.passed and not json_output and sys.stdin.isatty() and sys.stdout.isatty():
            _stay(server, model, work / styles.ADDED_LATER)
    return outcome.verdict.passed


def _compare(
    model: Path, adapters: Path, layout: str, work: Path, progress: Progress, stack: contextlib.ExitStack
) -> tuple[RunningServer, DemoReport]:
    """Start the server, let the engines generate, and ask PEFT for the same; the server ends with `stack`."""
    batches = _all_batches(model, adapters, layout)
    task = progress.add_task(f"server {layout}, {ENGINES} engines", total=ENGINES + 1)
    flags = [*_flags(model, adapters, layout), "--adapter-root", str(work)]
    server = stack.enter_context(running_server(work / "server.log", flags))
    progress.advance(task)
    jobs = [Job(str(model), server.address, share, NEW_TOKENS) for share in _shares(batches)]
    results = _generate(jobs, work, lambda: progress.advance(task))
    ours = [answer for result in results for batch in result.answers for answer in batch]
    asked = [sequence for batch in batches for sequence in batch]
    task = progress.add_task("same prompts with PEFT", total=len(asked))
    theirs = peft_answers(model, adapters, asked, NEW_TOKENS, lambda done: progress.advance(task, done))
    words, last = Words(model), slice(-len(batches[-1]), None)
    shown = [
        ShownAnswer(sequence.adapter, words.decode(our.tokens), words.decode(their.tokens))
        for sequence, our, their in zip(asked[last], ours[last], theirs[last], strict=True)
    ]
    return server, DemoReport(verdict_of(ours, theirs), words.decode(asked[-1].prompt), shown, [])


@contextlib.contextmanager
def without_known_warnings() -> Iterator[None]:
    """Silence PEFT's use of a deprecated part of transformers: it warns once per adapter, and no user can act on it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        yield


def _make(model_path: Path, adapters: Path, added_later: Path, progress: Progress) -> None:
    """Write a model, adapters that answer in styles, one to add later, and random ones of mixed ranks."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    task = progress.add_task("train a small Mixtral and its adapters", total=NUM_ADAPTERS + 2)
    model = styles.make_model(model_path)
    progress.advance(task)
    for style in styles.SERVED:
        styles.make_adapter(model, style, adapters / style)
        progress.advance(task)
    styles.make_adapter(model, styles.ADDED_LATER, added_later)
    progress.advance(task)
    for index in range(NUM_ADAPTERS - len(styles.SERVED)):
        tiny.make_adapter(
            model,
            adapters / f"tenant-{index:02d}",
            lora_rank=RANKS[index % len(RANKS)],
            seed=index,
            targets=("experts", "all")[index % 2],
            style=("fused", "per_expert")[index // 2 % 2],
        )
        progress.advance(task)


def _all_batches(model: Path, adapters: Path, layout: str) -> list[list[Sequence]]:
    """Draw the batches; the last is one prompt for the base model and three adapters, to be shown."""
    served = spec.load(model)
    require_work(Placement(served, Layout.parse(layout)))
    names = list(find_adapters(adapters))
    if not names:
        raise ConfigError(f"demo: no adapters in {adapters}")
    batches = _batches(names, ENGINES * BATCHES, BATCH_SIZE, seed=1)
    prompt = Words(model).encode(PROMPT, otherwise=batches[0][0].prompt)
    shown = [name for name in styles.SERVED if name in names] or names[: len(styles.SERVED)]
    return [*batches, [Sequence(prompt, name) for name in (None, *shown)]]


def _batches(names: list[str], count: int, size: int, seed: int) -> list[list[Sequence]]:
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


def _shares(batches: list[list[Sequence]]) -> list[list[list[Sequence]]]:
    """Give each of ENGINES engines BATCHES batches, the last one the rest, too."""
    return [batches[i * BATCHES : (i + 1) * BATCHES if i + 1 < ENGINES else None] for i in range(ENGINES)]


def _generate(jobs: list[Job], work: Path, advance: Callable[[], None] = lambda: None) -> list[EngineResult]:
    """Let an engine for each job generate, all at once."""
    results = []
    with contextlib.ExitStack() as stack:
        logs = [work / f"engine{number}.log" for number in range(len(jobs))]
        engines = [stack.enter_context(EngineProcess("demo: an engine", ENGINE, log)) for log in logs]
        for engine, job in zip(engines, jobs, strict=True):
            engine.write(msgspec.json.encode(job))
        for engine in engines:
            results.append(msgspec.json.decode(engine.line(), type=EngineResult))
            advance()
    return results


def _stay(server: RunningServer, model: Path, more: Path) -> None:
    """Print commands to try, and wait for Ctrl-C or the server's end; raises LoraServerError at the latter."""
    program, at = shlex.quote(str(Path(sys.executable).with_name("lora-server"))), f"--server {server.address}"
    ask = f"{shlex.quote(sys.executable)} -m lora_server.demo.ask {at} --model {model}"
    tries = [("the server's page", f"http://{server.http}/"), ("shards, memory, clients", f"{program} status {at}")]
    if more.exists():
        question = shlex.quote(styles.QUESTIONS[1])
        tries += [("one more adapter", f"{program} adapters add {more.name} {more} {at}")]
        tries += [("and its answer", f"{ask} --adapter {more.name} {question}")]
        tries += [("the base model's", f"{ask} {question}")]
    console = terminal.open_console()
    console.print("\nThe server stays until Ctrl-C. In another terminal:", style="bold")
    for reason, line in tries:
        console.print(f"\n  # {reason}\n  {line}", markup=False)
    try:
        server.process.wait()
    except SystemExit:  # a signal; the server is stopped on the way out
        console.print("\nstopping the server")
        return
    raise LoraServerError(f"demo: the server ended by itself; its last lines:\n{server.tail()}")


def _time_layouts(model: Path, adapters: Path, work: Path, progress: Progress) -> list[LayoutTimes]:
    served = spec.load(model)
    layouts = [layout for layout in TIMED_LAYOUTS if _fits(served, layout)]
    task = progress.add_task("timing layouts", total=len(layouts))
    batch = _batches(list(find_adapters(adapters)), 1, TIMED_BATCH, seed=2)
    rows = []
    for layout in layouts:
        with running_server(work / f"{layout}.log", _flags(model, adapters, layout)) as server:
            (result,) = _generate([Job(str(model), server.address, batch, TIMED_TOKENS)], work)
            rows.append(LayoutTimes(layout, result))
        progress.advance(task)
    return rows


def _fits(served: spec.ModelSpec, layout: str) -> bool:
    try:
        require_work(Placement(served, Layout.parse(layout)))
    except ConfigError:
        return False
    return True
