"""What prompts take of an instance's time: an estimate by FLOPs, since a step's model has no prefill in it."""

from __future__ import annotations

from provisioning.model import geometry
from provisioning.model.latency import StepModel


def prefill_us(model: StepModel, tokens: float) -> float:
    """Of so many prompt tokens, at the tensor cores' assumed share of their peak; attention's square is left out."""
    spec, cluster = model.spec, model.cluster
    moe = len(spec.moe_layers) / spec.layers
    width = moe * spec.top_k * spec.ffn + (1 - moe) * spec.dense_ffn
    flops = spec.layers * (6 * spec.hidden * width + geometry.attention_weight_bytes(spec))  # 2 per weight of 2 bytes
    return tokens * flops / (model.instance_gpus * cluster.flops_per_us * model.efficiency.tensor_cores)
