"""Settings of a step: all but the batch and the layout; and its LoRA work: bytes, FLOPs, and how fast they go."""

from __future__ import annotations

from dataclasses import dataclass, field

from lora_server.spec import ModelSpec
from provisioning.arrays import Floats
from provisioning.model import geometry
from provisioning.model.geometry import BF16, WIRE_BYTES, BaseDtype, StepBytes, Wire
from provisioning.model.hardware import Cluster, Efficiency
from provisioning.model.profile import Profile
from provisioning.model.transports import TRANSPORTS, Transport

_ELEMENT_BYTES = WIRE_BYTES["exact"]


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


class LoraWork:
    """The bytes and FLOPs of a model's tokens, which name adapters by popularity, and their times in us."""

    def __init__(self, model: StepSettings) -> None:
        self._model = model
        self._grouped = geometry.grouped(model.popularity)

    def step(self, batch: float, ep: int, popularity: Floats | None = None) -> StepBytes:
        """Count the bytes and FLOPs of gate_up and down of one layer, for one instance's batch, on the exact wire.

        Popularity is the model's, or the given one of a chunk, which is of one request and so of one adapter.
        `once_per_shard` is our wire: gate_up carries a token once per shard, and down returns the weighted sum per
        token and shard. Otherwise, as in the paper, both carry one row per expert. Of `attention_share` of the tokens
        the rows of qkv and o travel too; their weights are in `lora_rank`. A tensor-parallel engine's GPUs each send
        all of a token's hidden row and get partial sums of it: copies of what is `hidden` wide.
        """
        spec, merged = self._model.spec, self._model.merged_share
        adapters = self._grouped if popularity is None else (popularity, 1.0)
        found = self._layer(batch, ep, *adapters, spec.experts, spec.top_k, spec.ffn)
        if len(spec.moe_layers) < spec.layers or self._model.attention_share:
            found = self._mixed(batch, found, self._layer(batch, ep, *adapters, 1, 1, spec.dense_ffn))
        if not merged:
            return found
        others = 1.0 - merged
        return StepBytes(
            receive=others * found.receive,
            send=others * found.send,
            weights=found.weights * (1.0 if popularity is None else 2.0 * others),
            flops=2.0 * others * found.flops,
        )

    def _layer(
        self, batch: float, ep: int, popularity: Floats, times: Floats | float, experts: int, top_k: int, ffn: int
    ) -> StepBytes:
        model = self._model
        hidden, rows = model.spec.hidden * self._copies, batch * top_k
        shards = geometry.shard_tokens(experts=experts, top_k=top_k, ep=min(ep, experts))
        tokens = batch * shards if model.once_per_shard else rows
        elements = model.lora_rank * ((1 if model.shared_a else 2) * hidden + 2 * ffn + ffn + hidden)
        pairs = geometry.expected_pairs(popularity, batch=batch, experts=experts, top_k=top_k, times=times)
        return StepBytes(
            receive=_ELEMENT_BYTES * (tokens * hidden + rows * ffn),
            send=_ELEMENT_BYTES * (rows * 2 * ffn + tokens * hidden),
            weights=_ELEMENT_BYTES * pairs * elements,
            flops=2.0 * rows * elements,
        )

    def _mixed(self, batch: float, moe: StepBytes, dense: StepBytes) -> StepBytes:
        """Average layers with and without experts, and add the rows of attention."""
        spec, hidden = self._model.spec, self._copies * self._model.spec.hidden
        share = len(spec.moe_layers) / spec.layers
        mixed = {name: share * getattr(moe, name) + (1 - share) * getattr(dense, name) for name in vars(moe)}
        rows = self._model.attention_share * batch * _ELEMENT_BYTES
        mixed["receive"] += rows * (hidden + spec.q_width)
        mixed["send"] += rows * (spec.q_width + 2 * spec.kv_width + hidden)
        return StepBytes(**mixed)

    @property
    def _copies(self) -> int:
        return self._model.instance_gpus if self._model.tensor_parallel else 1

    def compute_us(self, bytes_: StepBytes, gpus: int) -> float:
        """Compute the time of shrink and expand, spread over `gpus` GPUs."""
        active, cluster, reach = self._active(gpus), self._model.cluster, self._model.efficiency
        memory_us = bytes_.weights / (active * cluster.hbm_bytes_per_us * reach.hbm)
        return max(memory_us, bytes_.flops / (active * cluster.flops_per_us * reach.tensor_cores))

    def nics_bytes_per_us(self, ep: int, *, of_server: bool = False) -> float:
        """Return the bandwidth each way between clients and shards, or of the shards alone, in bytes of exact wire."""
        model, nics = self._model, self._active(ep)
        if not of_server:
            nics = min(model.instance_gpus, nics)
        rate = model.cluster.link_bytes_per_us * model.efficiency.link * _ELEMENT_BYTES / WIRE_BYTES[model.wire]
        shorter = model.wire == "e4m3"  # both ends convert exact rows
        conversion_us = model.transport.conversion_us(model.cluster.hbm_bytes_per_us) if shorter else 0.0
        return nics / (1 / rate + conversion_us)

    def _active(self, x: int) -> int:
        """Return how many shards or GPUs share a layer's work; one if the layer has one weight for all rows."""
        spec = self._model.spec
        return min(x, spec.experts) if spec.moe_layers else 1
