"""What the LoRA step of one layer has to move and to multiply, and how fast that goes."""

from __future__ import annotations

from provisioning.arrays import Floats
from provisioning.model import geometry
from provisioning.model.geometry import WIRE_BYTES
from provisioning.model.step_settings import StepSettings


class LoraWork:
    """The bytes and FLOPs of a model's tokens, which name adapters by popularity, and their times in us."""

    def __init__(self, model: StepSettings) -> None:
        self._model = model
        self._grouped = geometry.grouped(model.popularity)

    def step(self, batch: float, ep: int, popularity: Floats | None = None) -> geometry.StepBytes:
        """Count the bytes of a step, by the model's popularity or by the given one."""
        model, is_chunk = self._model, popularity is not None  # of one request, and so of one adapter
        popularity, times = self._grouped if popularity is None else (popularity, 1.0)
        bytes_ = geometry.lora_step(
            model.spec,
            popularity,
            times=times,
            batch=batch,
            lora_rank=model.lora_rank,
            ep=ep,
            shared_a=model.shared_a,
            once_per_shard=model.once_per_shard,
            attention_share=model.attention_share,
            copies=model.instance_gpus if model.tensor_parallel else 1,
        )
        if not model.merged_share:
            return bytes_
        others = 1.0 - model.merged_share
        return geometry.StepBytes(
            receive=others * bytes_.receive,
            send=others * bytes_.send,
            weights=bytes_.weights * (2.0 * others if is_chunk else 1.0),
            flops=2.0 * others * bytes_.flops,
        )

    def compute_us(self, bytes_: geometry.StepBytes, gpus: int) -> float:
        """Compute the time of shrink and expand, spread over `gpus` GPUs."""
        active, cluster, reach = self._active(gpus), self._model.cluster, self._model.efficiency
        memory_us = bytes_.weights / (active * cluster.hbm_bytes_per_us * reach.hbm)
        return max(memory_us, bytes_.flops / (active * cluster.flops_per_us * reach.tensor_cores))

    def nics_bytes_per_us(self, ep: int, *, of_server: bool = False) -> float:
        """Return the bandwidth each way between clients and shards, or of the shards alone, in bytes of exact wire."""
        model, nics = self._model, self._active(ep)
        if not of_server:
            nics = min(model.instance_gpus, nics)
        rate = model.cluster.link_bytes_per_us * model.efficiency.link * WIRE_BYTES["exact"] / WIRE_BYTES[model.wire]
        shorter = model.wire == "e4m3"  # both ends convert exact rows
        conversion_us = model.transport.conversion_us(model.cluster.hbm_bytes_per_us) if shorter else 0.0
        return nics / (1 / rate + conversion_us)

    def _active(self, x: int) -> int:
        """Return how many shards or GPUs share a layer's work; one if the layer has one weight for all rows."""
        spec = self._model.spec
        return min(x, spec.experts) if spec.moe_layers else 1
