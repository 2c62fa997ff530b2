"""A tiny model, a handful of adapters in different formats, prompts, and what PEFT answers to them."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lora_server import spec
from lora_server.adapters import validate_adapter
from lora_server.demo import tiny
from lora_server.demo.engine import EngineAnswer, Sequence, generate
from lora_server.merge import Merge
from lora_server.merged import MergedRecord

NEW_TOKENS = 8
SCRATCH = tempfile.TemporaryDirectory(prefix="lora-tests-")

# name -> how it is made; per-expert names exist for Mixtral and Qwen3-MoE only
MOE_ADAPTERS = {
    "fused": {"lora_rank": 8, "targets": "all"},
    "experts": {"lora_rank": 5, "targets": "experts", "rslora": True},
    "gate-up": {"lora_rank": 3, "targets": "gate_up"},
    "attention": {"lora_rank": 6, "targets": "attention"},
    "qv": {"lora_rank": 4, "targets": "qv"},
}
DENSE_ADAPTERS = {
    "fused": {"lora_rank": 8, "targets": "all"},
    "mlp": {"lora_rank": 5, "targets": "dense", "rslora": True},
    "attention": {"lora_rank": 6, "targets": "attention"},
    "qv": {"lora_rank": 4, "targets": "qv"},
}


@dataclass(frozen=True)
class Workload:
    """Everything a test needs of one model; `expected` are PEFT's answers to `batch`."""

    kind: str
    model: torch.nn.Module
    base: Path
    adapters: Path
    batch: list[Sequence]
    expected: list[EngineAnswer]

    @property
    def names(self) -> list[str | None]:
        return [sequence.adapter for sequence in self.batch]

    @property
    def spec(self) -> spec.ModelSpec:
        return spec.load(self.base)

    @property
    def paths(self) -> dict[str, Path]:
        return {path.name: path for path in sorted(self.adapters.iterdir())}

    def answer(self, path: Path | None, prompt: list[int], new_tokens: int = NEW_TOKENS) -> EngineAnswer:
        """PEFT's, with the adapter in that directory; None: the base model's."""
        oracle = self.model if path is None else tiny.peft_model(self.model, path)
        return generate(oracle, [Sequence(prompt, None)], new_tokens)[0]

    def check(self, answers: list[EngineAnswer], tolerance: float = 1e-4) -> None:
        """Tokens equal PEFT's, and log probabilities within the fp32 bar."""
        for sequence, ours, theirs in zip(self.batch, answers, self.expected, strict=True):
            assert ours.tokens == theirs.tokens, sequence.adapter
            worst = max(abs(a - b) for a, b in zip(ours.logprobs, theirs.logprobs, strict=True))
            assert worst <= tolerance, (sequence.adapter, worst)


@functools.cache
def model_of(kind: str) -> torch.nn.Module:
    return tiny.make_model(kind)


@functools.cache
def spec_of(kind: str) -> spec.ModelSpec:
    return spec.from_config(model_of(kind).config.to_dict(), name=f"tiny-{kind}")


@functools.cache
def workload(kind: str, engine: str = "transformers") -> Workload:
    """One per kind, engine and test run; everything is seeded."""
    torch.set_grad_enabled(False)
    model = tiny.make_model(kind, **_overrides(kind, engine))
    root = Path(SCRATCH.name) / engine / kind
    base, adapters = root / "base", root / "adapters"
    tiny.save_model(model, base)
    if engine != "transformers":
        tiny.save_tokenizer(base)
    recipes = dict(DENSE_ADAPTERS if kind == "llama" else MOE_ADAPTERS)
    if kind in ("mixtral", "qwen3_moe"):
        recipes["per-expert"] = {"lora_rank": 7, "targets": "experts", "style": "per_expert"}
    for seed, (name, recipe) in enumerate(recipes.items()):
        tiny.make_adapter(model, adapters / name, seed=seed, **recipe)
    generator = torch.Generator().manual_seed(7)
    batch = []
    for index, name in enumerate([*recipes, None, "fused"]):
        length = 3 + 2 * index % 9
        batch.append(Sequence(torch.randint(3, 250, (length,), generator=generator).tolist(), name))
    made = Workload(kind, model, base, adapters, batch, [])
    made.expected.extend(made.answer(made.paths.get(one.adapter), one.prompt) for one in batch)
    return made


def _overrides(kind: str, engine: str) -> dict[str, Any]:
    """Sizes that an engine needs. SGLang's ranks on CPUs share an ffn in multiples of 32, and pad any other."""
    if engine == "sglang":
        return {"intermediate_size": 128} | ({"moe_intermediate_size": 128} if kind == "qwen3_moe" else {})
    return tiny.FOR_VLLM if engine == "vllm" else {}


def merge(base: Path, adapter: Path, name: str, out: Path) -> MergedRecord:
    """Write a copy of a base model whose weights contain an adapter; return its record."""
    opened, version = validate_adapter(adapter, spec.load(base))
    with opened:
        return Merge(base, opened, version, name, out).run()
