"""Publishes a log's events on a ZeroMQ socket. No subscriber can block it: one that does not read loses messages."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable
from typing import Any

import structlog
import zmq

from lora_server.access.identity import OPERATOR
from lora_server.clock import SYSTEM, Clock
from lora_server.control.controller import Controller
from lora_server.control.events.log import EventLog
from lora_server.control.events.sockets import EventSocket
from lora_server.timings import DEFAULTS, Timings
from lora_server.wire.events import ADVICE, EventMessage, ServerAdvice

CLOSE_SECONDS = 5.0
log = structlog.get_logger()


class EventPublisher:
    """The thread that sends a log's events on a socket, from its constructor on. `before_beat` is called before
    heartbeats; it may publish."""

    def __init__(
        self,
        events: EventLog,
        socket: EventSocket,
        before_beat: Callable[[], object] = lambda: None,
        timings: Timings = DEFAULTS,
        clock: Clock = SYSTEM,
    ) -> None:
        """`socket` is this publisher's own from now on."""
        self._events, self._before_beat, self._timings, self._clock = events, before_beat, timings, clock
        self._socket = socket
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)
        events.follow(self._ring)
        self._thread.start()

    def _ring(self) -> None:
        os.eventfd_write(self._bell, 1)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._serve()
            except Exception:
                log.exception("events could not be published; going on")
                self._stopping.wait(self._timings.event_beat)
        self._socket.close()

    def _serve(self) -> None:
        beat = send = self._clock.now()  # when heartbeats and pending events are due
        while not self._stopping.is_set():
            if self._heard(min(beat, send) - self._clock.now()):
                send = min(send, self._clock.now() + self._timings.event_batch)
            now = self._clock.now()
            if send <= now:
                self._send(self._events.take())
                send = math.inf
            if beat <= now:
                self._before_beat()
                self._socket.look()
                self._send(self._events.heartbeats())
                beat = now + self._timings.event_beat

    def _heard(self, seconds: float) -> bool:
        """Wait for an event, for at most so long; return whether there is one. Subscribers are heard, too."""
        polled: list[tuple[Any, int]] = [(one, zmq.POLLIN) for one in (self._bell, *self._socket.heard)]
        ready: list[Any] = [one for one, _ in zmq.zmq_poll(polled, max(0, math.ceil(seconds * 1e3)))]
        if len(ready) > (self._bell in ready):
            self._socket.hear()
        if self._bell not in ready:
            return False
        os.eventfd_read(self._bell)
        return True

    def _send(self, messages: Iterable[EventMessage]) -> None:
        for message in messages:
            self._socket.send(message)

    def close(self) -> None:
        """Stop publishing. Idempotent."""
        self._events.follow(None)
        if not self._stopping.is_set():
            self._stopping.set()
            self._ring()
            self._thread.join(CLOSE_SECONDS)
            os.close(self._bell)


class AdviceNews:
    """Publishes the advice when it differs from the last. For one thread."""

    def __init__(self, controller: Controller, events: EventLog) -> None:
        self._controller, self._events = controller, events
        self._published: ServerAdvice | None = None

    def note(self) -> None:
        """Look at the server, and publish what it advises if that changed."""
        reason, queue = self._controller.not_ready(), self._controller.adapters.admission.queue
        advice = ServerAdvice(not reason, reason, len(queue.tickets.waiting), len(queue.capacity.active))
        if advice != self._published:
            self._published = advice
            self._events.publish(ADVICE, OPERATOR, advice)
