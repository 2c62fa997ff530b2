"""Holds: how often each client holds each adapter. This is the authority; shards and engines get copies.

After a restart of the controller, a client's holds are unknown until the client reports them again.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Set


class ClientHolds:
    """Counts the clients' holds by handle. Thread-safe; changed only under `AdmissionService`'s lock.

    While the holds of any client are unknown, every adapter counts as held.

    `changed(handle, more)` counts every hold that begins, or ends.
    """

    def __init__(self, changed: Callable[[int, int], object] = lambda handle, more: None) -> None:
        self._changed = changed
        self._holders: dict[int, Counter[int]] = {}  # handle -> client -> times acquired
        self._unknown: set[int] = set()
        self._presumed: set[int] = set()  # held when an earlier controller was last heard
        self._in_use: set[int] = set()  # of both
        self._moved: set[int] = set()  # into it, or out of it, since `in_use`
        self._lock = threading.RLock()

    def acquire(self, client: int, handles: Iterable[int]) -> set[int]:
        """Count one more hold of each; return the handles that the client did not hold before."""
        more = set()
        with self._lock:
            for handle in handles:
                holders = self._holders.setdefault(handle, Counter())
                if not holders:
                    self._in_use.add(handle)
                    self._moved.add(handle)
                if client not in holders:
                    more.add(handle)
                holders[client] += 1
                self._changed(handle, 1)
        return more

    def release(self, client: int, handles: Iterable[int]) -> set[int]:
        """Count one hold less each, ignoring what is not held; return which the client does not hold any more."""
        fewer = set()
        with self._lock:
            for handle in handles:
                holders = self._holders.get(handle)
                if holders is None or client not in holders:
                    continue
                holders[client] -= 1
                self._changed(handle, -1)
                if not holders[client]:
                    fewer.add(handle)
                    self._end(handle, client)
        return fewer

    def forget_client(self, client: int) -> None:
        """Remove a client that is gone."""
        with self._lock:
            self._unknown.discard(client)
            for handle in self.of(client):
                self._changed(handle, -self._holders[handle][client])
                self._end(handle, client)

    # -- after a restart of the controller

    def expect(self, client: int) -> None:
        """Add a client of an earlier controller: it has to say what it holds."""
        with self._lock:
            self._unknown.add(client)

    def presume(self, handles: Iterable[int]) -> None:
        """Count these as in use until all clients of the earlier controller have said what they hold."""
        with self._lock:
            self._presumed.update(handles)
            self._in_use |= self._presumed
            self._moved |= self._presumed

    def is_unknown(self, client: int) -> bool:
        """Return whether a client still has to say what it holds."""
        return client in self._unknown

    def restore(self, client: int, handles: Iterable[int]) -> None:
        """Take what a client says that it holds; what it acquired meanwhile is among it."""
        with self._lock:
            self._unknown.discard(client)
            for handle, times in Counter(handles).items():
                self.acquire(client, [handle] * (times - self.by_client(handle)[client]))

    # -- queries

    def handles(self) -> set[int]:
        """Return all that a client holds, as far as is known."""
        with self._lock:
            return set(self._holders)

    def in_use(self) -> tuple[Set[int], set[int]]:
        """Return all that a client holds or may hold, in a set that changes with the holds, and what came into it or
        left it since the last call. A presumption ends once every client has spoken."""
        with self._lock:
            if self._presumed and not self._unknown:
                self._in_use -= self._presumed - self._holders.keys()
                self._moved |= self._presumed
                self._presumed = set()
            moved, self._moved = self._moved, set()
            return self._in_use, moved

    def any_unknown(self) -> bool:
        """Return whether a client still has to say what it holds."""
        return bool(self._unknown)

    def by_client(self, handle: int) -> Counter[int]:
        """Return how often each client acquired an adapter and did not release it, as far as is known."""
        with self._lock:
            return Counter(self._holders.get(handle, {}))

    def of(self, client: int, among: Iterable[int] | None = None) -> set[int]:
        """Return what a client holds, or which of these, as far as is known."""
        with self._lock:
            return {one for one in (self._holders if among is None else among) if client in self._holders.get(one, ())}

    def clients(self) -> set[int]:
        """Return the clients that hold something."""
        with self._lock:
            return {client for holders in self._holders.values() for client in holders}

    def _end(self, handle: int, client: int) -> None:
        """Remove a client from an adapter's holders."""
        holders = self._holders[handle]
        del holders[client]
        if not holders:
            del self._holders[handle]
            if handle not in self._presumed:
                self._in_use.discard(handle)
                self._moved.add(handle)
