"""The agreement: settings that all nodes of one server must share."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from lora_server.config import ServeConfig
from lora_server.errors import ConfigError
from lora_server.placement import Layout, Placement
from lora_server.spec import ModelSpec
from lora_server.wire.slot import Wire


@dataclass(frozen=True)
class Agreement:
    """The model, and the flags that decide where weights lie, the layout of steps, and the shards' ports."""

    spec: ModelSpec
    layout: Layout
    dtype: str
    coordination: str
    max_step_rows: int
    data_port_base: int | None = None
    wire: Wire = "exact"
    nvshmem_clients: int = 0
    slots: int = 4
    failover_ms: int = 1000  # matters with replicas alone
    controllers: str = ""  # matters with a standby alone
    base_weights: str = ""  # fingerprint; empty where node 0 has none: no other node needs any
    generation: int = 1  # of the placement: the server's own count, which no node chooses

    @property
    def placement(self) -> Placement:
        """Return the placement of the model's adapters."""
        return Placement(self.spec, self.layout, self.generation)

    @classmethod
    def of(cls, config: ServeConfig, spec: ModelSpec) -> Agreement:
        """Return the agreement of a node with these flags and model; raises ConfigError if they do not fit together."""
        if config.max_step_rows < spec.top_k:
            raise ConfigError(
                f"--max-step-rows: got {config.max_step_rows}, expected at least the model's top-k, {spec.top_k}, "
                "since one token's rows travel together"
            )
        layout = config.replicated
        require_work(Placement(spec, layout))
        steps = (config.dtype, config.coordination, config.max_step_rows)
        ports = config.data_port_base
        controllers = str(config.controller) if config.has_standby else ""
        own = config.nvshmem_clients, config.slots, config.failover_ms
        return cls(spec, layout, *steps, ports, config.wire, *own, controllers=controllers)

    def digest(self) -> str:
        """Return a hash of the agreement, which shards show when they register."""
        flags: tuple[object, ...] = (
            self.layout,
            self.dtype,
            self.coordination,
            self.max_step_rows,
            self.data_port_base,
            self.wire,
        )
        if self.nvshmem_clients:  # then links have the same places on all PEs
            flags = (*flags, self.nvshmem_clients, self.slots)
        if self.layout.replicas > 1:
            flags = (*flags, self.layout.replicas, self.failover_ms)
        if self.controllers:
            flags = (*flags, self.controllers)
        parts = (self.spec.fingerprint(), *flags)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    def describe(self) -> str:
        """Return the agreement as text, for the error when two nodes differ."""
        return (
            f"model {self.spec.name} ({self.spec.fingerprint()}), layout {self.layout}, dtype {self.dtype}, "
            f"coordination {self.coordination}, max-step-rows {self.max_step_rows}, wire {self.wire}, "
            f"data-port-base {self.data_port_base or 'not given'}"
            + (f", nvshmem-clients {self.nvshmem_clients}, slots {self.slots}" if self.nvshmem_clients else "")
            + (f", replicas {self.layout.replicas}, failover-ms {self.failover_ms}" if self.layout.replicas > 1 else "")
            + (f", controller {self.controllers}" if self.controllers else "")
        )


def require_work(placement: Placement) -> None:
    """Raise ConfigError for a layout in which a shard would own nothing, and so only cost memory and ports."""
    spec, layout = placement.spec, placement.layout
    most_stages = min(layout.pp, spec.layers)
    widths = [placement.stage_width(stage) for stage in range(most_stages)]
    idle = layout.width - sum(min(layout.ep, width) for width in widths)
    if idle:
        raise ConfigError(
            f"--layout: got {layout}, in which {idle} of {layout.width} shards would own nothing; expected, for "
            f"{spec.name}, at most pp{spec.layers} (its layers) and, with pp{most_stages}, at most ep{min(widths)} "
            "(the experts of a layer, or the dense sites of a stage): give fewer shards"
        )
