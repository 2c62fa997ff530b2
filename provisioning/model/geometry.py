"""Bytes and FLOPs of one layer's LoRA step and of the base layer beside it, from the model's geometry.

b tokens of one LLM instance, E experts, k per token, h hidden, f one expert's width, r lora_rank,
x shards per stage. Uniform routing. Layers with and without experts are averaged by number.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb
from typing import Literal, NamedTuple

import numpy as np

from lora_server.spec import ModelSpec
from provisioning.arrays import Floats

_SINGLE = 2048
Wire = Literal["exact", "e4m3"]
WIRE_BYTES: dict[Wire, int] = {"exact": 2, "e4m3": 1}  # of an element; a scale per row is too little to count


@dataclass(frozen=True, kw_only=True)
class StepBytes:
    """Work of one layer, summed over the shards of the stage; `weights` are read from HBM, `flops` computed."""

    receive: float
    send: float
    weights: float
    flops: float


def expected_pairs(popularity: Floats, *, batch: float, experts: int, top_k: int, times: Floats | float = 1.0) -> float:
    """Count distinct (adapter, expert) pairs among b tokens: sum_i E (1 - (1 - p_i k/E)^b), each term `times` times."""
    absent_N = np.exp(batch * np.log1p(-np.minimum(popularity * top_k / experts, 1 - 1e-15)))
    return float(experts * ((1 - absent_N) * times).sum())


def grouped(popularity: Floats) -> tuple[Floats, Floats | float]:
    """Return (p, times): merges adapters that are about equally popular, and keeps the sum of all."""
    if popularity.size <= _SINGLE:
        return popularity, 1.0
    p_N = np.sort(popularity)[::-1]
    bounds = np.unique(np.r_[np.arange(_SINGLE), np.geomspace(_SINGLE, p_N.size, _SINGLE).astype(int)])[:-1]
    times_G = np.diff(np.append(bounds, p_N.size)).astype(float)
    return np.add.reduceat(p_N, bounds) / times_G, times_G


def shard_tokens(*, experts: int, top_k: int, ep: int) -> float:
    """Compute the expected number of a stage's shards that one token needs; its k experts are distinct."""
    shards = 0.0
    for rank in range(ep):
        owned = experts // ep + (rank < experts % ep)
        missed = comb(experts - owned, top_k) / comb(experts, top_k)
        shards += 1 - missed
    return shards


class BaseDtype(NamedTuple):
    """Bytes per element of the base weights, scales included."""

    ffn: float
    attention: float


BASE_DTYPES = {
    "bf16": BaseDtype(2, 2),
    "fp8": BaseDtype(1, 1),
    "mxfp4": BaseDtype(17 / 32, 2),  # the experts only, a byte of scale per 32 elements, as GPT-OSS has it
}
BF16 = BASE_DTYPES["bf16"]


def ffn_weight_bytes(spec: ModelSpec, dtype: BaseDtype = BF16) -> float:
    """Return the bytes of base weights of one layer's experts or MLP, averaged over layers."""
    share = len(spec.moe_layers) / spec.layers
    moe, dense = spec.experts * spec.ffn, spec.dense_ffn
    return dtype.ffn * 3 * spec.hidden * (share * moe + (1 - share) * dense)


def attention_weight_bytes(spec: ModelSpec, dtype: BaseDtype = BF16) -> float:
    """Return the bytes of base weights of one layer's q, k, v and o."""
    return dtype.attention * spec.hidden * (2.0 * spec.q_width + 2.0 * spec.kv_width)


def model_weight_bytes(spec: ModelSpec, dtype: BaseDtype = BF16) -> float:
    """Return the bytes of base weights of all layers, without embeddings and norms, which the geometry leaves out."""
    return spec.layers * (ffn_weight_bytes(spec, dtype) + attention_weight_bytes(spec, dtype))


def prefill_bytes_per_token(spec: ModelSpec) -> float:
    """Return the bytes of one token's activations in a layer: itself twice; per expert its row, gate, up, product."""
    share = len(spec.moe_layers) / spec.layers
    experts = share * spec.top_k * (3 * spec.ffn + spec.hidden) + (1 - share) * (3 * spec.dense_ffn + spec.hidden)
    return 2 * (2.0 * spec.hidden + experts)


def kv_bytes_per_token(spec: ModelSpec) -> float:
    """Return the bytes of KV cache of one token in one layer."""
    return 2 * 2.0 * spec.kv_width
