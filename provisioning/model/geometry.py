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


def lora_step(
    spec: ModelSpec,
    popularity: Floats,
    *,
    batch: float,
    lora_rank: float,
    ep: int,
    element_bytes: int = 2,
    shared_a: bool = False,
    once_per_shard: bool = True,
    attention_share: float = 0.0,
    times: Floats | float = 1.0,
    copies: int = 1,
) -> StepBytes:
    """Count the bytes and FLOPs of gate_up and down of one layer, for one instance's batch.

    `once_per_shard` is our wire: gate_up carries a token once per shard, and down returns the weighted
    sum per token and shard. Otherwise, as in the paper, both carry one row per expert. Of `attention_share` of the
    tokens the rows of qkv and o travel too; their weights are in `lora_rank`. A tensor-parallel engine's GPUs each send
    all of a token's hidden row and get partial sums of it: `copies` of what is `hidden` wide.
    """
    asked = (spec, popularity, times, batch, lora_rank, ep, element_bytes, shared_a, once_per_shard, copies)
    moe = _layer_step(*asked, dense=False)
    if len(spec.moe_layers) == spec.layers and not attention_share:
        return moe
    dense = _layer_step(*asked, dense=True)
    share = len(spec.moe_layers) / spec.layers
    mixed = {name: share * getattr(moe, name) + (1 - share) * getattr(dense, name) for name in vars(moe)}
    rows = attention_share * batch * element_bytes
    mixed["receive"] += rows * (copies * spec.hidden + spec.q_width)
    mixed["send"] += rows * (spec.q_width + 2 * spec.kv_width + copies * spec.hidden)
    return StepBytes(**mixed)


def _layer_step(
    spec: ModelSpec,
    popularity: Floats,
    times: Floats | float,
    batch: float,
    lora_rank: float,
    ep: int,
    element_bytes: int,
    shared_a: bool,
    once_per_shard: bool,
    copies: int,
    *,
    dense: bool,
) -> StepBytes:
    experts, top_k, ffn = (1, 1, spec.dense_ffn) if dense else (spec.experts, spec.top_k, spec.ffn)
    rows, hidden = batch * top_k, spec.hidden * copies
    tokens = batch * shard_tokens(experts=experts, top_k=top_k, ep=min(ep, experts)) if once_per_shard else rows
    num_a = 1 if shared_a else 2
    elements = lora_rank * (num_a * hidden + 2 * ffn + ffn + hidden)
    pairs = expected_pairs(popularity, batch=batch, experts=experts, top_k=top_k, times=times)
    return StepBytes(
        receive=element_bytes * (tokens * hidden + rows * ffn),
        send=element_bytes * (rows * 2 * ffn + tokens * hidden),
        weights=element_bytes * pairs * elements,
        flops=2.0 * rows * elements,
    )


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


def prefill_bytes_per_token(spec: ModelSpec, element_bytes: int = 2) -> float:
    """Return the bytes of one token's activations in a layer: itself twice; per expert its row, gate, up, product."""
    share = len(spec.moe_layers) / spec.layers
    experts = share * spec.top_k * (3 * spec.ffn + spec.hidden) + (1 - share) * (3 * spec.dense_ffn + spec.hidden)
    return element_bytes * (2.0 * spec.hidden + experts)


def kv_bytes_per_token(spec: ModelSpec, element_bytes: int = 2) -> float:
    """Return the bytes of KV cache of one token in one layer."""
    return element_bytes * 2.0 * spec.kv_width
