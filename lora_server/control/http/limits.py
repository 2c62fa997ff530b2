"""What one HTTP request may cost: a deadline, a size, a share of the connections, one line of the log.

Whoever reaches the port may send anything.
"""

from __future__ import annotations

import asyncio
import logging

import structlog
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from lora_server.timings import Timings

KEEP_ALIVE_SECONDS = 5
MAX_HEAD_BYTES = 16 * 1024
MAX_CONNECTIONS = 256  # the last of them gets a 503, more are closed at once
log = structlog.get_logger()


def limited(app: ASGIApp, seconds: float = Timings.http_request) -> uvicorn.Config:
    """How uvicorn serves an app within these limits; it writes nothing by itself."""

    class Connection(_Connection):
        request_seconds = seconds

    logger = logging.getLogger("uvicorn")
    logger.propagate, logger.handlers = False, [_OneLineHandler()]
    return uvicorn.Config(
        app,
        http=Connection,
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=MAX_CONNECTIONS,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
    )


class _Connection(H11Protocol):
    """uvicorn waits for ever for the rest of a request, and for a reader of the answer; this one does not."""

    request_seconds: float
    _deadline: asyncio.TimerHandle

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Its time begins, or it is one too many."""
        super().connection_made(transport)
        self._deadline = self.loop.call_later(self.request_seconds, transport.abort)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()

    def on_response_complete(self) -> None:
        """Time for the next request."""
        super().on_response_complete()
        self._deadline.cancel()
        self._deadline = self.loop.call_later(self.request_seconds, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """No time needed any more."""
        self._deadline.cancel()
        super().connection_lost(exc)


class _OneLineHandler(logging.Handler):
    """What uvicorn has to say, without a traceback."""

    def emit(self, record: logging.LogRecord) -> None:
        """To our log; that a request was cancelled at the end is no news."""
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, asyncio.CancelledError):
            log.error("http: " + record.getMessage().strip(), **({"error": repr(error)} if error else {}))


def one_line(_: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    """The loop's exception handler."""
    log.warning("http: " + str(context["message"]), error=repr(context.get("exception")))
