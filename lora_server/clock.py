"""Time as the product reads it and waits for it; a test gives another clock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from typing_extensions import override

T = TypeVar("T")


class Clock(Protocol):
    """A source of time. Thread-safe."""

    def now(self) -> float:
        """Return seconds that never go back, as time.monotonic()."""
        ...

    def time(self) -> float:
        """Return seconds since 1970."""
        ...

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Block until `event` is set, for at most `seconds`; return whether it is."""
        ...

    def wait_for(self, changed: threading.Condition, ready: Callable[[], T], seconds: float) -> T:
        """Block until `ready()` is true, for at most `seconds`; return what it says. The caller holds `changed`."""
        ...


class SystemClock(Clock):
    """The clock of this machine."""

    @override
    def now(self) -> float:
        return time.monotonic()

    @override
    def time(self) -> float:
        return time.time()

    @override
    def wait(self, event: threading.Event, seconds: float) -> bool:
        return event.wait(seconds)

    @override
    def wait_for(self, changed: threading.Condition, ready: Callable[[], T], seconds: float) -> T:
        return changed.wait_for(ready, seconds)


SYSTEM: Clock = SystemClock()
