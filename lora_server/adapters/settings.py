"""Ranks, scales and targets of the delta, from a checked adapter_config.json."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass

from lora_server.adapters.patterns import Patterns
from lora_server.adapters.selection import Selection
from lora_server.spec import Invocation


@dataclass(frozen=True)
class LoraSettings:
    """Fields of a checked config that decide the delta."""

    lora_rank: int
    alpha: float
    rslora: bool
    ranks: Patterns  # rank_pattern
    alphas: Patterns  # alpha_pattern
    target_parameters: tuple[str, ...]
    selection: Selection
    base_model: str
    warnings: tuple[str, ...]
    invocation: Invocation | None = None

    def rank_of(self, module: str) -> int:
        """Return the lora_rank of a module or parameter, by its full name."""
        found = self.ranks.first(module)
        return self.lora_rank if found is None else int(found)

    def scale_of(self, module: str) -> float:
        """Return alpha / r, or alpha / sqrt(r) for rsLoRA."""
        found = self.alphas.first(module)
        alpha = self.alpha if found is None else found
        lora_rank = self.rank_of(module)
        return alpha / math.sqrt(lora_rank) if self.rslora else alpha / lora_rank

    def targets_parameter(self, name: str) -> bool:
        """Return whether target_parameters selects the parameter of this full name, as PEFT decides it."""
        return any(name == target or name.endswith(f".{target}") for target in self.target_parameters)

    def digest(self) -> bytes:
        """Return a digest that is equal for configs that give the same tensors the same meaning."""
        patterns = [list(self.ranks.values.items()), list(self.alphas.values.items())]
        meaning: list[object] = [self.lora_rank, self.alpha, self.rslora, patterns, sorted(self.target_parameters)]
        if self.invocation is not None:
            meaning.append(self.invocation)
        return hashlib.sha256(json.dumps(meaning).encode()).digest()
