"""A good adapter's files, which tests damage, and what a refusal must say of them."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch

from lora_server import spec as specs
from lora_server.adapters import validate_adapter
from lora_server.errors import AdapterFormatError

LAYERS = "base_model.model.model.layers"
Q = f"{LAYERS}.0.self_attn.q_proj"
W1 = f"{LAYERS}.1.block_sparse_moe.experts.2.w1"
CONFIG = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "w1"]}


def spec_of(kind: str = "mixtral", **overrides) -> specs.ModelSpec:
    fields = {"model_type": kind, "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    fields |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2}
    return specs.from_config({**fields, "moe_intermediate_size": 96, **overrides}, name=f"tiny-{kind}")


def good() -> dict[str, torch.Tensor]:
    return {
        f"{Q}.lora_A.weight": torch.ones(4, 64),
        f"{Q}.lora_B.weight": torch.ones(64, 4),
        f"{W1}.lora_A.weight": torch.ones(4, 64),
        f"{W1}.lora_B.weight": torch.ones(96, 4),
    }


def refused(path: Path, *parts: str, spec: specs.ModelSpec | None = None) -> str:
    """The message of the refusal, which names the adapter, got, expected and all of `parts`."""
    with pytest.raises(AdapterFormatError) as caught:
        adapter, _ = validate_adapter(path, spec or spec_of())
        adapter.close()
    message = str(caught.value)
    for part in (str(path), "got ", "expected ", *parts):
        assert part in message, f"{part!r} is not in {message!r}"
    return message


def weights_of(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file of this header, as bytes or as what JSON makes of it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def read_all(adapter) -> list[torch.Tensor]:
    """Every tensor that an open adapter has."""
    places = [(site, expert) for site in adapter.sites() for expert in adapter.experts(site)]
    return [tensor for place in places for _, a, b in adapter.read(*place) for tensor in (a, b)]
