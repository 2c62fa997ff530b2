"""Following a server's events: where a reader subscribes, which batches it lacks, and how it gets them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import zmq
from zmq.utils import z85

from lora_server.address import ANY, Address
from lora_server.errors import ServerUnavailableError
from lora_server.timings import DEFAULTS, Timings
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire import lora_server_pb2_grpc as rpc
from lora_server.wire.credentials import Credentials
from lora_server.wire.events import EventBatch, decode
from lora_server.wire.leader import leader_of
from lora_server.wire.rpc import call, open_channel


class ReceivedBatch(NamedTuple):
    """A batch of a topic, with at least one event."""

    topic: str
    sequence: int
    batch: EventBatch


def received(topic: str, reply: pb.ReplayEventsReply) -> list[ReceivedBatch]:
    """Return what a replay brings."""
    return [ReceivedBatch(topic, one.sequence, decode(one.payload)) for one in reply.batches]


def _from_here(endpoint: str, server: str) -> str:
    """Return an endpoint with the server's host in place of one that stands for all addresses."""
    if not endpoint.startswith("tcp://"):
        return endpoint
    address = Address.parse(endpoint.removeprefix("tcp://"))
    host = Address.parse(leader_of(server)).host if address.host in ANY else address.host
    return f"tcp://{address._replace(host=host)}"


class TopicReader:
    """Puts messages into the order of their topics: repeated ones are dropped, missing ones are asked for.

    `replay` returns the batches of a topic after a sequence. `gaps` counts the messages that showed that others were
    missing.
    """

    def __init__(self, epoch: int, last: Mapping[str, int], replay: Callable[[str, int], pb.ReplayEventsReply]) -> None:
        """`last`: the sequences that the reader has, by topic; the epoch for a topic that it knows nothing of."""
        self._epoch, self._last, self._replay = epoch, dict(last), replay
        self.gaps = 0

    def read(self, topic: str, sequence: int, batch: EventBatch) -> list[ReceivedBatch]:
        """Return what a message brings, with what was missing before it. Raises ServerUnavailableError if some of that
        is lost; then the reader has to begin anew."""
        last, is_heartbeat = self._last.get(topic, self._epoch), not batch.events
        if last < (sequence if is_heartbeat else sequence - 1):
            found = self._missing(topic, last)
        elif sequence > last:
            found = [ReceivedBatch(topic, sequence, batch)]
        else:
            found = []
        if found:
            self._last[topic] = found[-1].sequence
        return found

    def _missing(self, topic: str, since: int) -> list[ReceivedBatch]:
        self.gaps += 1
        reply = self._replay(topic, since)
        if reply.lost:
            raise ServerUnavailableError(f"events of topic {topic}: some are lost; read what there is now by gRPC")
        return received(topic, reply)


class EventStream:
    """All events of a server from when it was opened, in the order of each topic, without gaps. For one thread.

    A context manager. What it does not receive by ZeroMQ it asks for by gRPC. `has_begun`: a message came, so the
    subscription works.
    """

    def __init__(
        self,
        address: str,
        credentials: Credentials | None = None,
        kinds: tuple[str, ...] = (),
        timings: Timings = DEFAULTS,
    ) -> None:
        """`kinds`: of the events to follow; all, if empty. Raises as `call` does, ConfigError for a server without
        events, ServerUnavailableError where its socket cannot be reached from here."""
        self._address, self._timings = address, timings
        self._channel = open_channel(address, credentials)
        self._context = zmq.Context()
        self._events: Any = rpc.EventsStub(self._channel)  # type: ignore[no-untyped-call]
        self._heard, self.has_begun = time.monotonic(), False
        try:
            public, secret = zmq.curve_keypair()
            request = pb.OpenEventsRequest(reader_key=z85.decode(public))
            opened: pb.OpenEventsReply = self._call(self._events.Open, request)
            last = {one.topic: one.sequence for one in opened.topics}
            self.reader = TopicReader(opened.epoch, last, self._replay)
            self._socket = self._subscribed(opened, kinds, public, secret)
        except BaseException:
            self.close()
            raise

    def _subscribed(
        self, opened: pb.OpenEventsReply, kinds: tuple[str, ...], public: bytes, secret: bytes
    ) -> zmq.Socket[bytes]:
        path = opened.endpoint.removeprefix("ipc://")
        if path != opened.endpoint and not Path(path).is_socket():
            raise ServerUnavailableError(
                f"events of {self._address}: {path} cannot be seen from here; run as the server's user, on its host"
            )
        socket = self._context.socket(zmq.SUB)
        for prefix in [f"{kind}/" for kind in kinds] or [""]:
            socket.subscribe(prefix)
        if opened.server_key:
            socket.set(zmq.CURVE_SERVERKEY, opened.server_key)
            socket.set(zmq.CURVE_PUBLICKEY, public)
            socket.set(zmq.CURVE_SECRETKEY, secret)
            socket.set(zmq.IPV6, 1)
        socket.connect(_from_here(opened.endpoint, self._address))
        return socket

    def take(self, seconds: float) -> list[ReceivedBatch]:
        """Return the next batches; none if there are none within `seconds`.

        Raises ServerUnavailableError if the server is silent, or some batches are lost: then read what there is by
        gRPC, and open another stream.
        """
        if self._socket.poll(int(seconds * 1e3)):
            topic, sequence, payload = self._socket.recv_multipart()
            self._heard, self.has_begun = time.monotonic(), True
            return self.reader.read(topic.decode(), int.from_bytes(sequence, "big"), decode(payload))
        if self.silent_seconds > self._timings.event_silence:
            raise ServerUnavailableError(
                f"events of {self._address}: none, and no heartbeat, for {self.silent_seconds:.1f} s"
            )
        return []

    def _replay(self, topic: str, since: int) -> pb.ReplayEventsReply:
        reply: pb.ReplayEventsReply = self._call(self._events.Replay, pb.ReplayEventsRequest(topic=topic, since=since))
        return reply

    def _call(self, method: Any, request: Any) -> Any:
        return call(method, request, server=self._address, seconds=self._timings.call)

    @property
    def silent_seconds(self) -> float:
        """Seconds since the last message, heartbeats included."""
        return time.monotonic() - self._heard

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._context.destroy(linger=0)
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
