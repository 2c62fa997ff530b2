"""Logs: structlog on stderr, coloured in a terminal, JSON lines otherwise; repeated lines are counted."""

from __future__ import annotations

import contextlib
import logging
import secrets
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal

import structlog

Format = Literal["auto", "console", "json"]
_refusal: ContextVar[threading.Event | None] = ContextVar("refusal", default=None)


def configure(level: int = logging.INFO, form: Format = "auto") -> None:
    """Configure the process's log; call it again when its settings are known. `auto`: JSON, except in a terminal."""
    human = sys.stderr.isatty() if form == "auto" else form == "console"
    render = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()) if human else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
    )


def bind_tenant(tenant: str) -> None:
    """Add the tenant to every line of the running call; no-op if it is empty."""
    if tenant:
        structlog.contextvars.bind_contextvars(tenant=tenant)


@contextlib.contextmanager
def one_refusal() -> Iterator[threading.Event]:
    """Yield what `refusal_written` sets, from any thread that works for the block's call."""
    written = threading.Event()
    token = _refusal.set(written)
    try:
        yield written
    finally:
        _refusal.reset(token)


def refusal_written() -> None:
    """Note that the log has a line of the running call's refusal; a second one would say the same."""
    if (written := _refusal.get()) is not None:
        written.set()


def request_id() -> str:
    """Return the id of the request that is bound to this thread's log, or a new id."""
    return str(structlog.contextvars.get_contextvars().get("request") or secrets.token_hex(8))


@dataclass
class _Muted:
    until: float
    event: str
    fields: dict[str, Any] = field(default_factory=dict)
    left_out: int = 0


class Repeats:
    """A rate limit for lines that clients can cause at will: writes a key's first line at once, then one per `seconds`
    with a count.

    Not thread-safe. `write(event, **fields)` is a logger's method.
    """

    def __init__(
        self, write: Callable[..., Any], seconds: float = 10.0, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._write, self._seconds, self._now = write, seconds, now
        self._muted: dict[Hashable, _Muted] = {}
        self._next = 0.0

    def __call__(self, key: Hashable, event: str, **fields: Any) -> None:
        """Write the line, or count it."""
        self.flush()
        muted = self._muted.get(key)
        if muted is None:
            self._write(event, **fields)
            self._mute(key, event)
        else:
            fields.pop("exc_info", None)  # a traceback would keep what its frames refer to
            muted.left_out, muted.event, muted.fields = muted.left_out + 1, event, fields

    def flush(self) -> None:
        """Write what was counted for long enough; cheap, and to be called now and then."""
        now = self._now()
        if now < self._next:
            return
        self._next = now + self._seconds / 4
        for key, muted in [(key, muted) for key, muted in self._muted.items() if muted.until <= now]:
            del self._muted[key]
            if muted.left_out:
                self._write(f"{muted.event} (again)", times=muted.left_out, **muted.fields)
                self._mute(key, muted.event)

    def _mute(self, key: Hashable, event: str) -> None:
        self._muted[key] = _Muted(self._now() + self._seconds, event)
