"""Publishes a log's events on a ZeroMQ socket. No subscriber can block it: one that does not read loses messages."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable

import structlog
import zmq

from lora_server.clock import SYSTEM, Clock
from lora_server.control.events.log import EventLog
from lora_server.timings import DEFAULTS, Timings
from lora_server.wire.events import Message

MOST_QUEUED = 1000  # messages for one subscriber; beyond them it loses messages
MOST_INBOUND = 1024  # bytes of a subscriber's message; a longer one ends its connection
CLOSE_SECONDS = 5.0
log = structlog.get_logger()


class EventPublisher:
    """A socket and the thread that sends on it, from its constructor on.

    Raises zmq.ZMQError where it cannot listen at `endpoint`. `before_beat` is called before heartbeats; it may publish.
    """

    def __init__(
        self,
        events: EventLog,
        endpoint: str,
        before_beat: Callable[[], object] = lambda: None,
        timings: Timings = DEFAULTS,
        clock: Clock = SYSTEM,
    ) -> None:
        self._events, self._before_beat, self._timings, self._clock = events, before_beat, timings, clock
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.set(zmq.SNDHWM, MOST_QUEUED)
        self._socket.set(zmq.MAXMSGSIZE, MOST_INBOUND)
        self._socket.set(zmq.LINGER, 0)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise
        self.endpoint: str = self._socket.get_string(zmq.LAST_ENDPOINT)
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)
        events.follow(self._ring)
        self._thread.start()

    def _ring(self) -> None:
        os.eventfd_write(self._bell, 1)

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            log.exception("events are not published any more")
        finally:
            self._context.destroy(linger=0)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._bell, zmq.POLLIN)
        beat, send = self._clock.now(), math.inf  # when heartbeats and pending events are due
        while not self._stopping.is_set():
            wait = max(0.0, min(beat, send) - self._clock.now())
            if poller.poll(math.ceil(wait * 1e3)):
                os.eventfd_read(self._bell)
                send = min(send, self._clock.now() + self._timings.event_batch)
            now = self._clock.now()
            if send <= now:
                self._send(self._events.take())
                send = math.inf
            if beat <= now:
                self._before_beat()
                self._send(self._events.heartbeats())
                beat = now + self._timings.event_beat

    def _send(self, messages: Iterable[Message]) -> None:
        for message in messages:
            self._socket.send_multipart(message.frames())

    def close(self) -> None:
        """Stop publishing. Idempotent."""
        self._events.follow(None)
        if not self._stopping.is_set():
            self._stopping.set()
            self._ring()
            self._thread.join(CLOSE_SECONDS)
            os.close(self._bell)
