"""What the LoRA step of one layer has to move and to multiply, and how fast that goes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from lora_server.spec import ModelSpec
from provisioning.arrays import Floats
from provisioning.model import geometry
from provisioning.model.geometry import WIRE_BYTES, Wire
from provisioning.model.hardware import Cluster, Efficiency


@dataclass(frozen=True, kw_only=True)
class LoraWork:
    """The bytes and FLOPs of tokens that name adapters by popularity, and their times in us.

    `copies`: see geometry.lora_step. `conversion_us` is what both ends take to make a byte of exact rows shorter.
    `merged_share`: of the tokens, those whose adapter is in the base weights. They need no server; any other token has
    two entries, its own and one of the merged adapter, whose `popularity` is the share of those.
    """

    spec: ModelSpec
    cluster: Cluster
    popularity: Floats
    lora_rank: float
    instance_gpus: int
    shared_a: bool
    wire: Wire
    once_per_shard: bool
    attention_share: float
    copies: int
    conversion_us: float
    efficiency: Efficiency
    merged_share: float = 0.0

    def step(self, batch: float, ep: int, popularity: Floats | None = None) -> geometry.StepBytes:
        """Count the bytes of a step, by the model's popularity or by the given one."""
        is_chunk = popularity is not None  # of one request, and so of one adapter
        popularity, times = self._grouped if popularity is None else (popularity, 1.0)
        bytes_ = geometry.lora_step(
            self.spec,
            popularity,
            times=times,
            batch=batch,
            lora_rank=self.lora_rank,
            ep=ep,
            shared_a=self.shared_a,
            once_per_shard=self.once_per_shard,
            attention_share=self.attention_share,
            copies=self.copies,
        )
        if not self.merged_share:
            return bytes_
        others = 1.0 - self.merged_share
        return geometry.StepBytes(
            receive=others * bytes_.receive,
            send=others * bytes_.send,
            weights=bytes_.weights * (2.0 * others if is_chunk else 1.0),
            flops=2.0 * others * bytes_.flops,
        )

    def compute_us(self, bytes_: geometry.StepBytes, gpus: int) -> float:
        """Compute the time of shrink and expand, spread over `gpus` GPUs."""
        active, reach = self._active(gpus), self.efficiency
        memory_us = bytes_.weights / (active * self.cluster.hbm_bytes_per_us * reach.hbm)
        return max(memory_us, bytes_.flops / (active * self.cluster.flops_per_us * reach.tensor_cores))

    def nics_bytes_per_us(self, ep: int, *, of_server: bool = False) -> float:
        """Return the bandwidth each way between clients and shards, or of the shards alone, in bytes of exact wire."""
        nics = self._active(ep) if of_server else min(self.instance_gpus, self._active(ep))
        rate = self.cluster.link_bytes_per_us * self.efficiency.link * WIRE_BYTES["exact"] / WIRE_BYTES[self.wire]
        return nics / (1 / rate + self.conversion_us)

    def _active(self, x: int) -> int:
        """Return how many shards or GPUs share a layer's work; one if the layer has one weight for all rows."""
        return min(x, self.spec.experts) if self.spec.moe_layers else 1

    @cached_property
    def _grouped(self) -> tuple[Floats, Floats | float]:
        return geometry.grouped(self.popularity)
