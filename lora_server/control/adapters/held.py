"""Adapters as clients use them: found, held, waited for, let go."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from lora_server.control.adapters.refusals import Refusal
from lora_server.control.adapters.registry import Record
from lora_server.control.adapters.resolver import Resolver
from lora_server.control.adapters.told import ToldAdapters
from lora_server.control.admission.admission import Queued

Place = tuple[str, int]  # name, handle
CheckInUse = Callable[[set[str]], None]  # of the names that clients hold, or wait for


class Listing(NamedTuple):
    """An adapter as users see it."""

    record: Record
    state: str  # remote, disk, host, loading, ready, failed, draining
    resident_layers: int
    layers: int  # of the model
    error: str
    holders: int
    warnings: tuple[str, ...]


class HeldAdapters(ToldAdapters):
    """Thread-safe. `resolver` brings in names that nobody registered, where there is one."""

    resolver: Resolver | None = None

    # -- what there is

    def listings(self) -> list[Listing]:
        """Every adapter, by name."""
        with self._lock:
            return [self._listing(one) for one in sorted(self._registry.records(), key=lambda record: record.name)]

    def after(
        self, place: Place, most: int, sees: Callable[[str], bool] = lambda name: True
    ) -> list[tuple[Place, Listing | Refusal]]:
        """The next ones, by name and handle; refusals of names for which nothing is served are there with handle 0."""
        with self._lock:
            records = {(one.name, one.handle): one for one in self._registry.records()}
            served = {name for name, _ in records}
            found = records | {(one.name, 0): one for one in self._refusals.listed() if one.name not in served}
            places = heapq.nsmallest(most, (one for one in found if one > place and sees(one[0])))
            return [(one, self._entry(found[one])) for one in places]

    def _entry(self, one: Record | Refusal) -> Listing | Refusal:
        return self._listing(one) if isinstance(one, Record) else one

    @property
    def num_warned(self) -> int:
        """Adapters with a warning."""
        with self._lock:
            return sum(bool(one.warnings or self._said(one)) for one in self._registry.records())

    def get(self, name: str, brings: bool = False) -> Listing:
        """One listed adapter; UnknownAdapterError says why there is none, ServerBusyError that it is being brought."""
        self._bring([name] if brings else ())
        with self._lock:
            self._require_settled()
            return self._listing(self._registry.get(name))

    def by_shard(self, name: str) -> list[tuple[int, int, int, int, bool]]:
        """How far each shard is with a listed adapter: see Residency."""
        with self._lock:
            return self._residency.by_shard(self._registry.get(name).handle)

    def held(self, client: int) -> list[str]:
        """Names of what a client holds."""
        with self._lock:
            records = (self._registry.by_handle(handle) for handle in self._holds.of(client))
            return sorted(record.name for record in records if record is not None)

    def listed(self, names: Iterable[str]) -> list[str]:
        """Which of these are adapters."""
        with self._lock:
            return [name for name in names if self._registry.find(name) is not None]

    def known(self, names: Iterable[str]) -> list[str]:
        """Which of these are adapters, or were refused or removed."""
        with self._lock:
            return [name for name in names if self._registry.find(name) or self._refusals.get(name)]

    def name_of(self, handle: int) -> str | None:
        """Whose handle it is."""
        record = self._registry.by_handle(handle)
        return record.name if record is not None else None

    def _names_in_use(self) -> set[str]:
        """Of all that clients hold, or wait for: what waits is held as soon as there is room."""
        records = map(self._registry.by_handle, self._holds.handles())
        return {record.name for record in records if record is not None} | self.admission.names_waiting()

    def refused(self) -> list[Refusal]:
        """Adapters of --adapters that were refused, by name; some serve on with earlier content."""
        with self._lock:
            return self._refusals.listed()

    def __len__(self) -> int:
        return len(self._registry.records())

    def _listing(self, record: Record) -> Listing:
        handle = record.handle
        state = self._residency.state(handle, self._unasked.is_brought(handle))
        state = state if self._is_wanted(record) else "draining"
        layers, error = self._residency.num_layers(handle), self._residency.of(handle).error
        warnings = (*record.warnings, *self._said(record))
        return Listing(record, state, layers, self._spec.layers, error, self._holds.count(handle), warnings)

    def _said(self, record: Record) -> list[str]:
        """Why other content is not served under its name."""
        if not self._registry.is_listed(record):
            return []
        refusal, attempt = self._refusals.get(record.name), self._attempts.why(record.name)
        return [why for why in (refusal.reason if refusal is not None else "", attempt) if why]

    # -- holds

    def acquire(
        self,
        client: int,
        names: Sequence[str],
        ticket: int = 0,
        tenant: str = "",
        weight: float = 1.0,
        check: CheckInUse | None = None,
    ) -> tuple[list[Record], Queued | None]:
        """Hold all of `names`, or be queued for them; raises UnknownAdapterError, or why one failed to load,
        ServerBusyError while one is being brought. `check` raises where there may not be more in use."""
        self._bring(names)
        with self._lock:
            self._require_settled()
            if check is not None:
                check(self._names_in_use())
            self._try_failed_again(names)
            answer = self.admission.acquire(client, ticket, names, tenant, weight)
            queued = answer if isinstance(answer, Queued) else None
            handles = self._resolve(names) if isinstance(answer, Queued) else answer
            records = [record for handle in handles if (record := self._registry.by_handle(handle)) is not None]
            for record in records if queued is not None else ():
                if self._room.unmeasured([record.handle]) is not None:  # it is looked at before the others
                    self._load_everywhere(record, eager=False)
            return records, queued

    def _bring(self, names: Iterable[str]) -> None:
        if self.resolver is None:
            return
        with self._lock:
            self._require_settled()
            known = self._registry.find, self._refusals.get
            unknown = sorted(name for name in set(names) if not any(find(name) for find in known))
        for name in unknown:
            self.resolver.ask(name)

    def _try_failed_again(self, names: Iterable[str]) -> None:
        """Why a shard could not read its files may be over; whoever asks next is told."""
        for record in filter(None, map(self._registry.find, set(names))):
            if self._residency.of(record.handle).error:
                self._load_everywhere(record, eager=False)

    def wait_admitted(self, client: int, tickets: Collection[int], seconds: float) -> list[int]:
        """Until one of these does not wait any more, but no longer than that: those that do not."""

        def decided() -> list[int]:
            return [ticket for ticket in tickets if not self.admission.is_queued(client, ticket)]

        with self._admitted:
            return self._clock.wait_for(self._admitted, decided, seconds)

    def drain(self, reason: str, seconds: float) -> int:
        """Nobody is admitted for this reason, '' for none; the number of adapters that are held still, after so long
        at most."""
        with self._admitted:
            self.admission.paused = reason
            self._admit()
            if reason:
                self._clock.wait_for(self._admitted, lambda: not self._num_held(), seconds)
            return self._num_held()

    def _num_held(self) -> int:
        return len(self._holds.handles()) or int(self._holds.anybody_unknown())

    def settle_tickets(self, client: int, tickets: Iterable[int]) -> None:
        """The client has their answers."""
        with self._lock:
            self.admission.settle(client, tickets)

    def cancel(self, client: int, tickets: Iterable[int]) -> None:
        """Nobody wants what these asked for."""
        with self._lock:
            self.admission.cancel(client, tickets)
            self._collect()

    def release(self, client: int, handles: Iterable[int]) -> None:
        """Let go."""
        with self._lock:
            self.admission.release(client, handles)
            self._collect()

    def holds(self, client: int, handles: Iterable[int]) -> set[int]:
        """Which of these a client holds."""
        with self._lock:
            return {handle for handle in handles if self._holds.has(client, handle)}

    def forget_client(self, client: int) -> None:
        """A client is gone."""
        with self._lock:
            self.admission.forget_client(client)
            self._collect()

    def presume(self, handles: Iterable[int]) -> None:
        """A shard was told by an earlier controller that clients hold these."""
        with self._lock:
            self.admission.presume(handles)

    def expect(self, client: int) -> None:
        """A client of an earlier controller will say what it holds; until then nothing is given up."""
        with self._lock:
            self._holds.expect(client)

    def is_unknown(self, client: int) -> bool:
        """Whether a client still has to say what it holds."""
        with self._lock:
            return self._holds.is_unknown(client)

    def restore(self, client: int, handles: Iterable[int]) -> None:
        """It says so; what was taken from it meanwhile is gone."""
        with self._lock:
            self.admission.restore(client, [one for one in handles if self._registry.by_handle(one) is not None])
            self._collect()
