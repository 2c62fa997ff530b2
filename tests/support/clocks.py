"""A clock that a test moves, and timings with short intervals."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TypeVar

from lora_server.timings import Timings

T = TypeVar("T")

# intervals are short; timeouts keep their seconds, since a test's machine may be busy.
# conftest.py gives it to every process that a test starts
FAST = Timings(
    shard_poll=0.01,
    token_look=0.1,
    shard_report=0.1,
    controller_retry=0.05,
    sweep=0.1,
    rank_beat=0.2,
    registry_look=0.1,
    resolve_again=0.5,
    watch_poll=0.1,
    watch_settle=1.0,  # a busy test's two renames are still one change
    kernel_look=0.02,
    kernel_note=0.01,
    load_retry=0.02,
    preload_look=0.1,
    restart_pause=0.1,
    heartbeat=0.2,
    lookup=0.05,
    token_known=0.2,
    token_unknown=0.1,
)
_LOOK = 0.002


def environment(timings: Timings) -> dict[str, str]:
    """Environment that gives these timings to a server, or to an engine of vLLM."""
    return {"LORA_SERVER_TIMINGS": json.dumps(asdict(timings))}


class VirtualClock:
    """A clock that stands still until `advance`; waiting threads notice within 2 ms. One thread advances it."""

    def __init__(self, now: float = 1000.0) -> None:
        self._now, self._began = now, now
        self._epoch = time.time()

    def now(self) -> float:
        return self._now

    def time(self) -> float:
        return self._epoch + self._now - self._began

    def advance(self, seconds: float) -> None:
        self._now += seconds

    def wait(self, event: threading.Event, seconds: float) -> bool:
        until = self._now + seconds
        while not event.wait(_LOOK):
            if self._now >= until:
                return event.is_set()
        return True

    def wait_for(self, changed: threading.Condition, ready: Callable[[], T], seconds: float) -> T:
        until = self._now + seconds
        while not (said := ready()) and self._now < until:
            changed.wait(_LOOK)
        return said
