"""Activated LoRAs beside ordinary ones, prompts in which they are invoked or not, and what PEFT answers."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from lora_server.demo import tiny
from lora_server.demo.engine import EngineAnswer, Sequence, generate
from tests.support.workload import NEW_TOKENS

CALL, OTHER = [17, 18, 19], [21]
ADAPTERS = {
    "check": {"lora_rank": 6, "targets": "attention", "invocation": CALL},
    "rewrite": {"lora_rank": 4, "targets": "qv", "invocation": OTHER},
    "plain": {"lora_rank": 5, "targets": "all"},
}


def make(model, root: Path) -> dict[str, Path]:
    for seed, (name, recipe) in enumerate(ADAPTERS.items()):
        tiny.make_adapter(model, root / name, seed=60 + seed, **recipe)
    return {name: root / name for name in ADAPTERS}


def make_legacy(model, path: Path, field: str = "invocation_string") -> Path:
    """Make `check` again, with its invocation as a text."""
    tiny.make_adapter(model, path, seed=60, **ADAPTERS["check"])
    config = json.loads((path / "adapter_config.json").read_text())
    config |= {"alora_invocation_tokens": None, field: "w17 w18 w19"}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def words(seed: int, length: int) -> list[int]:
    return torch.randint(30, 250, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def prompts() -> dict[str, list[int]]:
    text = words(1, 12)
    return {
        "middle": [*text, *CALL, *words(2, 3)],
        "end": [*text, *CALL],
        "start": [*CALL, *text],
        "twice": [*words(3, 4), *CALL, *text, *CALL, 40],
        "cut off": [*text, *CALL[:2]],
        "absent": text,
    }


@dataclass(frozen=True)
class Case:
    batch: list[Sequence]
    expected: list[EngineAnswer]

    def check(self, answers: list[EngineAnswer], tolerance: float = 1e-3) -> None:
        for sequence, ours, theirs in zip(self.batch, answers, self.expected, strict=True):
            assert ours.tokens == theirs.tokens, sequence
            assert max(abs(a - b) for a, b in zip(ours.logprobs, theirs.logprobs, strict=True)) <= tolerance, sequence


def case(model, paths: dict[str, Path]) -> Case:
    """Every prompt with `check`, beside another aLoRA, an ordinary LoRA and the base model over the same text."""
    batch = [Sequence(prompt, "check") for prompt in prompts().values()]
    middle = prompts()["middle"]
    batch += [Sequence(middle, "plain"), Sequence(middle, None), Sequence([*middle, *OTHER, 50], "rewrite")]
    return Case(batch, [answer(model, paths, sequence) for sequence in batch])


def answer(model, paths: dict[str, Path], sequence: Sequence, new_tokens: int = NEW_TOKENS) -> EngineAnswer:
    """PEFT's."""
    oracle = model if sequence.adapter is None else tiny.peft_model(model, paths[sequence.adapter])
    return generate(oracle, [Sequence(sequence.prompt, None)], new_tokens)[0]
