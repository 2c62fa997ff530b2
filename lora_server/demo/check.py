"""Comparison of the server's answers with PEFT's, adapter by adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from lora_server.demo import tiny
from lora_server.demo.engine import EngineAnswer, Sequence, generate, load_model


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
