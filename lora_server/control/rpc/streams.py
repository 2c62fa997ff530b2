"""Helpers of calls with streams both ways: wake the event loop when another thread has something to send, and run the
sender and the receiver until one of them ends."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

log = structlog.get_logger()


class EventWakes:
    """Sets events of an event loop from other threads, all that are due by one call into the loop. Thread-safe."""

    def __init__(self, pause: Callable[[], float] = lambda: 0.0) -> None:
        """`pause`: seconds until they are set, in which the call that caused a message is answered."""
        self._pause = pause
        self._due: list[asyncio.Event] = []
        self._lock = threading.Lock()

    def wake(self, loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
        """Set an event soon."""
        with self._lock:
            self._due.append(event)
            is_first = len(self._due) == 1
        if is_first:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(loop.call_later, self._pause(), self._set)

    def _set(self) -> None:
        with self._lock:
            due, self._due = self._due, []
        for event in due:
            event.set()


async def run_either(*work: Coroutine[Any, Any, None]) -> None:
    """Run these until the first of them ends, and cancel the others: the two directions of a stream, say."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        log.debug("stream ended", how=[repr(one) for one in ended if one])
