"""Adapters that a server has named, kept as its events change them: a known name costs no call."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable

import structlog

from lora_server.errors import ConfigError, LoraServerError
from lora_server.timings import DEFAULTS, Timings
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire.credentials import Credentials
from lora_server.wire.event_stream import EventStream
from lora_server.wire.events import ADAPTER, RESIDENCY, AnyEvent, ResidencyChanged

WAIT_SECONDS = 0.1  # of the thread that follows, until it looks whether it should end
log = structlog.get_logger()
Key = tuple[str, str]  # a name, and the tenant that used it


class KnownAdapters:
    """Answers of `Adapters/Get`, until an event says that a name means something else. Thread-safe.

    It answers nothing while no events come: see `renew`. `changes` counts the events about names; an answer that was
    asked for before one of them is not kept.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._good_until = clock, 0.0
        self._answers: dict[Key, pb.Adapter] = {}
        self._meant: dict[str, set[Key]] = defaultdict(set)  # by full name: what it may be the meaning of
        self.changes = 0
        self._lock = threading.Lock()

    def find(self, name: str, tenant: str = "") -> pb.Adapter | None:
        """Return the adapter that a tenant means by a name, None if that has to be asked."""
        with self._lock:
            return self._answers.get((name, tenant)) if self._clock() < self._good_until else None

    def keep(self, name: str, tenant: str, answer: pb.Adapter, changes: int) -> None:
        """Keep an answer, unless `changes`, from before it was asked for, is not the count any more."""
        key = name, tenant
        with self._lock:
            if changes == self.changes:
                self._answers[key] = answer
                for full in (name, f"{tenant}/{name}", answer.name):
                    self._meant[full].add(key)

    def apply(self, event: AnyEvent) -> None:
        """Take what an event says about an adapter."""
        if isinstance(event, ResidencyChanged):
            with self._lock:
                for key in self._meant.get(event.name, ()):
                    self._change_state(key, event)
        else:
            self.forget(getattr(event, "name", ""))

    def forget(self, name: str) -> None:
        """Take that a name means something else now, or nothing."""
        with self._lock:
            self.changes += 1
            for key in self._meant.pop(name, ()):
                self._answers.pop(key, None)

    def _change_state(self, key: Key, event: ResidencyChanged) -> None:
        known = self._answers.get(key)
        if known is not None and known.handle == event.handle:
            self._answers[key] = changed = pb.Adapter()
            changed.CopyFrom(known)
            changed.state = event.state

    def renew(self, seconds: float) -> None:
        """Answer for so long from now on."""
        self._good_until = self._clock() + seconds

    def clear(self) -> None:
        """Forget everything: events were lost."""
        with self._lock:
            self._good_until, self.changes = 0.0, self.changes + 1
            self._answers.clear()
            self._meant.clear()


class EventFollower:
    """Follows a server's events in a thread of its own, and keeps `known` by them. `close` ends it.

    Where it cannot follow, `known` answers nothing, and each name costs a call as before.
    """

    def __init__(self, address: str, credentials: Credentials | None = None, timings: Timings = DEFAULTS) -> None:
        self.known = KnownAdapters()
        self._address, self._credentials, self._timings = address, credentials, timings
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lora-events", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        said = ""
        while not self._closing.is_set():
            try:
                self._follow()
            except LoraServerError as error:
                reason = str(error).partition(" (")[0]
                if reason != said:
                    log.info("names are asked for by gRPC: events cannot be followed", reason=reason)
                said = reason
                if isinstance(error, ConfigError):  # the server publishes none
                    return
            finally:
                self.known.clear()
            self._closing.wait(self._timings.event_retry)

    def _follow(self) -> None:
        with EventStream(self._address, self._credentials, (ADAPTER, RESIDENCY), self._timings) as stream:
            while not self._closing.is_set():
                for received in stream.take(WAIT_SECONDS):
                    for event in received.batch.events:
                        self.known.apply(event)
                if stream.has_begun:
                    self.known.renew(self._timings.event_silence - stream.silent_seconds)

    def close(self) -> None:
        """Stop following. Idempotent."""
        self._closing.set()
        self._thread.join(self._timings.call)
