"""Capacity in adapters: of a LoRA Server, by its fullest shard, and of a coupled engine."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

from lora_server.placement import Layout, Placement
from lora_server.spec import EXPERT_PROJECTIONS, ModelSpec
from provisioning.model import geometry
from provisioning.model.geometry import BF16, BaseDtype
from provisioning.model.hardware import Cluster
from provisioning.model.profile import Profile

PAGE_BYTES = 2 << 20


def layouts(spec: ModelSpec, gpus: int, profile: Profile | None = None) -> Iterator[Layout]:
    """List every EPx-PPy with x * y = gpus in which no shard is empty: x <= experts, y <= layers, x in the profile."""
    most = spec.experts if spec.moe_layers else 1
    for ep in range(1, min(gpus, most) + 1):
        if gpus % ep == 0 and gpus // ep <= spec.layers and (profile is None or profile.knows(ep)):
            yield Layout(ep, gpus // ep)


def site_bytes(spec: ModelSpec, layer: int, lora_rank: float, shared_a: bool) -> float:
    """Return the bytes of one expert's gate_up and down at one layer, 2-byte elements."""
    ffn, num_a = spec.ffn_at(layer), 1 if shared_a else 2
    return 2 * lora_rank * (num_a * spec.hidden + 2 * ffn + ffn + spec.hidden)


@lru_cache(maxsize=4096)
def fullest_shard_bytes(spec: ModelSpec, layout: Layout, lora_rank: float, shared_a: bool = False) -> int:
    """Return the bytes that one adapter takes on the shard that holds most of it, in whole pages.

    ceil(layers / y) layers of ceil(experts / x) experts where all layers have experts; with dense
    layers among them, the shards are counted one by one.
    """
    if len(spec.moe_layers) == spec.layers:
        owned = -(-spec.layers // layout.pp) * -(-spec.experts // layout.ep)
        largest = owned * site_bytes(spec, 0, lora_rank, shared_a)
    else:
        placement = Placement(spec, layout)
        largest = max(_shard_bytes(placement, shard, lora_rank, shared_a) for shard in range(layout.num_shards))
    return math.ceil(largest / PAGE_BYTES) * PAGE_BYTES


def _shard_bytes(placement: Placement, shard: int, lora_rank: float, shared_a: bool) -> float:
    spec, total = placement.spec, 0.0
    for site in spec.sites(EXPERT_PROJECTIONS):
        ffn, experts = spec.ffn_at(site.layer), len(placement.experts(site, shard))
        if site.projection == "gate_up":
            total += experts * 2 * lora_rank * ((1 if shared_a else 2) * spec.hidden + 2 * ffn)
        else:
            total += experts * 2 * lora_rank * (ffn + spec.hidden)
    return total


def cache_slots(spec: ModelSpec, layout: Layout, cluster: Cluster, lora_rank: float, shared_a: bool = False) -> int:
    """Return M of a layout: the number of adapters that the fullest shard holds."""
    return int(cluster.adapter_memory_bytes // fullest_shard_bytes(spec, layout, lora_rank, shared_a))


def instance_free_bytes(
    spec: ModelSpec, cluster: Cluster, instance_gpus: int, dtype: BaseDtype = BF16, prefill_tokens: float = 0.0
) -> float:
    """Return the memory of one LLM instance beside its base weights, and beside a chunk of prefill on each GPU."""
    chunk = prefill_tokens * geometry.prefill_bytes_per_token(spec)
    return instance_gpus * (cluster.adapter_memory_bytes - chunk) - geometry.model_weight_bytes(spec, dtype)


def smallest_instance(spec: ModelSpec, cluster: Cluster, dtype: BaseDtype = BF16) -> int:
    """Return the fewest GPUs (a power of two) with at least 1.25 times the base weights in memory."""
    gpus = 1
    while gpus * cluster.adapter_memory_bytes < 1.25 * geometry.model_weight_bytes(spec, dtype):
        gpus *= 2
    return gpus


@lru_cache(maxsize=64)
def adapter_bytes(spec: ModelSpec, lora_rank: float, shared_a: bool = False) -> int:
    """Return the bytes of an adapter with all experts, 2-byte elements."""
    return spec.adapter_bytes(lora_rank, shared_a=shared_a)


def adapters_in(free_bytes: float, spec: ModelSpec, lora_rank: float, shared_a: bool = False) -> int:
    """Count the complete adapters that fit a coupled engine."""
    return max(int(free_bytes // adapter_bytes(spec, lora_rank, shared_a)), 0)


def requests_in(free_bytes: float, spec: ModelSpec, context_tokens: float) -> int:
    """Return how many requests of `context_tokens` tokens have room for their KV cache."""
    return max(int(free_bytes // (context_tokens * spec.layers * geometry.kv_bytes_per_token(spec))), 0)
