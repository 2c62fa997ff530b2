"""Section 4.2.2: what one layer's LoRA step takes, and whether Eq. 5 and Eq. 6 hold.

    T_recv = bytes in  / (min(p, x) link) + overhead      the NICs of p clients or x shards bind
    T_comp = max(weights / (x HBM), FLOPs / (x peak)) + overhead
    T_send = bytes out / (min(p, x) link) + overhead
    Eq. 5   T_recv + T_comp + T_send <= SLO_FFN
    Eq. 6   max(T_recv, T_comp, T_send) * L <= SLO_Layer

T sums gate_up and down. SLO_Layer = tpot / layers; SLO_FFN = what the modelled attention leaves of it, so that
Eq. 5 says that the step meets the TPOT. Eq. 6 as printed has the whole server busy with one layer at a time. But
y stages serve y layers at once: in a step, a stage is busy for max(T) L with each of its ceil(layers / y) layers,
which is what `stage`, the default, holds against the TPOT.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from lora_server.placement import Layout
from lora_server.spec import ModelSpec
from provisioning.arrays import Floats
from provisioning.model import geometry, memory
from provisioning.model.geometry import BF16, WIRE_BYTES, BaseDtype, Wire
from provisioning.model.hardware import Cluster, Efficiency
from provisioning.model.profile import Profile, Quantity

Eq6 = Literal["stage", "printed"]


@dataclass(frozen=True, kw_only=True)
class StepModel:
    """Everything that a step's time depends on but the batch and the layout."""

    spec: ModelSpec
    cluster: Cluster
    popularity: Floats
    lora_rank: float
    instance_gpus: int
    context_tokens: float = 1024.0
    shared_a: bool = False
    wire: Wire = "exact"
    once_per_shard: bool = True
    attention_share: float = 0.0
    base_dtype: BaseDtype = BF16
    prefill_tokens: float = 0.0
    efficiency: Efficiency = field(default_factory=Efficiency)
    profile: Profile = field(default_factory=Profile)

    def lora(self, batch: float, layout: Layout) -> Latency:
        """Receive, compute and send of one layer for one instance's batch, in us."""
        bytes_ = self._bytes(batch, layout.ep)
        cluster, reach, x = self.cluster, self.efficiency, layout.ep
        across = x > cluster.gpus_per_node
        rate = cluster.link_bytes_per_us * reach.link * WIRE_BYTES["exact"] / WIRE_BYTES[self.wire]
        wire = min(self.instance_gpus, self._active(x)) * rate
        memory_us = bytes_.weights / (self._active(x) * cluster.hbm_bytes_per_us * reach.hbm)
        math_us = bytes_.flops / (self._active(x) * cluster.flops_per_us * reach.tensor_cores)
        return Latency(
            receive=self._term(
                "receive", batch, x, bytes_.receive / wire + reach.receive_us + across * reach.across_receive_us
            ),
            compute=self._term(
                "compute", batch, x, max(memory_us, math_us) + reach.compute_us + across * reach.across_compute_us
            ),
            send=self._term("send", batch, x, bytes_.send / wire + reach.send_us + across * reach.across_send_us),
        )

    def coupled_lora_us(self, batch: float) -> Quantity:
        """LoRA inside the engine, after the base GEMM and spread over its own GPUs; no wire."""
        bytes_, p = self._bytes(batch, self.instance_gpus), self._active(self.instance_gpus)
        memory_us = bytes_.weights / (p * self.cluster.hbm_bytes_per_us * self.efficiency.hbm)
        math_us = bytes_.flops / (p * self.cluster.flops_per_us * self.efficiency.tensor_cores)
        return Quantity(max(memory_us, math_us) + self.efficiency.compute_us, "extrapolated", self.efficiency.source)

    def base_ffn_us(self, batch: float) -> Quantity:
        """The base layer's experts (or MLP): weights touched over HBM, or FLOPs."""
        touched = self._touched(batch) * geometry.ffn_weight_bytes(self.spec, self.base_dtype)
        share = len(self.spec.moe_layers) / self.spec.layers
        width = share * self.spec.top_k * self.spec.ffn + (1 - share) * self.spec.dense_ffn
        modelled = self._base_us(touched, 6.0 * batch * self.spec.hidden * width)
        return self._term("base_ffn", batch, 0, modelled)

    def base_attention_us(self, batch: float) -> Quantity:
        """Weights once per GPU (attention is data parallel), KV cache of the batch, FLOPs."""
        p, weights = self.instance_gpus, geometry.attention_weight_bytes(self.spec, self.base_dtype)
        elements = geometry.attention_weight_bytes(self.spec) / 2
        cache = batch * self.context_tokens * geometry.kv_bytes_per_token(self.spec)
        return self._term("base_attention", batch, 0, self._base_us(weights * p + cache, 2 * batch * elements))

    def base_step_us(self, batch: float) -> float:
        """One decode step of the base model."""
        return self.spec.layers * (self.base_ffn_us(batch).value + self.base_attention_us(batch).value)

    def coupled_step_us(self, batch: float) -> float:
        """The same with LoRA after the FFN."""
        return self.base_step_us(batch) + self.spec.layers * self.coupled_lora_us(batch).value

    def step_us(self, batch: float, layout: Layout, instances: int = 1, eq6: Eq6 = "stage") -> float:
        """The same with LoRA beside the FFN, on a server that serves so many instances of this batch."""
        latency, layers = self.lora(batch, layout), self.spec.layers
        ffn_us = max(self.base_ffn_us(batch).value, latency.total)
        own_us = self.base_attention_us(batch).value + ffn_us
        return layers * max(own_us, served_us(latency, layout, layers, instances, eq6))

    @property
    def free_bytes(self) -> float:
        """What weights and a chunk of prefill leave an LLM instance for KV cache, and for adapters if it is coupled."""
        return memory.instance_free_bytes(
            self.spec, self.cluster, self.instance_gpus, self.base_dtype, self.prefill_tokens
        )

    def _base_us(self, bytes_: float, flops: float) -> float:
        cluster, p = self.cluster, self.instance_gpus
        memory_us = bytes_ / (p * cluster.hbm_bytes_per_us * self.efficiency.base_hbm)
        return max(memory_us, flops / (p * cluster.flops_per_us * self.efficiency.tensor_cores))

    def _touched(self, batch: float) -> float:
        """Share of the FFN weights that a step reads: experts that at least one token chose."""
        if not self.spec.moe_layers:
            return 1.0
        return 1.0 - math.pow(1.0 - self.spec.top_k / self.spec.experts, max(batch, 1.0))

    def _active(self, x: int) -> int:
        """Shards or GPUs that share a layer's work; one where a layer has one weight for all rows."""
        return min(x, self.spec.experts) if self.spec.moe_layers else 1

    def _bytes(self, batch: float, ep: int) -> geometry.StepBytes:
        popularity, times = self._grouped
        return geometry.lora_step(
            self.spec,
            popularity,
            times=times,
            batch=batch,
            lora_rank=self.lora_rank,
            ep=ep,
            shared_a=self.shared_a,
            once_per_shard=self.once_per_shard,
            attention_share=self.attention_share,
        )

    @cached_property
    def _grouped(self) -> tuple[Floats, Floats | float]:
        return geometry.grouped(self.popularity)

    def _term(self, name: str, batch: float, ep: int, modelled_us: float) -> Quantity:
        known = self.profile.lookup(name, batch=batch, ep=ep)
        return known or Quantity(modelled_us, "extrapolated", self.efficiency.source)


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Of one layer, both projections, one instance's batch."""

    receive: Quantity
    compute: Quantity
    send: Quantity

    @property
    def total(self) -> float:
        """Left side of Eq. 5, us."""
        return self.receive.value + self.compute.value + self.send.value

    @property
    def longest(self) -> float:
        """The stage that Eq. 6 multiplies by L, us."""
        return max(self.receive.value, self.compute.value, self.send.value)

    @property
    def worst(self) -> str:
        """What that stage waits for: `compute` or `network`."""
        return "compute" if self.compute.value == self.longest else "network"


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The two right sides, us."""

    layer: float
    ffn: float


def budget(model: StepModel, batch: float, tpot_us: float) -> Budget:
    """SLO_Layer and SLO_FFN from the average TPOT."""
    layer = tpot_us / model.spec.layers
    return Budget(layer=layer, ffn=layer - model.base_attention_us(batch).value)


def served_us(latency: Latency, layout: Layout, layers: int, instances: int, eq6: Eq6 = "stage") -> float:
    """Left side of Eq. 6: the least time of a layer, for all instances to be served."""
    share = -(-layers // layout.pp) / layers if eq6 == "stage" else 1.0
    return latency.longest * instances * share


def violations(latency: Latency, limit: Budget, busy_us: float) -> list[str]:
    """Which of Eq. 5 and Eq. 6 (`busy_us`, from `served_us`) fail, by the largest term: `network` or `compute`."""
    failed = [name for name, over in (("eq5", latency.total > limit.ffn), ("eq6", busy_us > limit.layer)) if over]
    return [f"{name}:{latency.worst}" for name in failed]
