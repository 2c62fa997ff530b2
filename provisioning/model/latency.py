"""Section 4.2.2: what one layer's LoRA step takes, whether Eq. 5 and Eq. 6 hold, and what a cold adapter adds.

    T_recv = bytes in  / (min(p, x) link) + overhead      the NICs of p clients or x shards bind
    T_comp = max(weights / (x HBM), FLOPs / (x peak)) + overhead
    T_send = bytes out / (min(p, x) link) + overhead
    Eq. 5   T_recv + T_comp + T_send + round trips <= SLO_FFN
    Eq. 6   max(T_recv, T_comp, T_send) * L <= SLO_Layer

Eq. 6 as printed has all three stages overlap. Where a transport computes and sends in one phase, the maximum is over
phases: max(T_recv, T_comp + T_send).

T sums gate_up and down. SLO_Layer = tpot / layers; SLO_FFN = what the modelled attention leaves of it, so that
Eq. 5 says that the step meets the TPOT. Eq. 6 as printed has the whole server busy with one layer at a time. But
y stages serve y layers at once: in a step, a stage is busy for max(T) L with each of its ceil(layers / y) layers,
which is what `stage`, the default, holds against the TPOT.

Prompts. An engine that computes prompts too sends rows of all their tokens. A decode step of B tokens carries n = B
(prompt tokens / output tokens) of them on average. Their rows are in the step's messages, and their base FLOPs come on
top of the weights that decoding reads anyway. So a prompt token costs bytes, FLOPs and its adapter's weights (read once
per chunk), and no overhead. n times its layer is taken from SLO_Layer before Eq. 5, and n times its bytes over the x
NICs of the stage and its compute are added to the terms of Eq. 6.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from lora_server.placement import Layout
from provisioning.model import memory
from provisioning.model.base import BaseLayer
from provisioning.model.geometry import WIRE_BYTES
from provisioning.model.lora_work import LoraWork, StepSettings
from provisioning.model.profile import Quantity
from provisioning.model.transports import APART, Stage

Eq6 = Literal["stage", "printed"]


class StepModel(StepSettings):
    """The times of steps, by batch and layout."""

    @cached_property
    def base(self) -> BaseLayer:
        """The base model on the GPUs of one instance."""
        return BaseLayer(
            spec=self.spec,
            cluster=self.cluster,
            gpus=self.instance_gpus,
            context_tokens=self.context_tokens,
            dtype=self.base_dtype,
            efficiency=self.efficiency,
            profile=self.profile,
            chunk_tokens=self.chunk_tokens,
        )

    @cached_property
    def work(self) -> LoraWork:
        """The bytes and FLOPs of a LoRA step."""
        return LoraWork(self)

    def lora(self, batch: float, layout: Layout, engines: int = 1) -> Latency:
        """Compute receive, compute and send of one layer for one instance's batch, in us.

        Where a profile has measured it, they include what `engines` that step at once wait for each other.
        """
        work, reach, x = self.work, self.efficiency, layout.ep
        bytes_, wire = work.step(batch, x), work.nics_bytes_per_us(x)
        across = reach.across.times(x > self.cluster.gpus_per_node)
        receive_us = bytes_.receive / wire + reach.overhead.receive + across.receive
        compute_us = work.compute_us(bytes_, x) + (reach.overhead.compute + reach.host_us) + across.compute
        send_us = bytes_.send / wire + reach.overhead.send + across.send
        return Latency(
            receive=self._term("receive", batch, x, receive_us, engines),
            compute=self._term("compute", batch, x, compute_us, engines),
            send=self._term("send", batch, x, send_us, engines),
            round_trips_us=0.0 if self.profile.lookup("receive", batch=batch, ep=x) else reach.round_trips_us,
            phases=self.transport.phases,
        )

    def exposed_us(self, batch: float, ep: int, engines: int, prefix: str = "") -> float:
        """Return what a layer takes beyond attention and the longer of FFN and LoRA step, where that was measured."""
        found = self.profile.lookup(f"{prefix}exposed", batch=batch, ep=ep, engines=engines)
        return found.value if found else 0.0

    def served(self, batch: float, layout: Layout, known: Latency | None = None) -> Latency:
        """Compute the terms of Eq. 6: one instance's step at the server, if not `known`, and its share of prompts."""
        latency = known or self.lora(batch, layout)
        return latency.plus(self.prompt(layout.ep).served, self.prompts(batch)) if self.prompt_tokens else latency

    def prompts(self, batch: float) -> float:
        """Return how many prompt tokens a decode step carries on average."""
        return batch * self.prompt_tokens / self.output_tokens

    def prompt(self, ep: int) -> PromptToken:
        """Compute the cost of a prompt token in a layer. A chunk belongs to one request, so to one adapter."""
        if ep not in self._prompt_tokens:
            chunk, work = self.chunk_tokens, self.work
            bytes_ = work.step(chunk, ep, popularity=np.ones(1))
            own, stage = work.nics_bytes_per_us(ep), work.nics_bytes_per_us(ep, of_server=True)
            receive, send, compute_us = bytes_.receive / chunk, bytes_.send / chunk, work.compute_us(bytes_, ep) / chunk
            self._prompt_tokens[ep] = PromptToken(
                receive_bytes=receive * WIRE_BYTES[self.wire] / WIRE_BYTES["exact"],
                send_bytes=send * WIRE_BYTES[self.wire] / WIRE_BYTES["exact"],
                base=self.base.prompt_us,
                exposed_us=self.exposed_us(chunk, ep, 1, "prompt_") / chunk,
                lora=self._of_prompts(ep, receive / own, compute_us, send / own),
                served=self._of_prompts(ep, receive / stage, compute_us, send / stage),
            )
        return self._prompt_tokens[ep]

    @property
    def chunk_tokens(self) -> float:
        """Prompt tokens of one request in one step, at most."""
        return max(min(self.prompt_tokens, self.prefill_tokens or math.inf), 1.0)

    @cached_property
    def _prompt_tokens(self) -> dict[int, PromptToken]:
        return {}

    def _of_prompts(self, ep: int, receive_us: float, compute_us: float, send_us: float) -> Latency:
        def term(name: str, modelled_us: float) -> Quantity:
            found, chunk = self.profile.lookup(f"prompt_{name}", batch=self.chunk_tokens, ep=ep), self.chunk_tokens
            return found._replace(value=found.value / chunk) if found else self.efficiency.modelled(modelled_us)

        return Latency(
            receive=term("receive", receive_us),
            compute=term("compute", compute_us),
            send=term("send", send_us),
            phases=self.transport.phases,
        )

    def coupled_lora_us(self, batch: float) -> Quantity:
        """Compute the time of LoRA inside the engine: after the base GEMM, spread over its own GPUs, without a wire."""
        measured = self.profile.lookup("compute", batch=batch, ep=self.instance_gpus)
        if measured:
            return measured
        lora_us = self.work.compute_us(self.work.step(batch, self.instance_gpus), self.instance_gpus)
        return self.efficiency.modelled(lora_us + self.efficiency.overhead.compute)

    def base_step_us(self, batch: float) -> float:
        """Compute the time of a decode step of the base model, with its share of prompts."""
        return self.base.decode_us(batch) + self.prompts(batch) * self.base.prefill_us

    def coupled_step_us(self, batch: float) -> float:
        """Compute the time of a decode step with LoRA after the FFN."""
        lora_us = self.coupled_lora_us(batch).value
        if self.prompt_tokens:
            lora_us += self.prompts(batch) * self.prompt(self.instance_gpus).lora.compute.value
        return self.base_step_us(batch) + self.spec.layers * lora_us

    def step_us(
        self, batch: float, layout: Layout, instances: int = 1, eq6: Eq6 = "stage", engines: int | None = None
    ) -> float:
        """Compute the time of a decode step with LoRA beside the FFN, on a server of `instances` with this batch.

        `engines` step at once: the instances, unless Eq. 6 counts them elsewhere.
        """
        latency, layers = self.lora(batch, layout, engines or instances), self.spec.layers
        ffn_us = self.base.ffn_us(batch).value
        own_us = self.base.attention_us(batch).value + max(ffn_us, latency.total)
        own_us += self.exposed_us(batch, layout.ep, engines or instances)
        if self.prompt_tokens:
            own_us += self.prompts(batch) * self.prompt(layout.ep).layer_us
        alone = self.served(batch, layout, None if self.profile.points else latency)
        return layers * max(own_us, served_us(alone, layout, layers, instances, eq6))

    def without_prompts(self) -> StepModel:
        """Return the model of instances that do not prefill."""
        return replace(self, prompt_tokens=0.0)

    @property
    def free_bytes(self) -> float:
        """Memory of an LLM instance for KV cache, and adapters if coupled: without weights and a prefill chunk."""
        return memory.instance_free_bytes(
            self.spec, self.cluster, self.instance_gpus, self.base_dtype, self.prefill_tokens
        )

    def _term(self, name: str, batch: float, ep: int, modelled_us: float, engines: int) -> Quantity:
        found = self.profile.lookup(name, batch=batch, ep=ep, engines=engines)
        if found is None or self.merged_share:  # profiles are of engines without a merge
            return self.efficiency.modelled(modelled_us)
        return found


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Terms of one layer's step, both projections, for one instance's batch.

    `round_trips_us` are those of its exchanges: an engine waits for each, but neither links nor shards are busy then.
    """

    receive: Quantity
    compute: Quantity
    send: Quantity
    round_trips_us: float = 0.0
    phases: tuple[tuple[Stage, ...], ...] = APART

    @property
    def total(self) -> float:
        """Left side of Eq. 5, us."""
        return self.receive.value + self.compute.value + self.send.value + self.round_trips_us

    @property
    def longest(self) -> float:
        """The phase that Eq. 6 multiplies by L, us."""
        return max(sum(self.us(stage) for stage in phase) for phase in self.phases)

    @property
    def worst(self) -> str:
        """Name the bottleneck of that phase: `compute` or `network`."""
        phase = max(self.phases, key=lambda stages: sum(self.us(stage) for stage in stages))
        return "compute" if max(phase, key=self.us) == "compute" else "network"

    def us(self, stage: Stage) -> float:
        """Return one stage's time."""
        quantity: Quantity = getattr(self, stage)
        return quantity.value

    def plus(self, other: Latency, times: float) -> Latency:
        """Add `times` the terms of another latency."""
        return replace(
            self,
            receive=self.receive._replace(value=self.receive.value + times * other.receive.value),
            compute=self.compute._replace(value=self.compute.value + times * other.compute.value),
            send=self.send._replace(value=self.send.value + times * other.send.value),
        )


@dataclass(frozen=True, kw_only=True)
class PromptToken:
    """Cost of a prompt token in one layer: to the engine's own step (`base`, `lora`) and to the server (`served`).

    `base` is (attention, FFN); bytes are those of the wire, all shards together.
    """

    receive_bytes: float
    send_bytes: float
    base: tuple[float, float]
    exposed_us: float
    lora: Latency
    served: Latency

    @property
    def layer_us(self) -> float:
        """LoRA beside the FFN, as in a decode step."""
        attention, ffn = self.base
        return attention + max(ffn, self.lora.total) + self.exposed_us


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The two right sides, us."""

    layer: float
    ffn: float


def budget(model: StepModel, batch: float, tpot_us: float, ep: int = 1, engines: int = 1) -> Budget:
    """Compute SLO_Layer, and SLO_FFN: the part of it that attention and the step's share of prompts leave.

    What a profile says that a layer takes beyond attention and the longer of FFN and LoRA step is left out, too.
    """
    layer = tpot_us / model.spec.layers
    prompts_us = model.prompts(batch) * model.prompt(ep).layer_us if model.prompt_tokens else 0.0
    exposed_us = model.exposed_us(batch, ep, engines)
    return Budget(layer=layer, ffn=layer - model.base.attention_us(batch).value - prompts_us - exposed_us)


def served_us(latency: Latency, layout: Layout, layers: int, instances: int, eq6: Eq6 = "stage") -> float:
    """Compute the left side of Eq. 6: the least time of a layer in which all instances are served."""
    share = -(-layers // layout.pp) / layers if eq6 == "stage" else 1.0
    return latency.longest * instances * share


def violations(latency: Latency, limit: Budget, busy_us: float, served: Latency | None = None) -> list[str]:
    """Name the equations that fail, 5 and 6 (`busy_us` of `served_us`), with the largest term: `network` or `compute`.

    `served` is the step with its share of prompts: its largest term, if given, is the one named.
    """
    failed = [name for name, over in (("eq5", latency.total > limit.ffn), ("eq6", busy_us > limit.layer)) if over]
    return [f"{name}:{(served or latency).worst}" for name in failed]


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
