"""Notifies a shard's loop of pushes, at a cost that idle clients do not raise.

The loop polls the signals of the few clients that it answered last. Every other client finds 1 in a word of its own
region, `unwatched`, and rings a bell (eventfd) of its own: so no client can hide another's push, and a ring without a
push costs the loop one check. Before the loop sleeps, all clients have to ring; the barrier that `park` describes then
makes sure that a push was seen, or rings.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import time
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

from lora_server.transport import park
from lora_server.wire import slot
from lora_server.wire.region import Region

MAX_WATCHED = 16  # clients with signals that the loop polls in each round
MAX_RINGS = 64  # heard in a round; the others have theirs in the next ones
_ONCE = select.EPOLLIN | select.EPOLLET  # each ring is heard once, and never read


def make_bell() -> int:
    """Return the descriptor of a new bell; raises OSError."""
    return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)


class Bell:
    """One end of a client's bell, which owns its descriptor. `word`: four bytes of the client's region."""

    def __init__(self, word: memoryview, fd: int) -> None:
        self.unwatched, self.fd = word.cast("I"), fd
        self._in_order = park.register()

    def ring(self) -> None:
        """Ring after a push, unless the shard polls the signal anyway. Called by the client."""
        if self.unwatched[0] or not self._in_order:
            self.unwatched[0] = 0
            with contextlib.suppress(OSError):  # it was closed; or rung 2^64 times
                os.eventfd_write(self.fd, 1)

    def close(self) -> None:
        """Close the descriptor; idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class _OfEpoch(Protocol):
    @property
    def epoch(self) -> int: ...


class Pusher(Protocol):
    """A client as the loop sees it: a Connection."""

    region: Region
    served: int
    gone: bool
    bell: Bell | None

    @property
    def grant(self) -> _OfEpoch:
        """What the controller permits it."""
        ...

    @property
    def rings(self) -> bool:
        """Return whether the client rings its bell after a push while its signal is not watched."""
        ...

    def pause(self) -> float:
        """Return for how many seconds the loop need not check its signal."""
        ...


_P = TypeVar("_P", bound=Pusher)


class Bells(Generic[_P]):
    """The bells of all clients. Any thread may call `add`, `drop` and `call`; only the loop calls the rest."""

    def __init__(self, max_watched: int = MAX_WATCHED) -> None:
        self._max_watched = max_watched
        self._epoll, self._own = select.epoll(), make_bell()
        weakref.finalize(self, os.close, self._own).atexit = False
        self._epoll.register(self._own, _ONCE)
        self._by_fd: dict[int, _P] = {}
        self._watched: dict[_P, tuple[memoryview, int]] = {}  # signal, and what it was when all was answered
        self._called: deque[_P] = deque()  # to be looked at once
        self._rang = self._parked = False
        self._sleep_seconds = park.SLEEP_SECONDS if park.register() else park.UNORDERED_SECONDS
        self._spin_seconds = park.SPIN_SECONDS

    def add(self, connection: _P) -> None:
        """Listen to a client's bell, and check once whether it has pushed already."""
        if connection.bell is not None:
            self._by_fd[connection.bell.fd] = connection
            self._epoll.register(connection.bell.fd, _ONCE)
        self.call(connection)

    def drop(self, connection: _P) -> None:
        """Stop listening to a client's bell, and close it."""
        if connection.bell is not None and self._by_fd.pop(connection.bell.fd, None) is not None:
            self._epoll.unregister(connection.bell.fd)  # the client has it still
            connection.bell.close()
        self.call(connection)  # the loop forgets its pending steps

    def call(self, connection: _P | None = None) -> None:
        """Wake the loop, to check a connection if one is named."""
        if connection is not None:
            self._called.append(connection)
        self._rang = True
        if self._parked:
            os.eventfd_write(self._own, 1)

    def rung(self) -> list[_P]:
        """Return each client that pushed, once; the loop then has to answer its oldest step."""
        self._rang = False
        self._hear(self._epoll.poll(0, MAX_RINGS))
        self._called.extend([one for one, (signal, seen) in self._watched.items() if signal[0] != seen])
        found = []
        for _ in range(len(self._called)):
            connection = self._called.popleft()
            self._watched.pop(connection, None)
            if not connection.gone and not self._watch(connection):
                found.append(connection)
        if len(self._watched) > self._max_watched:
            self._leave_to_ring([one for one in self._watched if one.rings][: -self._max_watched // 2])
        return found

    def answered(self, connection: _P) -> None:
        """Note that the loop has answered a client; watch it, or queue it if it has pushed again."""
        if not connection.gone and not self._watch(connection):
            self._called.append(connection)

    def _watch(self, connection: _P) -> bool:
        """Watch a client's signal; return False if it has pushed already."""
        signal = connection.region.request_signal
        seen = signal[0]
        if slot.signalled_seq(seen, connection.grant.epoch) > connection.served:
            return False
        if connection.bell is not None:
            connection.bell.unwatched[0] = 0
        self._watched[connection] = signal, seen
        return True

    def wait(self, seconds: float) -> None:
        """Wait until a client pushed or rang: at most one bounded sleep."""
        began = time.monotonic()
        seconds = min(seconds, *(one.pause() for one in self._watched), math.inf)
        spin_until = began + (min(self._spin_seconds, seconds) if seconds > 0 else park.MAX_SPIN_SECONDS)
        while not self._anything():
            if time.monotonic() >= spin_until:
                break
        else:
            return
        if seconds > 0:
            self._park(min(seconds, self._sleep_seconds))
            waited = time.monotonic() - began
            short = waited < park.MAX_SPIN_SECONDS
            self._spin_seconds = min(2 * waited, park.MAX_SPIN_SECONDS) if short else park.SPIN_SECONDS

    def _anything(self) -> bool:
        self._hear(self._epoll.poll(0, MAX_RINGS))
        return self._rang or bool(self._called) or any(signal[0] != seen for signal, seen in self._watched.values())

    def _park(self, seconds: float) -> None:
        self._parked = True
        self._leave_to_ring(list(self._watched))
        if not self._anything():
            if seconds < 1e-3:  # which epoll would round up to
                select.select([self._epoll], [], [], seconds)
            else:
                self._hear(self._epoll.poll(seconds, MAX_RINGS))
        self._parked = False
        if self._sleep_seconds < park.SLEEP_SECONDS:  # no barrier: a ring may be missing
            self._called.extend(list(self._by_fd.values()))

    def _hear(self, events: Iterable[tuple[int, int]]) -> None:
        for fd, _ in events:
            connection = self._by_fd.get(fd)
            if connection is None:
                self._rang = True
            else:
                self._called.append(connection)

    def _leave_to_ring(self, connections: Iterable[_P]) -> None:
        """Stop watching clients that can ring; queue a check of one that pushed meanwhile."""
        left = [one for one in connections if one.rings]
        for connection in left:
            if connection.bell is not None:
                connection.bell.unwatched[0] = 1
        park.barrier()
        for connection in left:
            signal, seen = self._watched.pop(connection)
            if signal[0] != seen:
                self._called.append(connection)
