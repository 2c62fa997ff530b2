"""Cold starts: the time that a cold adapter adds to TTFT on a LoRA Server."""

from __future__ import annotations

from lora_server.placement import Layout
from provisioning.model import memory
from provisioning.model.latency import StepModel


def visible_load_us(model: StepModel, layout: Layout, step_us: float) -> float:
    """Compute the load time that layer-wise loading does not hide, without a prefetch ahead of the request.

    Layer 0 is waited for; the other layers arrive over all shards' links while the first step runs,
    and delay it only by as much as they take longer than the step (section 5.3).
    """
    spec, rate = model.spec, model.cluster.host_bytes_per_us
    has_experts = 0 in spec.moe_layers
    experts, width = (spec.experts, min(layout.ep, spec.experts)) if has_experts else (1, 1)
    first_us = experts * memory.site_bytes(spec, 0, model.lora_rank, model.shared_a) / (width * rate)
    whole_us = memory.fullest_shard_bytes(spec, layout, model.lora_rank, model.shared_a) / rate
    return max(first_us, whole_us - step_us * (1 - 1 / spec.layers))
