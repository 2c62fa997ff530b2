"""The nodes that are connected. Each runs its share of the shards of the layouts that the controller names: of one, and
of two while the server is resized."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from lora_server.control.members.agreement import Agreement
from lora_server.errors import ConfigError
from lora_server.placement import Layout, share

LOST = "its connection to the controller ended: see its log"


class NodeConnection(NamedTuple):
    """A stream to a node. `changed` is called when there are other layouts to send, or the stream is to end."""

    rank: int
    changed: Callable[[], object]


class NodeTable:
    """The nodes of a server, and the layouts that they run. Thread-safe.

    What a rank's shards may do is decided by their own claims, so a rank may be connected twice for a while.
    """

    def __init__(self, agreement: Agreement, count: int = 1) -> None:
        """`agreement`: of the controller's flags, which every node has to be started with; `count`: of nodes."""
        self.agreement, self.count = agreement, count
        self.layouts: Mapping[int, str] = {agreement.generation: str(agreement.layout)}  # by placement generation
        self.closed = False
        self._connections: list[NodeConnection] = []
        self._failures: dict[tuple[int, int], str] = {}  # why a rank cannot run its shards of a generation
        self._lock = threading.Lock()

    def check(self, rank: int, digest: str) -> None:
        """Raise ConfigError if a node's flags have another digest."""
        if digest != self.agreement.digest():
            raise ConfigError(
                f"node {rank}: started with other settings than the controller's ({self.agreement.describe()}); start "
                "every node with the same model and flags"
            )

    def connect(self, rank: int, changed: Callable[[], object]) -> NodeConnection:
        """Add a stream to a node."""
        connection = NodeConnection(rank, changed)
        with self._lock:
            self._connections.append(connection)
        return connection

    def disconnect(self, connection: NodeConnection) -> None:
        """Remove a stream that ended. Until `run` names other layouts its node counts as failed."""
        with self._lock:
            self._connections.remove(connection)
            if connection.rank not in self._ranks():
                self._failures |= {(generation, connection.rank): LOST for generation in self.layouts}

    def run(self, layouts: Mapping[int, str]) -> None:
        """Have every node run its shards of these layouts, by the generation of their placement, and no others."""
        with self._lock:
            self.layouts = dict(layouts)
            self._failures = {key: reason for key, reason in self._failures.items() if key[0] in layouts}
        self._notify()

    def fail(self, rank: int, generation: int, reason: str) -> None:
        """Note that a node cannot run its shards of a generation."""
        with self._lock:
            if generation in self.layouts:
                self._failures[generation, rank] = reason

    def failure(self, placed: Agreement) -> str:
        """Return which node cannot run its shards of a placement, and why; empty while each may."""
        with self._lock:
            reasons = {rank: self._failures.get((placed.generation, rank), "") for rank in range(self.count)}
        return next(
            (f"node {rank}: {why}" for rank, why in reasons.items() if why and self._of(placed.layout, rank)), ""
        )

    def where(self, layout: Layout, shards: Collection[int]) -> str:
        """Say on which nodes these shards of a layout are, and which of the nodes are not connected."""
        with self._lock:
            connected = self._ranks()
        found = []
        for rank in range(self.count):
            if own := [shard for shard in self._of(layout, rank) if shard in shards]:
                found.append(f"shards {own} on node {rank}{'' if rank in connected else ', which is not connected'}")
        return "; ".join(found)

    def close(self) -> None:
        """End all streams, since the server stops."""
        self.closed = True
        self._notify()

    def _notify(self) -> None:
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.changed()

    def _ranks(self) -> set[int]:
        return {connection.rank for connection in self._connections}

    def _of(self, layout: Layout, rank: int) -> range:
        return share(layout.num_shards, self.count, rank)
