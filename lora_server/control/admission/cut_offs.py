"""Draining versions: until when clients may hold one, which clients keep one for good, and which can be dropped."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from lora_server.clock import Clock
from lora_server.control.adapters.catalog import AdapterCatalog
from lora_server.control.adapters.records import split_version
from lora_server.control.admission.holds import ClientHolds
from lora_server.errors import UnknownAdapterError

MergedIn = Callable[[str], Collection[int]]  # the clients whose base weights contain a version


class CutOffs:
    """The deadlines of draining versions, by handle. Used under `AdmissionService`'s lock."""

    def __init__(self, catalog: AdapterCatalog, holds: ClientHolds, clock: Clock, merged_in: MergedIn) -> None:
        self._catalog, self._holds, self._clock, self._merged_in = catalog, holds, clock, merged_in
        self._until: dict[int, float] = {}

    def begin(self, deadlines: Mapping[int, float]) -> None:
        """Set the deadlines of what drains, in seconds since 1970. The first of a handle stays."""
        since_1970 = self._clock.time() - self._clock.now()
        for handle in deadlines.keys() & set(self._catalog.marks.pinned_and_draining()[1]):
            self._until.setdefault(handle, deadlines[handle] - since_1970)

    def over(self) -> list[int]:
        """Return the handles past their deadline."""
        return [handle for handle, until in self._until.items() if until <= self._clock.now()]

    def forget(self, handle: int) -> None:
        """Forget a handle that is dropped."""
        self._until.pop(handle, None)

    def keepers(self, handle: int) -> set[int]:
        """Return the clients that keep a version after its deadline: it is in their base weights, and they hold it, or
        have not said yet what they hold. Without it they cannot serve any other adapter, nor the base model."""
        record = self._catalog.by_handle(handle)
        if record is None:
            return set()
        holders, unknown = self._holds.by_client(handle), self._holds.is_unknown
        return {client for client in self._merged_in(record.version) if client in holders or unknown(client)}

    def unused(self, draining: Collection[int], waiting: Iterable[tuple[str, ...]]) -> Iterator[int]:
        """Yield the draining versions that no client holds, nor awaits in a ticket of these names, or may after their
        deadline. Each is looked at when it is asked for: what is done with one may release another."""
        unknown, awaited = self._holds.any_unknown(), self._awaited(waiting) if draining else ()
        over = set(self.over())
        for handle in draining:
            held = unknown or self._holds.by_client(handle) or handle in awaited
            if not (self.keepers(handle) if handle in over else held):
                yield handle

    def _awaited(self, waiting: Iterable[tuple[str, ...]]) -> set[int]:
        """Return the versions that tickets wait for by NAME@DIGEST."""
        awaited = set()
        for name in {one for names in waiting for one in names if split_version(one)[1]}:
            with contextlib.suppress(UnknownAdapterError):  # the ticket's answer
                awaited.add(self._catalog.named(name).handle)
        return awaited
