"""Adapters of one layer on one shard: few files with random weights, loaded under many handles, and float64 deltas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from bench.kernels.models import Model
from lora_server.demo.files import write_adapter
from lora_server.spec import ModelSpec

SCALE = 2.0  # alpha / rank
WEIGHT_SCALE = 0.02
LAYER = "base_model.model.model.layers.0"
ATTENTION = ("q", "k", "v")


def spec_of(model: Model, head_dim: int) -> ModelSpec:
    """One layer of a model, with as many heads as its width holds and a quarter of them for keys and values."""
    heads = model.hidden // head_dim
    return ModelSpec(
        name=model.name, model_type="mixtral", layers=1, hidden=model.hidden, ffn=model.ffn, experts=model.num_experts,
        top_k=model.top_k, heads=heads, kv_heads=heads // 4, head_dim=head_dim, dense_ffn=model.ffn, moe_layers=(0,),
    )  # fmt: skip


def attention(name: str) -> str:
    """The module of a projection of attention: q, k or v."""
    return f"{LAYER}.self_attn.{name}_proj"


def expert(index: int, name: str) -> str:
    """The module of an expert's matrix: w1 (gate), w3 (up) or w2 (down)."""
    return f"{LAYER}.block_sparse_moe.experts.{index}.{name}"


class Files:
    """Adapters on disk that have weights for these experts, and for q, k and v; adapter i is file i modulo `count`."""

    def __init__(self, folder: Path, spec: ModelSpec, experts: range, rank: int, count: int) -> None:
        generator, shapes = torch.Generator().manual_seed(1), list(_shapes(spec, experts))
        self.nbytes = 2 * rank * sum(rows + width for _, rows, width in shapes)  # of each
        self._tensors: list[dict[str, torch.Tensor]] = []
        self._paths = [folder / f"adapter-{index}" for index in range(count)]
        for path in self._paths:
            tensors = dict[str, torch.Tensor]()
            for module, rows, width in shapes:
                for letter, shape in (("A", (rank, width)), ("B", (rows, rank))):
                    weight = WEIGHT_SCALE * torch.randn(*shape, generator=generator)
                    tensors[f"{module}.lora_{letter}.weight"] = weight.bfloat16()
            names = sorted({module.rsplit(".", 1)[1] for module, _, _ in shapes})
            write_adapter(path, tensors, {"r": rank, "lora_alpha": SCALE * rank, "target_modules": names})
            self._tensors.append(tensors)

    def path(self, adapter: int) -> Path:
        """Return the path of an adapter's file."""
        return self._paths[adapter % len(self._paths)]

    def delta(self, adapter: int, modules: Sequence[str], x: torch.Tensor) -> torch.Tensor:
        """Compute what an adapter adds to one row of these modules' outputs, side by side, in float64."""
        tensors, parts = self._tensors[adapter % len(self._paths)], []
        for module in modules:
            a, b = (tensors[f"{module}.lora_{letter}.weight"].double() for letter in "AB")
            parts.append(SCALE * (b @ (a @ x.double())))
        return torch.cat(parts)


def _shapes(spec: ModelSpec, experts: range) -> Iterator[tuple[str, int, int]]:
    """(module, rows, columns)."""
    for name in ATTENTION:
        yield attention(name), spec.q_width if name == "q" else spec.kv_width, spec.hidden
    for index in experts:
        for name in ("w1", "w3"):
            yield expert(index, name), spec.ffn, spec.hidden
        yield expert(index, "w2"), spec.hidden, spec.ffn
