"""Ranks of nodes that were started with `--node-rank auto`: each is leased to one node at a time.

A node shows its lease with every renewal, so that a controller that starts learns the leases before it grants any. The
leases of a rank count up: of two nodes that claim one, the newer has it. What the shards of a rank may do is decided by
their own claims (shards.py).
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from lora_server.clock import SYSTEM, Clock
from lora_server.control.members.shards import ShardTable
from lora_server.placement import share
from lora_server.timings import Timings


class RankLease(NamedTuple):
    """A node's right to a rank. `node` is a random text that the node chose at its start."""

    node: bytes
    rank: int
    epoch: int


class RankLeases:
    """The leases of one server. Rank 0 is not leased: its node has the controller. Thread-safe."""

    def __init__(
        self,
        shards: ShardTable,
        nodes: int,
        silence_seconds: float = Timings.shard_silence,
        rest_seconds: float = Timings.rank_rest,
        clock: Clock = SYSTEM,
    ) -> None:
        """`silence_seconds`: a lease that was not renewed for so long may be another node's. No lease is granted for
        the first `rest_seconds`: meanwhile nodes that have one show it."""
        self._shards, self.nodes, self._silence_seconds, self._clock = shards, nodes, silence_seconds, clock
        self._grants_from = clock.now() + rest_seconds
        self._leases: dict[int, RankLease] = {}  # by rank
        self._heard: dict[int, float] = {}  # when the lease of a rank was last renewed
        self._lock = threading.Lock()

    def renew(self, lease: RankLease) -> bool:
        """Renew a lease, or learn it from its node. Returns False once the rank was leased to another node."""
        with self._lock:
            known = self._leases.get(lease.rank)
            if known is not None and known.node != lease.node and known.epoch >= lease.epoch:
                return False
            self._note(lease)
            return True

    def grant(self, node: bytes) -> RankLease | None:
        """Lease the lowest free rank to a node, or the one that it has; None while there is none."""
        with self._lock:
            if self._clock.now() < self._grants_from:
                return None
            for lease in self._leases.values():
                if lease.node == node and self._is_held(lease.rank):  # the answer to its first claim was lost
                    return self._note(lease)
            for rank in range(1, self.nodes):
                if self._is_free(rank):
                    older = self._leases.get(rank)
                    epoch = max(older.epoch + 1 if older is not None else 1, int(self._clock.time()))
                    return self._note(RankLease(node, rank, epoch))
            return None

    def end(self, lease: RankLease) -> None:
        """End the lease of a node that stops."""
        with self._lock:
            if self._leases.get(lease.rank) == lease:
                self._heard.pop(lease.rank, None)

    def _note(self, lease: RankLease) -> RankLease:
        self._leases[lease.rank], self._heard[lease.rank] = lease, self._clock.now()
        return lease

    def _is_held(self, rank: int) -> bool:
        heard = self._heard.get(rank)
        return heard is not None and self._clock.now() - heard <= self._silence_seconds

    def _is_free(self, rank: int) -> bool:
        if self._is_held(rank):
            return False
        for table in filter(None, (self._shards, self._shards.other)):
            serving = table.live().keys() - table.lost().keys()  # also of nodes that were given this rank
            if serving & set(share(table.layout.num_shards, self.nodes, rank)):
                return False
        return True
