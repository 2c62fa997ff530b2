"""What a layer of the base model takes on the GPUs of one instance, without adapters."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lora_server.spec import ModelSpec
from provisioning.model import geometry
from provisioning.model.geometry import BaseDtype
from provisioning.model.hardware import Cluster, Efficiency
from provisioning.model.profile import Profile, Quantity

_ATTENTION = "as much of the bandwidth as Table 4's experts reach; the table has no attention"


@dataclass(frozen=True, kw_only=True)
class BaseLayer:
    """The base model's times, by the weights and the KV cache that a step reads, or by its FLOPs."""

    spec: ModelSpec
    cluster: Cluster
    gpus: int
    context_tokens: float
    dtype: BaseDtype
    efficiency: Efficiency
    profile: Profile
    chunk_tokens: float = 1.0

    def ffn_us(self, batch: float) -> Quantity:
        """Compute the time of the layer's experts (or MLP): its weights over HBM, or its FLOPs."""
        touched = self._touched(batch) * geometry.ffn_weight_bytes(self.spec, self.dtype)
        return self._term("base_ffn", batch, touched, self._ffn_flops(batch))

    def attention_us(self, batch: float) -> Quantity:
        """Compute attention's time: weights once per GPU (it is data parallel), the batch's KV cache, or FLOPs."""
        p, weights = self.gpus, geometry.attention_weight_bytes(self.spec, self.dtype)
        elements = geometry.attention_weight_bytes(self.spec) / 2
        cache = batch * self.context_tokens * geometry.kv_bytes_per_token(self.spec)
        found = self._term("base_attention", batch, weights * p + cache, 2 * batch * elements)
        fitted = found.source == self.efficiency.source
        return found._replace(kind="assumed", source=_ATTENTION) if fitted else found

    def decode_us(self, batch: float) -> float:
        """Compute the time of all layers of a decode step."""
        return self.spec.layers * (self.ffn_us(batch).value + self.attention_us(batch).value)

    @property
    def prompt_us(self) -> tuple[float, float]:
        """(attention, FFN) of a prompt token in a chunk: measured, or by FLOPs without the square of attention."""
        peak = self.gpus * self.cluster.flops_per_us * self.efficiency.tensor_cores
        attention = geometry.attention_weight_bytes(self.spec)  # 2 FLOPs per weight of 2 bytes
        return self._prompt("attention", attention / peak), self._prompt("ffn", self._ffn_flops(1.0) / peak)

    @property
    def prefill_us(self) -> float:
        """Time of a prompt token in all layers."""
        return self.spec.layers * sum(self.prompt_us)

    def _prompt(self, part: str, modelled_us: float) -> float:
        found = self.profile.lookup(f"prompt_{part}", batch=self.chunk_tokens)
        return modelled_us if found is None else found.value / self.chunk_tokens

    def _ffn_flops(self, batch: float) -> float:
        share = len(self.spec.moe_layers) / self.spec.layers
        width = share * self.spec.top_k * self.spec.ffn + (1 - share) * self.spec.dense_ffn
        return 6.0 * batch * self.spec.hidden * width

    def _touched(self, batch: float) -> float:
        """Return the share of the FFN weights that a step reads: experts that at least one token chose."""
        if not self.spec.moe_layers:
            return 1.0
        return 1.0 - math.pow(1.0 - self.spec.top_k / self.spec.experts, max(batch, 1.0))

    def _term(self, name: str, batch: float, bytes_: float, flops: float) -> Quantity:
        cluster, p = self.cluster, self.gpus
        memory_us = bytes_ / (p * cluster.hbm_bytes_per_us * self.efficiency.base_hbm)
        modelled_us = max(memory_us, flops / (p * cluster.flops_per_us * self.efficiency.tensor_cores))
        return self.profile.lookup(name, batch=batch) or self.efficiency.modelled(modelled_us)
