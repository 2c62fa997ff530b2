"""Limits on HTTP requests: a deadline, a size, a number of connections, one log line each.

The port needs no authentication to connect, so anything may arrive on it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, cast

import structlog
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from lora_server.logs import Repeats
from lora_server.timings import Timings

KEEP_ALIVE_SECONDS = 5
MAX_HEAD_BYTES = 16 * 1024
MAX_CONNECTIONS = 256  # one more aborts the oldest unfinished request
PROBES, MAX_PROBES = ("/livez", "/readyz"), 32  # up to MAX_PROBES requests for these are not aborted
log = structlog.get_logger()


def limited(app: ASGIApp, seconds: float = Timings.http_request) -> uvicorn.Config:
    """Return uvicorn's configuration that serves an app within these limits. uvicorn itself writes no log lines."""

    class HttpConnection(_Connection):
        request_seconds = seconds

    logger = logging.getLogger("uvicorn")
    logger.propagate, logger.handlers = False, [_OneLineHandler()]
    return uvicorn.Config(
        app,
        http=HttpConnection,
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=MAX_CONNECTIONS,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
    )


class _Connection(H11Protocol):
    """A connection with deadlines: uvicorn alone waits without limit for a request's rest, and for a slow reader."""

    request_seconds: float
    _deadline: asyncio.TimerHandle

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the connection's deadline. If there are too many connections now, abort the one with the oldest
        request."""
        super().connection_made(transport)
        self._deadline = self.loop.call_later(self.request_seconds, transport.abort)
        if len(self.connections) > MAX_CONNECTIONS:
            oldest = min(self._endable(), key=lambda one: one._deadline.when())
            self.connections.discard(oldest)  # its end is told later
            oldest.transport.abort()

    def _endable(self) -> list[_Connection]:
        """Return the connections that may be aborted: all but those of probes, or all if there are too many probes."""
        every = cast("set[_Connection]", self.connections)
        others = [one for one in every if not one._is_probe()]
        return others if len(every) - len(others) <= MAX_PROBES else list(every)

    def _is_probe(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete and self.scope["path"] in PROBES

    def on_response_complete(self) -> None:
        """Start the deadline of the connection's next request."""
        super().on_response_complete()
        self._deadline.cancel()
        self._deadline = self.loop.call_later(self.request_seconds, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the connection's deadline."""
        self._deadline.cancel()
        super().connection_lost(exc)


class _OneLineHandler(logging.Handler):
    """Writes uvicorn's records to our log as one line each, without a traceback."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record to our log, unless it says that a request was cancelled."""
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, asyncio.CancelledError):
            log.error("http: " + record.getMessage().strip(), **({"error": repr(error)} if error else {}))


def one_line() -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]:
    """Return an exception handler for the event loop that logs each kind of failure once, then counts at a low rate.
    (Without a free descriptor asyncio calls it over 256 times a second.)"""
    complain = Repeats(log.warning)

    def handle(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        said, error = str(context["message"]), context.get("exception")
        complain((said[:40], type(error)), "http: " + said, error=repr(error))

    return handle
