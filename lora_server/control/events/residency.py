"""When the residency of an adapter is news: its state differs from the one that was published last."""

from __future__ import annotations

from lora_server.control.adapters.records import Record
from lora_server.control.events.log import EventLog
from lora_server.wire.events import RESIDENCY, ResidencyChanged


class ResidencyNews:
    """The states that were published, by handle. Not thread-safe: `ShardSync` has the lock."""

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._published: dict[int, str] = {}

    def note(self, record: Record, state: str) -> None:
        """Publish the state of an adapter if it changed."""
        if self._published.get(record.handle) != state:
            self._published[record.handle] = state
            event = ResidencyChanged(record.name, record.version, record.handle, state)
            self._events.publish(RESIDENCY, record.name, event)

    def forget(self, handle: int) -> None:
        """Remove an adapter."""
        self._published.pop(handle, None)
