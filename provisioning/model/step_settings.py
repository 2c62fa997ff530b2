"""Everything that a step's time depends on but the batch and the layout."""

from __future__ import annotations

from dataclasses import dataclass, field

from lora_server.spec import ModelSpec
from provisioning.arrays import Floats
from provisioning.model.geometry import BF16, BaseDtype, Wire
from provisioning.model.hardware import Cluster, Efficiency
from provisioning.model.profile import Profile
from provisioning.model.transports import TRANSPORTS, Transport


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """Models, machines and load of a step.

    `prompt_tokens` of a request are computed by the instances that decode its `output_tokens`. `merged_share`: of the
    tokens, those whose adapter is in the base weights. They need no server; any other token has two entries, its own
    and one of the merged adapter, whose `popularity` is the share of those.
    """

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
    tensor_parallel: bool = False
    merged_share: float = 0.0
    base_dtype: BaseDtype = BF16
    prefill_tokens: float = 0.0
    prompt_tokens: float = 0.0
    output_tokens: float = 256.0
    transport: Transport = TRANSPORTS["nvshmem"]
    efficiency: Efficiency = field(default_factory=Efficiency)
    profile: Profile = field(default_factory=Profile)
