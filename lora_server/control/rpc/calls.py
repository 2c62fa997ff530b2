"""Interceptor of all clients' calls: gives each an id in the log and a span in traces, and counts refusals."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import grpc
import structlog
from typing_extensions import override

from lora_server import telemetry
from lora_server.logs import Repeats
from lora_server.wire.credentials import CODE_KEY
from lora_server.wire.rpc import REQUEST_KEY

UNTRACED = ("Heartbeat", "Await", "Prefetch", "Release", "Cancel", "Register", "Files", "Read", "Check", "Status")
_GOOD_ID = re.compile(r"[\w.:-]{1,64}")
log = structlog.get_logger()


class Calls(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Observes the calls of one listener. `refused` counts errors by their code."""

    def __init__(self) -> None:
        self.refused: Counter[str] = Counter()
        self._complain = Repeats(log.info)

    @override
    async def intercept_service(self, continuation: Callable[..., Awaitable[Any]], details: Any) -> Any:
        """Wrap a method's handler. Each call runs in its own task, so context variables bound in it are the call's."""
        handler = await continuation(details)
        if handler is None or not inspect.iscoroutinefunction(handler.stream_stream):
            return handler
        method = details.method.rpartition("/")[2]
        known = dict(details.invocation_metadata or ())

        async def observed(requests: Any, context: Any) -> None:
            with self._observed(method, known, context):
                await handler.stream_stream(requests, context)

        return grpc.stream_stream_rpc_method_handler(observed)

    @contextlib.contextmanager
    def _observed(self, method: str, known: Mapping[str, Any], context: Any) -> Iterator[None]:
        request = str(known.get(REQUEST_KEY, ""))
        ours = {"request": request} if _GOOD_ID.fullmatch(request) else {}
        traced = (
            contextlib.nullcontext() if method in UNTRACED else telemetry.span(f"lora.server.{method}", known, **ours)
        )
        with structlog.contextvars.bound_contextvars(**ours), traced:
            try:
                yield
            finally:
                code = next((str(value) for key, value in context.trailing_metadata() or () if key == CODE_KEY), "")
                if code:
                    self.refused[code] += 1
                    error = context.details()
                    self._complain((method, code), "refused", method=method, code=code, error=_text(error))


def _text(details: Any) -> str:
    return details.decode(errors="replace") if isinstance(details, bytes) else str(details)
