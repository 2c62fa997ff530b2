"""Advice for routers and autoscalers: whether to send requests here, and how many wait."""

from __future__ import annotations

from lora_server.access.identity import OPERATOR
from lora_server.control.controller import Controller
from lora_server.control.events.log import EventLog
from lora_server.wire.events import ADVICE, ServerAdvice


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
