"""The catalog as users see it: each adapter with its state on the shards, its holders and what is wrong with it."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from lora_server.control.adapters.catalog import AdapterCatalog, name_of
from lora_server.control.adapters.places import ListPlace
from lora_server.control.adapters.records import Record
from lora_server.control.adapters.refusals import RefusedAdapter, UpdateFailures
from lora_server.control.admission.service import AdmissionService
from lora_server.control.sync.shard_sync import ShardSync
from lora_server.registry.versions import Version


class Listing(NamedTuple):
    """An adapter as users see it."""

    record: Record
    state: str  # remote, disk, host, loading, ready, failed, draining
    resident_layers: int
    layers: int  # of the model
    error: str
    holders: int
    warnings: tuple[str, ...]
    slo_class: str


class AdapterListings:
    """Lists adapters from what several objects know. It has no state and no lock, so an answer may span a change."""

    def __init__(
        self,
        catalog: AdapterCatalog,
        sync: ShardSync,
        admission: AdmissionService,
        failures: UpdateFailures,
        layers: int,
    ) -> None:
        """`layers`: of the model."""
        self._catalog, self._sync, self._failures, self._layers = catalog, sync, failures, layers
        self._holds, self._classes = admission.holds, admission.classes

    def all(self) -> list[Listing]:
        """Return every adapter, by name."""
        return [self._listing(one) for one in sorted(self._catalog.records(), key=lambda record: record.name)]

    def after(
        self, place: ListPlace, most: int, sees: Callable[[str], bool] = lambda name: True
    ) -> list[tuple[ListPlace, Listing | RefusedAdapter]]:
        """Return up to `most` listings after `place`, sorted by name and handle. A refusal is listed, with handle 0, if
        no version of its name is served."""
        catalog = self._catalog
        refused = {(one.name, 0): one for one in catalog.refusals.listed() if not catalog.order.has(one.name)}
        following = heapq.merge(catalog.order.after(place), sorted(one for one in refused if one > place))
        found = list[tuple[ListPlace, Listing | RefusedAdapter]]()
        for one in following:
            record = catalog.by_handle(one[1])
            if sees(one[0]) and (one in refused or record is not None):
                found.append((one, refused[one] if record is None else self._listing(record)))
            if len(found) == most:
                break
        return found

    def hottest(self, ended: Mapping[str, int], most: int) -> list[Listing]:
        """Return the adapters in most demand: by clients that hold them, then by holds that have `ended`, by name, then
        by layers that are resident."""
        residency, known = self._sync.residency, self._sync.spread.on_all
        holders = {handle: len(self._holds.by_client(handle)) for handle in self._holds.handles()}

        def demand(record: Record) -> tuple[int, int]:
            return holders.get(record.handle, 0), ended.get(record.name, 0)

        def heat(record: Record) -> tuple[int, int, int]:
            return *demand(record), residency.num_layers(record.handle)

        records = self._catalog.records()
        hot = [one for one in records if any(demand(one))]
        others = (one for one in records if one.handle in known and not any(demand(one)))
        hot += heapq.nlargest(max(0, most - len(hot)), others, key=heat)
        hot += [one for one in records if one.handle not in known][: max(0, most - len(hot))]
        return [self._listing(one) for one in heapq.nlargest(most, hot, key=heat)]

    def states(self) -> Counter[str]:
        """Count adapters by state."""
        return Counter(map(self._state, self._catalog.records()))

    def tenants(self, owner: Callable[[str], str]) -> dict[str, tuple[int, int]]:
        """Return, by tenant, how many adapters it has, and how many of them clients hold."""
        held, total, in_use = self._holds.handles(), Counter[str](), Counter[str]()
        for record in self._catalog.records():
            tenant = owner(record.name)
            total[tenant] += 1
            in_use[tenant] += record.handle in held
        return {tenant: (total[tenant], in_use[tenant]) for tenant in total}

    def get(self, name: str) -> Listing:
        """Return one listed adapter. Raises UnknownAdapterError, which says why there is none."""
        self._catalog.start.require_settled()
        return self._listing(self._catalog.get(name))

    def by_shard(self, name: str) -> list[tuple[int, int, int, int, bool]]:
        """Return how far each shard is with a listed adapter, see ResidencyTable."""
        return self._sync.residency.by_shard(self._catalog.get(name).handle)

    def versions(self, name: str) -> list[Version]:
        """Return what the name means, and what it meant before, the last first. Raises UnknownAdapterError."""
        self._catalog.start.require_settled()
        return self._catalog.ledger.versions(self._catalog.get(name))

    def held(self, client: int) -> list[str]:
        """Return the names of what a client holds."""
        names = (name_of(self._catalog, handle) for handle in self._holds.of(client))
        return sorted(name for name in names if name is not None)

    def known(self, names: Iterable[str]) -> list[str]:
        """Return which of these are adapters, or were refused or removed."""
        return [name for name in names if self._catalog.find(name) or self._catalog.refusals.get(name)]

    @property
    def num_warned(self) -> int:
        """Return the number of adapters with a warning."""
        records, not_served = self._catalog.records(), self._catalog.refusals.names() | self._failures.names()
        return sum(bool(one.warnings or (one.name in not_served and self._not_served(one))) for one in records)

    def _listing(self, record: Record) -> Listing:
        handle, residency = record.handle, self._sync.residency
        layers, error = residency.num_layers(handle), residency.error(handle)
        warnings = (*record.warnings, *self._not_served(record))
        holders, slo_class = len(self._holds.by_client(handle)), self._classes.shown(record)
        return Listing(record, self._state(record), layers, self._layers, error, holders, warnings, slo_class)

    def _state(self, record: Record) -> str:
        return self._sync.state(record.handle) if self._catalog.is_wanted(record) else "draining"

    def _not_served(self, record: Record) -> list[str]:
        """Return why newer content is not served under its name."""
        if not self._catalog.is_listed(record):
            return []
        refusal, failure = self._catalog.refusals.get(record.name), self._failures.why(record.name)
        return [why for why in (refusal.reason if refusal is not None else "", failure) if why]
