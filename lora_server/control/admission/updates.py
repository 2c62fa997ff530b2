"""Updates of the shards about holds: one command for all that a call, or a batch of calls, changed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from lora_server import telemetry
from lora_server.wire import lora_server_pb2 as pb


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
    `AdmissionService` has the lock, which is this one."""

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
        self._trace = trace or self._trace

    def forget_client(self, client: int) -> None:
        """Forget what a client holds: it is revoked at the shards."""
        self._held.pop(client, None)

    def restored(self, client: int, held: Iterable[int]) -> None:
        """Tell shards all that a client of an earlier controller holds."""
        self._held.pop(client, None)
        self._send(pb.ShardCommand(uses=pb.Uses(holds=[pb.Holds(client=client, more=held, anew=True)])))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Tell shards once, at the end, of all that this thread's calls in the block changed."""
        self._local.defers = True
        try:
            yield
        finally:
            self._local.defers = False
            with self._lock:
                self.flush()

    def flush(self, now: bool = False) -> None:
        """Send what changed, unless this thread defers it; with `now` in any case."""
        if getattr(self._local, "defers", False) and not now:
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
