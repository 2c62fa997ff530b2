"""Interceptor of all clients' calls: gives each an id in the log and a span in traces, and counts refusals."""

from __future__ import annotations

import contextlib
import inspect
import re
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import grpc
import structlog
from typing_extensions import override

from lora_server import telemetry
from lora_server.errors import LoraServerError
from lora_server.logs import Repeats, one_refusal
from lora_server.wire.credentials import CODE_KEY
from lora_server.wire.rpc import REQUEST_KEY

UNTRACED = (
    *("Heartbeat", "Await", "Prefetch", "Hold", "Release", "Cancel"),  # the Acquire entries of a Hold are traced
    *("Register", "LeaseRank", "FollowLayouts", "Files", "Read", "Check", "Status", "Replay"),
)
MAX_ERROR_BYTES = 2500  # a byte takes up to three in HTTP/2's trailers, of which a client takes 8 KiB
_GOOD_ID = re.compile(r"[\w.:-]{1,64}")
log = structlog.get_logger()


def expected(error: Exception) -> LoraServerError:
    """Return the error that a client gets of one that its call raised; a defect's goes to the log."""
    if isinstance(error, LoraServerError):
        return error
    log.error("internal error in a call", exc_info=error)
    return LoraServerError(f"the server failed: {error!r:.200}; see its log")


def cut(text: str) -> str:
    """Cut an error's text to what the trailers of a call take."""
    data = text.encode(errors="replace")
    data = data if len(data) <= MAX_ERROR_BYTES else data[:MAX_ERROR_BYTES] + b"..."
    return data.decode(errors="ignore")


class Refusals:
    """Counts the calls that were refused, and logs them at a limited rate. Thread-safe."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()  # by the error's code
        self._complain = Repeats(log.info)
        self._lock = threading.Lock()

    def note(self, method: str, code: str, error: str, written: bool = False) -> None:
        """Count and log a call that ended with an error. `written`: the audit log's line says it."""
        with self._lock:
            self.counts[code] += 1
            if not written:
                self._complain((method, code), "refused", method=method, code=code, error=error)


@contextlib.contextmanager
def observed(method: str, request: str, headers: Mapping[str, Any]) -> Iterator[None]:
    """Give the block's log lines the id of a client's request, and make the block a span of the request's trace."""
    ours = {"request": request} if _GOOD_ID.fullmatch(request) else {}
    traced = (
        contextlib.nullcontext() if method in UNTRACED else telemetry.span(f"lora.server.{method}", headers, **ours)
    )
    with structlog.contextvars.bound_contextvars(**ours), traced:
        yield


class Calls(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Observes the calls of one listener."""

    def __init__(self, refusals: Refusals) -> None:
        self._refusals = refusals

    @override
    async def intercept_service(self, continuation: Callable[..., Awaitable[Any]], details: Any) -> Any:
        """Wrap a method's handler. Each call runs in its own task, so context variables bound in it are the call's."""
        handler = await continuation(details)
        if handler is None or not inspect.iscoroutinefunction(handler.stream_stream):
            return handler
        method = details.method.rpartition("/")[2]
        known = dict(details.invocation_metadata or ())

        async def observe(requests: Any, context: Any) -> None:
            with one_refusal() as written, observed(method, str(known.get(REQUEST_KEY, "")), known):
                try:
                    await handler.stream_stream(requests, context)
                finally:
                    code = next((str(value) for key, value in context.trailing_metadata() or () if key == CODE_KEY), "")
                    if code:
                        self._refusals.note(method, code, _text(context.details()), written.is_set())

        return grpc.stream_stream_rpc_method_handler(observe)


def _text(details: Any) -> str:
    return details.decode(errors="replace") if isinstance(details, bytes) else str(details)
