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


def against_peft(
    model_path: Path,
    adapters: Path,
    answered: Iterable[tuple[Sequence, EngineAnswer]],
    new_tokens: int,
    progress: Callable[[int], None],
) -> PeftVerdict:
    """Generate every sequence again with PEFT, grouped by adapter; `progress(sequences done)`."""
    by_adapter: dict[str | None, list[tuple[Sequence, EngineAnswer]]] = {}
    for sequence, answer in answered:
        by_adapter.setdefault(sequence.adapter, []).append((sequence, answer))
    base = load_model(model_path)
    verdict = PeftVerdict()
    for name, pairs in by_adapter.items():
        model = base if name is None else tiny.peft_model(base, adapters / name)
        theirs = generate(model, [sequence for sequence, _ in pairs], new_tokens)
        for (_, ours), peft in zip(pairs, theirs, strict=True):
            verdict.compare(ours, peft)
        progress(len(pairs))
    return verdict
