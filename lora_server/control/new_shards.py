"""The shards of the layout that a server is resized to, until they serve: whether they are up and have loaded."""

from __future__ import annotations

from collections.abc import Collection

from lora_server.control.adapters.server_adapters import ServerAdapters
from lora_server.control.members.agreement import Agreement
from lora_server.control.members.nodes import NodeTable
from lora_server.control.sync.shard_sync import ShardSync
from lora_server.errors import ServerUnavailableError


class NewShards:
    """The shards of one new placement. Not thread-safe: the thread of the resize uses it."""

    def __init__(self, sync: ShardSync, agreement: Agreement, adapters: ServerAdapters, nodes: NodeTable) -> None:
        self.sync, self.agreement = sync, agreement
        self._adapters, self._nodes = adapters, nodes
        self._fitting: set[int] = set()  # handles of adapters that fit, together with these pinned ones
        self._pinned: frozenset[int] = frozenset()

    def require_sound(self) -> None:
        """Raise ServerUnavailableError once a node cannot start its shards, or a shard that was up is lost."""
        if failure := self._nodes.failure(self.agreement):
            raise ServerUnavailableError(f"{self.agreement.layout} cannot be started: {failure}")
        self._require([shard for shard, rank in self.sync.shards.ranks.items() if rank.lost is not None])

    def require_up(self) -> None:
        """Raise ServerUnavailableError if a shard is not up."""
        self._require(self.missing())

    def _require(self, lost: Collection[int]) -> None:
        if lost:
            where = self._nodes.where(self.agreement.layout, lost)
            raise ServerUnavailableError(f"{self.agreement.layout}: lost {where}: see the node's log")

    def missing(self) -> list[int]:
        """Return the shards that are not up."""
        return self.sync.shards.missing()

    def require_fit(self) -> bool:
        """Raise ConfigError where what is in use and pinned does not fit, or another adapter does not. Return False
        while the shards have not measured all of them: they measure those that all shards know."""
        admission, layout = self._adapters.admission, str(self.agreement.layout)
        active, pinned = admission.active(), admission.queue.capacity.pinned
        if pinned != self._pinned:
            self._pinned, self._fitting = pinned, set()
        unchecked = [one for one in list(self.sync.spread.on_all) if one not in self._fitting]
        served = [one for one in unchecked if not self._adapters.sync.residency.error(one)]
        measured = [one for one in served if self.sync.sizes.unmeasured([one]) is None]
        if self.sync.sizes.unmeasured(active) is None:
            admission.require_fit(self.sync.sizes, active, layout)
        for handle in measured:
            admission.require_fit(self.sync.sizes, {handle}, layout)
            self._fitting.add(handle)
        return len(measured) == len(served)

    def loaded(self) -> tuple[int, int]:
        """Return how many of the adapters that are in use and loaded now are loaded on these shards, and how many there
        are."""
        wanted = [one for one in self._adapters.admission.active() if self._adapters.sync.state(one) == "ready"]
        return sum(self.sync.state(one) == "ready" for one in wanted), len(wanted)

    @property
    def is_settled(self) -> bool:
        """Whether they have loaded all that fits."""
        with self.sync.lock:
            return self.sync.prewarm.is_settled
