"""Answers of an engine's HTTP front end to errors of ours: one table of statuses, and Retry-After."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any, NamedTuple

from client_connector.serving.plan import Failure
from lora_server.errors import (
    AdapterError,
    ConfigError,
    LimitError,
    LoraServerError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnknownAdapterError,
)

RETRY_AFTER_SECONDS = b"1"  # a controller that restarts is usually back by then
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Message, Receive, Send], Awaitable[None]]


class HttpError(NamedTuple):
    """A status, and the name of OpenAI's API for it."""

    status: HTTPStatus
    kind: str


# the first class that fits counts
ANSWERS: tuple[tuple[type[LoraServerError], HttpError], ...] = (
    (UnknownAdapterError, HttpError(HTTPStatus.NOT_FOUND, "NotFoundError")),
    (PermissionDeniedError, HttpError(HTTPStatus.FORBIDDEN, "PermissionDeniedError")),
    (UnauthenticatedError, HttpError(HTTPStatus.FORBIDDEN, "PermissionDeniedError")),
    (LimitError, HttpError(HTTPStatus.TOO_MANY_REQUESTS, "RateLimitError")),
    (AdapterError, HttpError(HTTPStatus.BAD_REQUEST, "BadRequestError")),
    (ConfigError, HttpError(HTTPStatus.BAD_REQUEST, "BadRequestError")),
    (LoraServerError, HttpError(HTTPStatus.SERVICE_UNAVAILABLE, "ServiceUnavailableError")),
)


def answer_to(error: LoraServerError) -> HttpError:
    """Return the answer to a call that an error of ours ends before an engine computes anything."""
    return next(answer for kind, answer in ANSWERS if isinstance(error, kind))


def status_of(failure: Failure) -> HTTPStatus:
    """Return the status of a request that failed; gateways retry a 503, after which the same request may succeed."""
    if failure.code == UnknownAdapterError.code:
        return HTTPStatus.NOT_FOUND
    return HTTPStatus.SERVICE_UNAVAILABLE if failure.passes else HTTPStatus.INTERNAL_SERVER_ERROR


def with_retry_after(app: AsgiApp, is_ours: Callable[[], bool]) -> AsgiApp:
    """Wrap an ASGI application: its answers of 503 get a Retry-After while `is_ours` holds."""

    async def wrapped(scope: Message, receive: Receive, send: Send) -> None:
        async def send_with_header(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 503 and is_ours():
                headers = list(message.get("headers", ()))
                if all(name.lower() != b"retry-after" for name, _ in headers):
                    message = {**message, "headers": [*headers, (b"retry-after", RETRY_AFTER_SECONDS)]}
            await send(message)

        await app(scope, receive, send_with_header)

    return wrapped
