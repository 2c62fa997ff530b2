"""Clients and the twins of their shards: a client that lost its connection to one may have another to its twin."""

from __future__ import annotations

import threading
from collections.abc import Collection

from lora_server.control.members.leases import Leases
from lora_server.control.members.shards import ShardHandle, ShardTable, twins_up
from lora_server.wire import lora_server_pb2 as pb


class TwinConnections:
    """The connections that clients have lost, by the generation of the placement and the shard. Thread-safe; its lock
    is a leaf."""

    def __init__(self, leases: Leases, shards: ShardTable) -> None:
        self._leases, self._shards = leases, shards
        self._parted: dict[int, tuple[int, set[int]]] = {}  # a generation, and shards of it, by client
        self._lock = threading.Lock()

    def part(self, handle: ShardHandle, client: int) -> bool:
        """Note that a client's connection to a shard ended; return whether it has none to a twin that is up. A shard of
        a placement that does not serve counts for nothing: after a resize its number is another's."""
        if (up := twins_up(self._shards, handle)) is None:
            return False
        generation = handle.generation
        with self._lock:
            of, parted = self._parted.get(client, (generation, set()))
            parted = (parted if of == generation else set()) | {handle.shard}
            self._parted[client] = generation, parted
            return parted.issuperset(up)

    def offer(self, client: int, lacking: Collection[int], generation: int) -> list[ShardHandle]:
        """Return those that are up, of the shards of a generation that a client says it has no connection to."""
        with self._lock:
            of, parted = self._parted.get(client, (generation, set()))
            if of == generation:
                parted.intersection_update(lacking)
        live = self._shards.live()
        return [live[shard] for shard in lacking if shard in live and live[shard].generation == generation]

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
