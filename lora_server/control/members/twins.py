"""Clients and the twins of their shards: a client that lost its connection to one may have another to its twin."""

from __future__ import annotations

import threading
from collections.abc import Collection

from lora_server.control.members.leases import Leases
from lora_server.control.members.shards import ShardHandle, ShardTable
from lora_server.wire import lora_server_pb2 as pb


class TwinConnections:
    """The connections that clients have lost, by shard. Thread-safe; its lock is a leaf."""

    def __init__(self, leases: Leases, shards: ShardTable) -> None:
        self._leases, self._shards = leases, shards
        self._parted: dict[int, set[int]] = {}  # shards, by client
        self._lock = threading.Lock()

    def part(self, shard: int, client: int) -> bool:
        """Note that a client's connection to a shard ended; return whether it has none to a twin that is up."""
        up = self._shards.live().keys() & set(self._shards.layout.twins(shard))
        with self._lock:
            parted = self._parted.setdefault(client, set())
            parted.add(shard)
            return parted.issuperset(up)

    def offer(self, client: int, lacking: Collection[int], generation: int) -> list[ShardHandle]:
        """Return those that are up, of the shards that a client says it has no connection to; none where it goes by
        another generation of the placement."""
        if generation != self._shards.generation:
            return []
        with self._lock:
            self._parted.get(client, set()).intersection_update(lacking)
        live = self._shards.live()
        return [live[shard] for shard in lacking if shard in live]

    def clear(self) -> None:
        """Forget all losses: after a resize the numbers mean other shards."""
        with self._lock:
            self._parted.clear()

    def introduce(self, handle: ShardHandle) -> None:
        """Send a shard that registered the clients that its twins serve, before anything that they hold."""
        if self._shards.layout.replicas > 1:
            for lease, _ in self._leases.silences():
                if lease.grant is not None:
                    handle.commands.send(pb.ShardCommand(grant=lease.grant))

    def forget(self, client: int) -> None:
        """Remove a client that is gone."""
        with self._lock:
            self._parted.pop(client, None)
