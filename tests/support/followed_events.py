"""A controller without shards that publishes events, and readers of them."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from lora_server.control.events.log import EventLog
from lora_server.control.events.publisher import AdviceNews, EventPublisher
from lora_server.control.events.sockets import IpcEvents
from lora_server.control.rpc.events import EventsService
from lora_server.control.rpc.registration import Doorkeeper
from lora_server.control.rpc.server import ControlServer
from lora_server.timings import DEFAULTS, Timings
from lora_server.wire.event_stream import EventStream
from tests.support.controllers import make_controller
from tests.support.serving import HANG_SECONDS


class Publishing:
    """`events` is published at `address`, over ipc in `directory`."""

    def __init__(self, directory: Path, stack: contextlib.ExitStack, depth: int = 10_000, timings: Timings = DEFAULTS):
        self.events, self._stack, self.timings = EventLog(depth=depth), stack, timings
        self.controller = make_controller(events=self.events)
        advice = AdviceNews(self.controller, self.events)
        socket = IpcEvents(f"ipc://{directory}/events.sock")
        self.endpoint = socket.endpoint
        self.publisher = EventPublisher(self.events, socket, advice.note, timings)
        stack.callback(self.publisher.close)
        service = EventsService(self.events, self.endpoint)
        control = ControlServer(self.controller, "127.0.0.1:0", Doorkeeper("x"), events=service)
        stack.callback(control.close, 0.2)
        self.address = f"127.0.0.1:{control.port}"

    def reader(self, *kinds: str, **more) -> EventStream:
        return self._stack.enter_context(EventStream(self.address, kinds=kinds, timings=self.timings, **more))


def taken(stream: EventStream, count: int):
    """The next events of a stream, at least `count`."""
    found, until = [], time.monotonic() + HANG_SECONDS
    while len(found) < count:
        assert time.monotonic() < until, found
        found += [event for one in stream.take(1.0) for event in one.batch.events]
    return found
