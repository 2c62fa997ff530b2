"""Which TCP port is whose with --data-port-base. Leaf module.

The ports follow each other: one per shard for data, one per stage for its leader's orders.
Shards are counted over the whole server, so that nodes on one host do not meet.
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
    """Of one server. `base` None: any free ones."""

    base: int | None
    layout: Layout

    def data(self, shard: int) -> TcpPort:
        """A shard's, for the steps of clients on other hosts."""
        return self._port(shard, f"the data of shard {shard}")

    def orders(self, stage: int) -> TcpPort:
        """A stage's leader's; used with --coordination leader alone."""
        return self._port(self.layout.num_shards + stage, f"the orders of stage {stage}")

    def span(self) -> range:
        """All of them, in this order."""
        return range(self.base, self.base + self.layout.num_shards + self.layout.pp) if self.base else range(0)

    def _port(self, offset: int, owner: str) -> TcpPort:
        return TcpPort(self.base + offset, owner) if self.base else ANY_PORT
