"""Report of the demo: tables for people, and one JSON document."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from lora_server import terminal
from lora_server.demo import tiny
from lora_server.demo.engine import EngineAnswer, EngineResult, Sequence, generate, load_model
from lora_server.units import count


@dataclass
class PeftVerdict:
    """`tokens_equal` of `tokens_checked`; logprobs compared up to a sequence's first different token."""

    tokens_checked: int = 0
    tokens_equal: int = 0
    max_abs_logprob_diff: float = 0.0

    @property
    def passed(self) -> bool:
        """Return whether all tokens are equal, and log probabilities within the fp32 bar of 1e-4."""
        return 0 < self.tokens_checked == self.tokens_equal and self.max_abs_logprob_diff <= 1e-4

    def compare(self, ours: EngineAnswer, theirs: EngineAnswer) -> None:
        """Add one sequence."""
        self.tokens_checked += len(theirs.tokens)
        same = True
        pairs = zip(ours.tokens, theirs.tokens, ours.logprobs, theirs.logprobs, strict=True)
        for our_token, their_token, our_logprob, their_logprob in pairs:
            same = same and our_token == their_token
            self.tokens_equal += our_token == their_token
            if same:
                self.max_abs_logprob_diff = max(self.max_abs_logprob_diff, abs(our_logprob - their_logprob))


def peft_answers(
    model_path: Path, adapters: Path, asked: list[Sequence], new_tokens: int, progress: Callable[[int], None]
) -> list[EngineAnswer]:
    """Generate every sequence with PEFT, grouped by adapter; `progress(sequences done)`."""
    by_adapter: dict[str | None, list[int]] = {}
    for index, sequence in enumerate(asked):
        by_adapter.setdefault(sequence.adapter, []).append(index)
    base = load_model(model_path)
    answers: dict[int, EngineAnswer] = {}
    for name, indices in by_adapter.items():
        model = base if name is None else tiny.peft_model(base, adapters / name)
        answers.update(zip(indices, generate(model, [asked[i] for i in indices], new_tokens), strict=True))
        progress(len(indices))
    return [answers[index] for index in range(len(asked))]


def verdict_of(ours: Iterable[EngineAnswer], theirs: Iterable[EngineAnswer]) -> PeftVerdict:
    """Compare the server's answers with PEFT's."""
    verdict = PeftVerdict()
    for our, their in zip(ours, theirs, strict=True):
        verdict.compare(our, their)
    return verdict


@dataclass
class LayoutTimes:
    """One layout, one engine."""

    layout: str
    result: EngineResult

    def row(self) -> dict[str, float | str]:
        """Round for the JSON document."""
        times = self.result.times_us
        return {
            "layout": self.layout,
            "recv_us": round(times.recv, 1),
            "lora_us": round(times.lora, 1),
            "send_us": round(times.send, 1),
            "moe_us": round(times.moe, 1),
            "tokens_per_s": round(self.result.tokens_per_s, 1),
        }


@dataclass
class ShownAnswer:
    """What one adapter (None: the base model) answers to the prompt that is shown, by the server and by PEFT."""

    adapter: str | None
    server: str
    peft: str


@dataclass
class DemoReport:
    """What the demo found; `answers` are those to `prompt`, `layouts` is empty without --timing."""

    verdict: PeftVerdict
    prompt: str
    answers: list[ShownAnswer]
    layouts: list[LayoutTimes]


def as_json(outcome: DemoReport) -> str:
    """Render the JSON document."""
    document = {
        "passed": outcome.verdict.passed,
        **asdict(outcome.verdict),
        "prompt": outcome.prompt,
        "answers": [asdict(one) for one in outcome.answers],
        "layouts": [one.row() for one in outcome.layouts],
    }
    return json.dumps(document, indent=2)


ANSWERS = ("adapter", "asked", "answer")
COLUMNS = ("layout", "Recv", "LoRA", "Send", "base MoE", "tokens/s")
REMARKS = (
    "Send is what the engine waits for after the LoRA is done; hidden by its own GEMM it is near 0.",
    "Engines and shards share this machine's cores: compare the columns, not the numbers elsewhere.",
)


def show(outcome: DemoReport, console: Console) -> None:
    """Print one prompt's answers, the check, and the breakdown per layout (as in the paper's Table 4)."""
    verdict = outcome.verdict
    terminal.say(console, f'One batch, one prompt: "{outcome.prompt}"')
    console.print()
    rows = []
    for one in outcome.answers:
        rows += [[one.adapter or "base model", "LoRA server", one.server], ["", "PEFT", one.peft]]
    terminal.table(console, ANSWERS, rows, left=ANSWERS, wrapped="answer")
    console.print()
    against = (
        f"against PEFT: {count(verdict.tokens_equal)} of {count(verdict.tokens_checked)} tokens, "
        f"largest |delta logprob| {verdict.max_abs_logprob_diff:.6f}"
    )
    terminal.say(console, against, "equal" if verdict.passed else "DIFFERENT")
    if not outcome.layouts:
        return
    console.print("\nMedian microseconds per layer, experts' gate_up + down (slowest shard)\n")
    terminal.table(console, COLUMNS, [_cells(one) for one in outcome.layouts], left=("layout",), wrapped="layout")
    console.print()
    for remark in REMARKS:
        terminal.say(console, remark)


def _cells(one: LayoutTimes) -> list[str]:
    times = one.result.times_us
    return [one.layout, *map(count, (times.recv, times.lora, times.send, times.moe, one.result.tokens_per_s))]
