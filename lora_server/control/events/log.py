"""The log of a controller's events: collects them, numbers their batches, keeps the newest for replay."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from itertools import takewhile

from lora_server.clock import SYSTEM, Clock
from lora_server.wire.events import (
    ADAPTER,
    DEPTH,
    KINDS,
    MOST_IN_BATCH,
    RESIDENCY,
    AnyEvent,
    EventBatch,
    EventMessage,
    encode,
    topic_of,
)


class EventRing:
    """The newest messages of one kind, `depth` events in all. Not thread-safe: `EventLog` has the lock."""

    def __init__(self, depth: int = DEPTH) -> None:
        self._depth, self._events = depth, 0
        self._messages: deque[EventMessage] = deque()

    def add(self, message: EventMessage) -> None:
        """Keep a message, and drop the oldest ones beyond the depth."""
        self._messages.append(message)
        self._events += message.size
        while self._events > self._depth and len(self._messages) > 1:
            self._events -= self._messages.popleft().size

    def since(self, topic: str, sequence: int) -> list[EventMessage]:
        """Return the messages of a topic after a sequence, oldest first, as far as they are kept."""
        newest = (one for one in reversed(self._messages) if one.topic == topic)
        return list(takewhile(lambda one: one.sequence > sequence, newest))[::-1]


class EventLog:
    """Events since the controller started. Thread-safe; its lock is a leaf, and `publish` never blocks.

    Nothing is kept until `follow` is called: a server without a publisher has no events.
    """

    def __init__(self, clock: Clock = SYSTEM, depth: int = DEPTH) -> None:
        self._clock, self.epoch = clock, int(clock.time() * 1e6)
        self.viewers: Callable[[str], Iterable[str]] = lambda name: ("",)  # tenants that see an adapter of this name
        self.on_taken: Callable[[], object] = lambda: None  # called after `take` with events; must not block
        self._wake: Callable[[], object] | None = None
        self._pending: list[tuple[str, str, AnyEvent]] = []
        self._sequences = {topic_of(kind, ""): self.epoch for kind in KINDS}
        self._beaten = dict(self._sequences)  # the sequences at the last heartbeats
        self._rings = {kind: EventRing(depth) for kind in KINDS}
        self._lock = threading.Lock()

    def follow(self, wake: Callable[[], object] | None) -> None:
        """Keep events from now on; with None, none. `wake` is called when there is one to take; it must not block."""
        with self._lock:
            self._wake = wake

    def publish(self, kind: str, subject: str, event: AnyEvent) -> None:
        """Add an event. `subject` is an adapter's full name for the kinds adapter and residency, else a tenant."""
        with self._lock:
            if self._wake is None:
                return
            self._pending.append((kind, subject, event))
            if len(self._pending) == 1:
                self._wake()

    def take(self) -> list[EventMessage]:
        """Return what is pending as messages, which are kept for replay. For the publisher's thread."""
        with self._lock:
            pending, self._pending = self._pending, []
        by_topic: dict[tuple[str, str], list[AnyEvent]] = defaultdict(list)
        for kind, subject, event in pending:
            for tenant in self.viewers(subject) if kind in (ADAPTER, RESIDENCY) else (subject,):
                by_topic[kind, topic_of(kind, tenant)].append(event)
        now, taken = self._clock.time(), []
        for (kind, topic), events in by_topic.items():
            for begin in range(0, len(events), MOST_IN_BATCH):
                some = events[begin : begin + MOST_IN_BATCH]
                taken.append(self._keep(kind, topic, encode(EventBatch(now, some)), len(some)))
        if taken:
            self.on_taken()
        return taken

    def _keep(self, kind: str, topic: str, payload: bytes, size: int) -> EventMessage:
        with self._lock:
            sequence = self._sequences.get(topic, self.epoch) + 1
            message = EventMessage(topic, sequence, payload, size)
            self._sequences[topic] = sequence
            self._rings[kind].add(message)
        return message

    def introduce(self, topics: Iterable[str]) -> None:
        """Send heartbeats of these topics, too, before their first event."""
        with self._lock:
            for topic in topics:
                self._sequences.setdefault(topic, self.epoch)

    def heartbeats(self) -> list[EventMessage]:
        """Return a message without events for every topic that had none since the last call."""
        payload, sequences = encode(EventBatch(self._clock.time(), [])), self.sequences()
        quiet = [topic for topic, sequence in sequences.items() if self._beaten.get(topic, self.epoch) == sequence]
        self._beaten = sequences
        return [EventMessage(topic, sequences[topic], payload, 0) for topic in quiet]

    def sequences(self) -> dict[str, int]:
        """Return the last sequence of every topic; the epoch for a topic without events."""
        with self._lock:
            return dict(self._sequences)

    def since(self, topic: str, sequence: int) -> tuple[list[EventMessage], bool]:
        """Return a topic's messages after a sequence as far as they are kept, and whether some are not: they are too
        old, or the sequence is of another epoch."""
        with self._lock:
            last, ring = self._sequences.get(topic, self.epoch), self._rings.get(topic.partition("/")[0])
            found = ring.since(topic, sequence) if ring is not None else []
        return found, not (self.epoch <= sequence <= last and len(found) == last - sequence)
