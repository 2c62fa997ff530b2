"""Signals that ask a process to stop, handled by a thread.

A handler runs in the middle of whatever the main thread does. Were that Event.wait, a handler that sets the event would
wait for a lock that its own thread holds: for ever, once in many thousand stops.
"""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable, Iterable


def on_signals(numbers: Iterable[signal.Signals], act: Callable[[], object]) -> None:
    """Call `act` for each that comes, in a thread of its own; by the main thread, once."""
    asked: queue.SimpleQueue[int] = queue.SimpleQueue()  # a handler may call its put

    def hear() -> None:
        while True:
            asked.get()
            act()

    threading.Thread(target=hear, name="signals", daemon=True).start()
    for number in numbers:
        signal.signal(number, lambda one, _: asked.put(one))
