"""The shards of the layout that a server is resized to, until they serve: whether they are up and have loaded."""

from __future__ import annotations

from collections.abc import Collection

from lora_server.control.adapters.catalog import name_of
from lora_server.control.adapters.server_adapters import ServerAdapters
from lora_server.control.admission.service import MOST_NAMED
from lora_server.control.members.agreement import Agreement
from lora_server.control.members.nodes import NodeTable
from lora_server.control.sync.shard_sync import ShardSync
from lora_server.errors import AdapterLoadError, ConfigError, ServerUnavailableError


class NewShards:
    """The shards of one new placement. Not thread-safe: the thread of the resize uses it."""

    def __init__(self, sync: ShardSync, agreement: Agreement, adapters: ServerAdapters, nodes: NodeTable) -> None:
        self.sync, self.agreement = sync, agreement
        self._adapters, self._nodes = adapters, nodes
        self._fitting: set[int] = set()  # handles of adapters that fit, together with these pinned ones
        self._fitting_batches: set[frozenset[int]] = set()  # likewise, of those that requests wanted together
        self._pinned: frozenset[int] = frozenset()
        self.unchecked: list[int] = []  # handles that `require_fit` is to check once they are measured

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

    def crowded(self) -> ConfigError | None:
        """Return why the adapters that are in use, as far as they are measured here, do not fit together; None where
        they do. Their requests end, so they may fit later."""
        return self._unfit(self._adapters.admission.active())

    def _unfit(self, handles: Collection[int]) -> ConfigError | None:
        """Return why those of these adapters that are measured here do not fit together; None where they do."""
        sizes = self.sync.sizes
        measured = {one for one in handles if sizes.unmeasured([one]) is None}
        return self._adapters.admission.unfit(sizes, measured, str(self.agreement.layout))

    def require_fit(self, is_late: bool = False) -> None:
        """Check what these shards have measured: with the pinned adapters each other one, and those that a request
        wanted together. `unchecked` are those that they are still to measure.

        An adapter that is not in use is left out while a node lacks its files, or where it fails on the serving shards
        as well; and `is_late`, if its shards have looked at it: its files were elsewhere then. Raises ConfigError where
        any does not fit, AdapterLoadError where any other cannot be loaded here.
        """
        admission, sizes, layout = self._adapters.admission, self.sync.sizes, str(self.agreement.layout)
        active, pinned = admission.active(), admission.queue.capacity.pinned
        if pinned != self._pinned:
            self._pinned, self._fitting, self._fitting_batches = pinned, set(), set()
        for batch in {pinned, *admission.batches()} - self._fitting_batches:
            if unfit := self._unfit(batch):
                raise ConfigError(f"{unfit} (pinned, or wanted together by a request of the last hour)")
            if sizes.unmeasured(batch) is None:
                self._fitting_batches.add(batch)
        self.unchecked = []
        for handle in [one for one in list(self.sync.spread.on_all) if one not in self._fitting]:
            if reason := self.sync.residency.error(handle):
                if handle in active or not self._adapters.sync.residency.error(handle):
                    raise AdapterLoadError(
                        f"{layout}: adapter {name_of(self._adapters.catalog, handle)} cannot be loaded there, so that "
                        f"its fit is unknown: {reason}; mend or remove it, or unpin it if no request uses it"
                    )
            elif sizes.unmeasured([handle]) is None and self.sync.residency.files(handle).opened:
                if unfit := admission.unfit(sizes, {handle}, layout):
                    raise unfit
                self._fitting.add(handle)
            elif handle in active or not self._is_elsewhere(handle, is_late):
                self.unchecked.append(handle)

    def _is_elsewhere(self, handle: int, is_late: bool) -> bool:
        residency = self.sync.residency
        return residency.files(handle).remote or (is_late and residency.state(handle) == "disk")  # all have looked

    def loaded(self) -> tuple[int, int]:
        """Return how many of the adapters that are in use and loaded now are loaded on these shards, and how many there
        are."""
        wanted = self._wanted()
        return sum(self.sync.state(one) == "ready" for one in wanted), len(wanted)

    def _wanted(self) -> list[int]:
        return [one for one in self._adapters.admission.active() if self._adapters.sync.state(one) == "ready"]

    def awaited(self) -> str:
        """Say which adapters these shards have not measured, or loaded, and why the last load of one failed."""
        lacking = [one for one in self._wanted() if self.sync.state(one) != "ready"]
        handles = sorted({*self.unchecked, *lacking})
        if not handles:
            return ""
        names = [name_of(self._adapters.catalog, one) or str(one) for one in handles[:MOST_NAMED]]
        reasons = (self.sync.residency.error(one, last_load=True) for one in handles)
        reason = next(filter(None, reasons), "")
        more = f" and {len(handles) - len(names)} others" if len(handles) > len(names) else ""
        return f"; not loaded are {', '.join(names)}{more}" + (f": {reason}" if reason else "")

    @property
    def is_settled(self) -> bool:
        """Whether they have loaded all that fits."""
        with self.sync.lock:
            return self.sync.prewarm.is_settled
