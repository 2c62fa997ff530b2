"""PEFT adapters with random weights, written in every layout that occurs on disk."""

from __future__ import annotations

import copy
import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from lora_server.demo.oracle import first_match

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TARGETS = ("experts", "gate_up", "down", "attention", "qv", "dense", "all")
Style = Literal["fused", "per_expert"]

_ATTENTION = {"attention": "qkvo", "all": "qkvo", "qv": "qv"}
_SECTIONS = {"gate_up": ("gate", "up"), "down": ("down",), "attention": (), "qv": ()}
_EXPERT_NAMES = {
    "mixtral": ("block_sparse_moe", {"gate": "w1", "up": "w3", "down": "w2"}),
    "qwen3_moe": ("mlp", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}),
}


def make_adapter(
    model: PreTrainedModel,
    path: str | Path,
    *,
    lora_rank: int,
    seed: int,
    targets: str = "experts",
    alpha: float | None = None,
    rslora: bool = False,
    rank_pattern: Mapping[str, int] | None = None,
    alpha_pattern: Mapping[str, float] | None = None,
    style: Style = "fused",
    dtype: torch.dtype | None = None,
    invocation: Sequence[int] | None = None,
) -> None:
    """Write a PEFT adapter for `model`, with neither A nor B zero, so large that tokens change.

    `targets`: one of TARGETS; on a dense model `experts` means its MLP. `alpha` is 2 * lora_rank unless
    given. Style `per_expert` names each expert's matrices as Mixtral and Qwen3-MoE did before
    transformers 5, with an own A for gate and up. With `invocation` (token ids) it is an activated LoRA;
    PEFT has those for attention and dense MLPs. Raises ValueError for what the model does not have.
    """
    if targets not in TARGETS or targets in (("dense",) if _experts(model) else ("gate_up", "down")):
        raise ValueError(f"targets: got {targets!r}, expected one of {TARGETS} that a {model.config.model_type} has")
    settings = {
        "r": lora_rank,
        "lora_alpha": 2 * lora_rank if alpha is None else alpha,
        "use_rslora": rslora,
        "rank_pattern": dict(rank_pattern or {}),
        "alpha_pattern": dict(alpha_pattern or {}),
        **({} if invocation is None else {"alora_invocation_tokens": list(invocation)}),
    }
    write = _write_per_expert if style == "per_expert" else _write_with_peft
    write(model, Path(path), settings, targets, seed, dtype)


def make_shared_outer(
    model: PreTrainedModel,
    path: str | Path,
    *,
    lora_rank: int,
    seed: int,
) -> None:
    """Write a shared-outer adapter: 3-D tensors, in which gate/up share A and down shares B among experts."""
    experts, ffn, hidden = _experts(model), _ffn(model), model.config.hidden_size
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for layer in _moe_layers(model):
        for name, a_experts, b_experts, width, rows in (
            ("w1", 1, experts, hidden, ffn),
            ("w3", 1, experts, hidden, ffn),
            ("w2", experts, 1, ffn, hidden),
        ):
            prefix = f"base_model.model.model.layers.{layer}.mlp.experts.{name}"
            tensors[f"{prefix}.lora_A.weight"] = _random_a((a_experts, lora_rank, width), generator)
            tensors[f"{prefix}.lora_B.weight"] = _random_b((b_experts, rows, lora_rank), generator)
    config = {"r": lora_rank, "lora_alpha": 2 * lora_rank, "target_modules": ["w1", "w2", "w3"]}
    write_adapter(path, tensors, config)


def write_adapter(
    path: str | Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], dtype: torch.dtype | None = None
) -> None:
    """Write an adapter's two files: `tensors`, cast to `dtype` if given, and `config` over PEFT's usual fields."""
    from safetensors.torch import save_file

    Path(path).mkdir(parents=True, exist_ok=True)
    save_file({key: tensor.to(dtype or tensor.dtype) for key, tensor in tensors.items()}, _weights(path))
    usual = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": None, "bias": "none"}
    (Path(path) / "adapter_config.json").write_text(json.dumps({**usual, **config}, indent=2))


def _weights(path: str | Path) -> Path:
    return Path(path) / "adapter_model.safetensors"


def _write_with_peft(
    model: PreTrainedModel, path: Path, settings: dict[str, Any], targets: str, seed: int, dtype: torch.dtype | None
) -> None:
    from safetensors.torch import load_file, save_file

    modules, parameters = _peft_targets(model, targets)
    peft_model = with_lora(model, target_modules=modules, target_parameters=parameters or None, **settings)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in peft_model.named_parameters():
            if ".lora_A." in name:
                weight.copy_(_random_a(tuple(weight.shape), generator))
            elif ".lora_B." in name:
                weight.copy_(_random_b(tuple(weight.shape), generator))
    peft_model.save_pretrained(path, save_embedding_layers=False)
    if dtype is not None:
        save_file({key: tensor.to(dtype) for key, tensor in load_file(_weights(path)).items()}, _weights(path))


def with_lora(model: PreTrainedModel, **settings: Any) -> Any:
    """Return a copy of the model with a new LoRA of PEFT's; `settings` are fields of its config."""
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        # PEFT says that patterns which match a parameter match no module.
        warnings.simplefilter("ignore", RuntimeWarning)
        return get_peft_model(copy.deepcopy(model), LoraConfig(task_type="CAUSAL_LM", **settings))


def _peft_targets(model: PreTrainedModel, targets: str) -> tuple[list[str], list[str]]:
    """(target_modules, target_parameters) for one of TARGETS."""
    attention = [f"{name}_proj" for name in _ATTENTION.get(targets, "")]
    mlp = _SECTIONS.get(targets, ("gate", "up", "down"))
    if not _experts(model):
        return [*attention, *(f"{section}_proj" for section in mlp)], []
    fused = {"gate": "gate_up", "up": "gate_up", "down": "down"}
    return attention, sorted({f"mlp.experts.{fused[section]}_proj" for section in mlp})


def _write_per_expert(
    model: PreTrainedModel, path: Path, settings: dict[str, Any], targets: str, seed: int, dtype: torch.dtype | None
) -> None:
    if model.config.model_type not in _EXPERT_NAMES:
        raise ValueError(f"style: {model.config.model_type} has no per-expert names, expected style 'fused'")
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    names: set[str] = set()
    for module, rows, width in _matrices(model, targets):
        names.add(module.rsplit(".", 1)[1])
        lora_rank = first_match(settings["rank_pattern"], module, settings["r"])
        tensors[f"base_model.model.{module}.lora_A.weight"] = _random_a((lora_rank, width), generator)
        tensors[f"base_model.model.{module}.lora_B.weight"] = _random_b((rows, lora_rank), generator)
    write_adapter(path, tensors, {**settings, "target_modules": sorted(names)}, dtype)


def _matrices(model: PreTrainedModel, targets: str) -> Iterator[tuple[str, int, int]]:
    """(module name, rows, columns) of every 2-D weight that `targets` selects, experts one by one."""
    config = model.config
    block, names = _EXPERT_NAMES[config.model_type]
    ffn, hidden, head_dim = _ffn(model), config.hidden_size, config.head_dim
    shapes = {
        "q": (config.num_attention_heads * head_dim, hidden),
        "k": (config.num_key_value_heads * head_dim, hidden),
        "v": (config.num_key_value_heads * head_dim, hidden),
        "o": (hidden, config.num_attention_heads * head_dim),
    }
    for layer in range(config.num_hidden_layers):
        for name in _ATTENTION.get(targets, ""):
            yield f"model.layers.{layer}.self_attn.{name}_proj", *shapes[name]
    for layer in _moe_layers(model):
        for expert in range(_experts(model)):
            for section in _SECTIONS.get(targets, ("gate", "up", "down")):
                rows, width = (hidden, ffn) if section == "down" else (ffn, hidden)
                yield f"model.layers.{layer}.{block}.experts.{expert}.{names[section]}", rows, width


def _moe_layers(model: PreTrainedModel) -> list[int]:
    return [index for index, layer in enumerate(model.get_decoder().layers) if hasattr(layer.mlp, "experts")]


def _experts(model: PreTrainedModel) -> int:
    return int(getattr(model.config, "num_local_experts", 0) or getattr(model.config, "num_experts", 0) or 0)


def _ffn(model: PreTrainedModel) -> int:
    return int(getattr(model.config, "moe_intermediate_size", 0) or model.config.intermediate_size)


def _random_a(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(*shape, generator=generator) / math.sqrt(shape[-1])


def _random_b(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(*shape, generator=generator) * 0.15
