"""The model of the race, and its adapters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bench.race import load
from bench.race.systems import ATTENTION, RANKS
from lora_server.demo import tiny

TARGETS = {"attention": ATTENTION, "all": [*ATTENTION, "gate_proj", "up_proj", "down_proj"]}


def make(work: Path, sizes: Mapping[str, Any], counts: Mapping[str, int]) -> list[str]:
    """Write work/base and work/adapters, `counts` by sites; ranks take turns. Returns the adapters' names."""
    model = tiny.make_model("llama", **sizes)
    tiny.save_model(model, work / "base")
    made = [(sites, name) for sites, count in counts.items() for name in load.names(sites, count)]
    for number, (sites, name) in enumerate(made):
        _adapter(model, work / "adapters" / name, TARGETS[sites], RANKS[number % len(RANKS)], number)
    return [name for _, name in made]


def _adapter(model: torch.nn.Module, path: Path, targets: list[str], lora_rank: int, seed: int) -> None:
    """Write a PEFT adapter of random weights, so large that tokens change."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] in targets:
            a = torch.randn(lora_rank, module.in_features, generator=generator) / math.sqrt(module.in_features)
            b = torch.randn(module.out_features, lora_rank, generator=generator) * 0.15
            tensors[f"base_model.model.{name}.lora_A.weight"] = a
            tensors[f"base_model.model.{name}.lora_B.weight"] = b
    config = {"r": lora_rank, "lora_alpha": 2 * lora_rank, "target_modules": targets}
    tiny.write_adapter(path, tensors, config)
