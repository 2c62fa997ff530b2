"""The TCP ports of shards and leaders with --data-port-base. Leaf module.

The ports are consecutive: one per shard for data, then one per stage for its leader's orders.
Shards are counted over the whole server, so that nodes on one host use different ports.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from lora_server.placement import Layout

HIGHEST = 65535


class TcpPort(NamedTuple):
    """A port to listen on. `number` 0: any free one."""

    number: int
    owner: str


ANY_PORT = TcpPort(0, "")


@dataclass(frozen=True)
class DataPorts:
    """The ports of one server. `base` None: the system picks free ones."""

    base: int | None
    layout: Layout

    def data(self, shard: int) -> TcpPort:
        """Return a shard's port, for the steps of clients on other hosts."""
        return self._port(shard, f"the data of shard {shard}")

    def orders(self, stage: int) -> TcpPort:
        """Return the port of a stage's leader; used only with --coordination leader."""
        return self._port(self.layout.num_shards + stage, f"the orders of stage {stage}")

    def span(self) -> range:
        """Return all ports, those of data first; empty without a base."""
        return range(self.base, self.base + self.layout.num_shards + self.layout.pp) if self.base else range(0)

    def _port(self, offset: int, owner: str) -> TcpPort:
        return TcpPort(self.base + offset, owner) if self.base else ANY_PORT
