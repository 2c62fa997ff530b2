"""Holds: how often each client holds each adapter. This is the authority; shards and engines get copies, by updates.

After a restart of the controller, a client's holds are unknown until the client reports them again.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from lora_server import telemetry
from lora_server.wire import lora_server_pb2 as pb


class ClientHolds:
    """Counts the clients' holds by handle. Thread-safe; changed only under `AdmissionService`'s lock.

    While the holds of any client are unknown, every adapter counts as held.

    `changed(handle, more)` counts every hold that begins, or ends.
    """

    def __init__(self, changed: Callable[[int, int], object] = lambda handle, more: None) -> None:
        self._changed = changed
        self._holders: dict[int, Counter[int]] = {}  # handle -> client -> times acquired
        self._clients: set[int] = set()  # clients that hold an adapter, or held one
        self._unknown: set[int] = set()
        self._presumed: set[int] = set()  # held when an earlier controller was last heard
        self._in_use: set[int] = set()  # of both
        self._moved: set[int] = set()  # into it, or out of it, since `in_use`
        self._lock = threading.RLock()

    def acquire(self, client: int, handles: Iterable[int]) -> set[int]:
        """Count one more hold of each; return the handles that the client did not hold before."""
        more = set()
        with self._lock:
            self._clients.add(client)
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
            self._clients.discard(client)
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
            self._clients.add(client)
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

    def of_clients(self) -> dict[int, set[int]]:
        """Return the adapters of each client that holds one, or held one: a shard that was disconnected may have missed
        that the client released them."""
        with self._lock:
            found: dict[int, set[int]] = {client: set() for client in self._clients}
            for handle, holders in self._holders.items():
                for client in holders:
                    found[client].add(handle)
            return found

    def _end(self, handle: int, client: int) -> None:
        """Remove a client from an adapter's holders."""
        holders = self._holders[handle]
        del holders[client]
        if not holders:
            del self._holders[handle]
            if handle not in self._presumed:
                self._in_use.discard(handle)
                self._moved.add(handle)


class SetChange:
    """The difference between two states of a set: an element that comes and goes again is none."""

    def __init__(self) -> None:
        self.more: set[int] = set()
        self.fewer: set[int] = set()

    def add(self, more: Iterable[int], fewer: Iterable[int]) -> None:
        """Add what came, and what went."""
        for gained, lost, changed in ((self.more, self.fewer, more), (self.fewer, self.more, fewer)):
            for one in changed:
                if one in lost:
                    lost.remove(one)
                else:
                    gained.add(one)

    def __bool__(self) -> bool:
        return bool(self.more or self.fewer)


class HoldUpdates:
    """Collects which adapters became active and held, until it is flushed. Not thread-safe, but for `together`:
    `AdmissionService` has the lock, which is this one.

    What only ended is sent with the next that began, or within a second: a message to 256 shards is dear, and until
    then a shard only keeps an adapter longer than it must. See `AdmissionService.tell_ended`.
    """

    def __init__(self, send: Callable[[pb.ShardCommand], object], lock: AbstractContextManager[Any]) -> None:
        self._send, self._lock = send, lock
        self._active, self._trace = SetChange(), telemetry.NOTHING
        self._held: dict[int, SetChange] = {}  # by client
        self._local = threading.local()

    def held(self, client: int, more: Iterable[int] = (), fewer: Iterable[int] = ()) -> None:
        """Note what a client holds now, and did not before, and the reverse."""
        self._held.setdefault(client, SetChange()).add(more, fewer)

    def active(self, more: Iterable[int], fewer: Iterable[int], trace: Mapping[str, str]) -> None:
        """Note which adapters became active, and inactive; `trace` is that of the request that caused it."""
        self._active.add(more, fewer)
        self._trace = (trace or self._trace) if self._active.more else telemetry.NOTHING

    def forget_client(self, client: int) -> None:
        """Forget what a client holds: it is revoked at the shards."""
        self._held.pop(client, None)

    def restored(self, client: int, held: Iterable[int]) -> None:
        """Tell shards all that a client of an earlier controller holds."""
        self._held.pop(client, None)
        self._send(pb.ShardCommand(uses=pb.Uses(holds=[pb.Holds(client=client, more=held, anew=True)])))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Tell shards once, at the end, of all that this thread's calls in the block changed, as `flush` does."""
        self._local.defers = True
        try:
            yield
        finally:
            self._local.defers = False
            with self._lock:
                self.flush()

    def flush(self, now: bool = False) -> None:
        """Send what changed if an adapter came into use, or a client holds one more, unless this thread defers it; with
        `now` in any case."""
        began = bool(self._active.more) or any(change.more for change in self._held.values())
        if not now and (not began or getattr(self._local, "defers", False)):
            return
        uses = pb.Uses()
        for client, change in self._held.items():
            if change:
                uses.holds.add(client=client, more=change.more, fewer=change.fewer)
        if self._active:
            uses.active.CopyFrom(pb.Active(more=self._active.more, fewer=self._active.fewer, trace=self._trace))
        self._active, self._trace, self._held = SetChange(), telemetry.NOTHING, {}
        if uses.ByteSize():
            self._send(pb.ShardCommand(uses=uses))
