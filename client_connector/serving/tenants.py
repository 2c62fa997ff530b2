"""One serving engine for many tenants: ASGI middleware that knows the caller of each request.

The caller is known by `Authorization: Bearer ls_...`, a token of the LoRA server, or by a header that a gateway in
front sets, where LORA_SERVER_TENANT_HEADER names it. An unknown caller gets nothing but health. The engine acquires on
behalf of the tenant: it knows the adapter as `tenant|name`; no adapter's name contains a `|`.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from contextlib import closing
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import structlog

from client_connector.directory import AdapterDirectory, as_uri
from client_connector.serving.http import AsgiApp, Message, Receive, Send
from client_connector.serving.settings import ADDRESS, OF
from lora_server.errors import ConfigError, LoraServerError, UnauthenticatedError
from lora_server.timings import DEFAULTS, Timings
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire.credentials import Credentials

TENANT_HEADER = "LORA_SERVER_TENANT_HEADER"
MAX_KNOWN_TOKENS = 4096
MAX_BODY_BYTES = 64 << 20
COMPUTE, PUBLISH, WATCH = (frozenset({"admin", one}) for one in ("engine", "publisher", "viewer"))
log = structlog.get_logger()


@dataclass(frozen=True)
class EngineApi:
    """The paths of an engine's API, by the kind of caller that may use them.

    `adapt` returns the body of a call to a compute path as the engine shall get it: the same object if it stays as it
    is. It raises RefusedCall for what the caller may not say.
    """

    health: frozenset[str]
    compute: frozenset[str]  # POST
    publish: frozenset[str]
    models: str
    metrics: str
    adapt: Callable[[Message, dict[str, Any], Caller], dict[str, Any]]  # ASGI scope, body, caller


class Caller(NamedTuple):
    """The caller of a request; the operator's tenant is ''. `token` is what the caller showed."""

    tenant: str
    role: str
    token: str = ""


CALLER: ContextVar[Caller | None] = ContextVar("lora_server_caller", default=None)


def callers_tenant() -> str:
    """Return the tenant of the call that is being answered; '' for the operator's, and without the middleware."""
    caller = CALLER.get()
    return "" if caller is None else caller.tenant


def add_as_caller(name: str, path: str) -> pb.Adapter:
    """Add an adapter with the caller's token: it is its tenant's, and the server checks its rights."""
    with closing(_as_caller()) as directory:
        return directory.add(name, as_uri(path))


def remove_as_caller(name: str) -> None:
    """Remove an adapter with the caller's token."""
    with closing(_as_caller()) as directory:
        directory.remove(name)


def _as_caller() -> AdapterDirectory:
    caller = CALLER.get()
    assert caller is not None
    return AdapterDirectory(os.environ[ADDRESS], Credentials.of(os.environ, caller.token))


class RefusedCall(Exception):
    """A call that the middleware answers with an error, without the engine."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class TenantMiddleware:
    """ASGI middleware in front of an engine's API. Raises ConfigError where no server is configured."""

    def __init__(self, app: AsgiApp, api: EngineApi, timings: Timings = DEFAULTS) -> None:
        address = os.environ.get(ADDRESS)
        if not address:
            raise ConfigError(f"{ADDRESS}: got none, expected the LoRA server that knows the tokens")
        self._app, self._api, self._timings = app, api, timings
        self._directory = AdapterDirectory(address, timings=timings)
        self._header = os.environ.get(TENANT_HEADER, "").lower().encode()
        self._known: dict[str, tuple[float, pb.Caller | None]] = {}  # token -> (time until which it is known, caller)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Refuse a request, or pass it on as its tenant's."""
        if scope["type"] == "lifespan" or (scope["type"] == "http" and scope["path"] in self._api.health):
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # a websocket, which is never accepted
            await send({"type": "websocket.close", "code": 1008})
            return
        try:
            caller = await self._caller(scope)
            receive = await self._checked(scope, receive, caller)
        except RefusedCall as refusal:
            await _answer(send, refusal)
            return
        CALLER.set(caller)
        await self._app(scope, receive, send)

    async def _caller(self, scope: Message) -> Caller:
        headers: dict[bytes, bytes] = {name.lower(): value for name, value in scope["headers"]}
        scheme, _, token = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        if scheme.lower() == "bearer" and token:
            found = await self._look_up(token.strip())
            if found is not None:
                return Caller(found.tenant, found.role, token.strip())
        elif self._header and (tenant := headers.get(self._header, b"").decode("latin-1")):
            return Caller(tenant, "engine")
        raise RefusedCall(401, "got no valid token, expected Authorization: Bearer ls_...")

    async def _look_up(self, token: str) -> pb.Caller | None:
        until, caller = self._known.get(token, (0.0, None))
        if until > time.monotonic():
            return caller
        try:
            caller = await asyncio.to_thread(self._directory.who, token)
        except UnauthenticatedError:
            caller = None
        except LoraServerError as error:
            log.warning("cannot look up a token", reason=str(error))
            raise RefusedCall(503, "the LoRA server that knows the tokens does not answer; try again") from None
        if len(self._known) >= MAX_KNOWN_TOKENS:
            self._known.clear()
        seconds = self._timings.token_known if caller else self._timings.token_unknown
        self._known[token] = time.monotonic() + seconds, caller
        return caller

    async def _checked(self, scope: Message, receive: Receive, caller: Caller) -> Receive:
        path, method, api = scope["path"].rstrip("/") or "/", scope["method"], self._api
        if not caller.tenant and caller.role == "admin":
            pass  # the operator's admin may use every path of the engine
        elif not caller.tenant and path == api.metrics:
            _require(caller, WATCH, path)
        elif path in api.publish:
            _require(caller, PUBLISH, path)
        elif path in api.compute and method == "POST":
            _require(caller, COMPUTE, path)
        elif path != api.models or method != "GET":
            raise RefusedCall(
                403, f"{method} {path[:100]}: not for tenants; expected one of {api.models}, /v1/completions, ..."
            )
        return await self._adapted(scope, receive, caller) if path in api.compute else receive

    async def _adapted(self, scope: Message, receive: Receive, caller: Caller) -> Receive:
        """Read the body, have the engine's `adapt` change it, and hand it on."""
        body = await _body(receive)
        try:
            asked = json.loads(body or b"{}")
            model = asked.get("model") or ""
        except (ValueError, AttributeError, RecursionError):
            raise RefusedCall(400, "got no JSON object, expected one with a model") from None
        if not isinstance(model, str) or OF in model:
            raise RefusedCall(400, f"model: got {str(model)[:100]!r}, expected a name")
        adapted = self._api.adapt(scope, asked, caller)
        if adapted is not asked:
            body = json.dumps(adapted).encode()
        scope["headers"] = [one for one in scope["headers"] if one[0].lower() != b"content-length"]
        scope["headers"].append((b"content-length", str(len(body)).encode()))
        sent = False

        async def again() -> Message:
            nonlocal sent
            if sent:
                return await receive()
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        return again


def _require(caller: Caller, roles: frozenset[str], path: str) -> None:
    if caller.role not in roles:
        raise RefusedCall(403, f"{path}: got a token of role {caller.role}, expected {' or '.join(sorted(roles))}")


async def _body(receive: Receive) -> bytes:
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise RefusedCall(400, "the request ended early")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MAX_BODY_BYTES:
            raise RefusedCall(413, f"got more than {MAX_BODY_BYTES} bytes")
        if not message.get("more_body"):
            return b"".join(parts)


async def _answer(send: Send, refusal: RefusedCall) -> None:
    """Send an error as OpenAI's API writes it."""
    error = {"message": str(refusal), "type": "invalid_request_error", "param": None, "code": refusal.status}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if refusal.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
