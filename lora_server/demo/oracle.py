"""Oracles for an adapter's effect on a model: PEFT, and a literal merge that knows the layouts on disk.

Slow on purpose, and written without `lora_server.adapters`, so that each checks the other.
"""

from __future__ import annotations

import copy
import json
import math
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NAMES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def peft_model(model: PreTrainedModel, path: str | Path) -> Any:
    """PEFT's own PeftModel with the adapter loaded, on a deep copy of `model`, in eval mode."""
    from peft import PeftModel

    with warnings.catch_warnings():
        # PEFT says that patterns which match a parameter match no module.
        warnings.simplefilter("ignore", RuntimeWarning)
        return PeftModel.from_pretrained(copy.deepcopy(model), str(path)).eval()


def apply_literal(model: PreTrainedModel, path: str | Path) -> PreTrainedModel:
    """A deep copy of `model` with scale * B A added to each weight, computed in float64.

    Reads every layout that the server takes, those that PEFT cannot load included. Raises ValueError
    for a tensor that it does not know.
    """
    from safetensors.torch import load_file

    merged = copy.deepcopy(model)
    config = json.loads((Path(path) / "adapter_config.json").read_text())
    tensors = load_file(Path(path) / "adapter_model.safetensors")
    with torch.no_grad():
        for key, a in tensors.items():
            if ".lora_A" in key:
                b = tensors[key.replace(".lora_A", ".lora_B")]
                _merge(merged, key.split(".lora_A")[0], a.double(), b.double(), config, set(tensors))
    return merged


def first_match(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """Return the value that PEFT takes from rank_pattern or alpha_pattern for a module."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def _merge(
    model: PreTrainedModel, name: str, a: torch.Tensor, b: torch.Tensor, config: dict[str, Any], keys: set[str]
) -> None:
    module = name.removeprefix("base_model.model.")
    found = re.search(r"layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts(?:\.(\d+))?(?:\.(\w+))?$", module)
    if found is None:
        weight = model.get_submodule(module).weight
        assert isinstance(weight, torch.Tensor)
        weight.copy_(weight.double() + _scale(config, module, a.shape[0]) * (b @ a))
        return
    experts: Any = model.get_submodule(f"model.layers.{found[1]}.mlp.experts")
    leaf = _NAMES.get(found[3] or "", found[3] or "")
    if found[2] is not None:
        _add(experts, leaf, int(found[2]), _scale(config, module, a.shape[0]) * (b @ a))
    elif a.dim() == 3:
        for expert in range(experts.num_experts):
            a_e, b_e = a[expert % len(a)], b[expert % len(b)]
            _add(experts, leaf, expert, _scale(config, module, a_e.shape[0]) * (b_e @ a_e))
    else:
        leaf = _fused_leaf(config, leaf, keys)
        lora_rank = a.shape[0] // experts.num_experts
        scale = _scale(config, f"{module.removesuffix('.base_layer')}.{leaf}", lora_rank)
        for e in range(experts.num_experts):
            delta = b[:, e :: experts.num_experts] @ a[e * lora_rank : (e + 1) * lora_rank]
            _add(experts, leaf, e, scale * delta)


def _fused_leaf(config: dict[str, Any], leaf: str, keys: set[str]) -> str:
    if any("experts.base_layer" in key for key in keys):
        return "gate_up_proj" if leaf == "base_layer" else "down_proj"
    (only,) = (name for name in config["target_parameters"] if "experts" in name)
    return str(only).rsplit(".", 1)[-1]


def _scale(config: dict[str, Any], module: str, lora_rank: int) -> float:
    alpha = float(first_match(config.get("alpha_pattern") or {}, module, config["lora_alpha"]))
    return alpha / math.sqrt(lora_rank) if config.get("use_rslora") else alpha / lora_rank


def _add(experts: Any, leaf: str, expert: int, delta: torch.Tensor) -> None:
    """Add a delta [out, in] in the order of rows of `leaf` to the experts' own parameter."""
    parameter = experts.gate_up_proj if leaf in ("gate_proj", "up_proj", "gate_up_proj") else experts.down_proj
    weight = parameter[expert]
    transposed = bool(getattr(experts, "is_transposed", False))
    rows = weight.T if transposed else weight
    if leaf in ("gate_proj", "up_proj"):
        half = rows.shape[0] // 2
        gate_first = leaf == "gate_proj"
        rows = (rows[0::2] if gate_first else rows[1::2]) if transposed else rows[:half] if gate_first else rows[half:]
    elif leaf not in ("gate_up_proj", "down_proj"):
        raise ValueError(f"no parameter of the experts is called {leaf!r}")
    rows.copy_(rows.double() + delta)
