"""The RPCs of Events: where a reader subscribes, and what it lacks. Nothing here sends an event."""

from __future__ import annotations

from lora_server.access.identity import Identity
from lora_server.control.events.keys import ReaderKeys
from lora_server.control.events.log import EventLog
from lora_server.control.events.topics import may_read
from lora_server.errors import ConfigError, PermissionDeniedError
from lora_server.wire import lora_server_pb2 as pb

OFF = "--events: got off, expected ipc or tcp://HOST:PORT; start the server with one of them"


class EventsService:
    """The RPCs of Events, as the proto describes them."""

    def __init__(self, events: EventLog, endpoint: str, keys: ReaderKeys | None = None) -> None:
        """`endpoint`: of the publisher; empty where there is none. `keys`: of a publisher over TCP."""
        self._events, self._endpoint, self._keys = events, endpoint, keys

    def Open(self, request: pb.OpenEventsRequest, who: Identity) -> pb.OpenEventsReply:
        if not self._endpoint:
            raise ConfigError(OFF)
        if self._keys is not None:
            self._keys.admit(request.reader_key, who)
        elif not who.is_operator:
            raise PermissionDeniedError(
                f"events: got a token of {who}, expected one of the operator: over ipc a reader sees all tenants' "
                "events; start the server with --events tcp://HOST:PORT"
            )
        topics = [
            pb.TopicSequence(topic=topic, sequence=sequence)
            for topic, sequence in self._events.sequences().items()
            if may_read(who, topic)
        ]
        server_key = self._keys.public if self._keys is not None else b""
        return pb.OpenEventsReply(
            endpoint=self._endpoint, epoch=self._events.epoch, topics=topics, server_key=server_key
        )

    def Replay(self, request: pb.ReplayEventsRequest, who: Identity) -> pb.ReplayEventsReply:
        if not may_read(who, request.topic):
            raise PermissionDeniedError(f"topic {request.topic!r}: not for a token of {who}")
        found, lost = self._events.since(request.topic, request.since)
        batches = [pb.ReplayedBatch(sequence=one.sequence, payload=one.payload) for one in found]
        return pb.ReplayEventsReply(batches=batches, lost=lost)
