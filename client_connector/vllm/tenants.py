"""One vLLM for many tenants: `vllm serve ... --middleware client_connector.vllm.tenants.Tenants`.

Who asks is known by `Authorization: Bearer ls_...`, a token of the LoRA server's, or by a header that a gateway in
front sets, where LORA_SERVER_TENANT_HEADER names it. Whoever is nobody gets nothing but health. A request's model
becomes `tenant|name`, and so the engine acquires on behalf of its tenant; no adapter's name has a `|` in it.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from typing import Any, NamedTuple

import structlog

from client_connector.directory import Directory
from client_connector.serving.settings import ADDRESS, OF
from lora_server.errors import ConfigError, LoraServerError, UnauthenticatedError
from lora_server.timings import DEFAULTS, Timings
from lora_server.wire import lora_server_pb2 as pb

TENANT_HEADER = "LORA_SERVER_TENANT_HEADER"
MOST_KNOWN = 4096
MAX_BODY = 64 << 20
OPEN = frozenset({"/health", "/ping"})
METRICS, MODELS, LOAD, UNLOAD = "/metrics", "/v1/models", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
COMPUTE, PUBLISH, WATCH = (frozenset({"admin", one}) for one in ("engine", "publisher", "viewer"))
ASKS = frozenset(
    {
        *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/score"),
        *("/v1/rerank", "/v2/rerank", "/tokenize", "/detokenize", "/pooling", "/classify", "/score", "/rerank"),
        *("/v1/chat/completions/render", "/v1/completions/render", "/invocations"),
    }
)
log = structlog.get_logger()
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Caller(NamedTuple):
    """Who asks; the operator is ''. `token` is what it showed."""

    tenant: str
    role: str
    token: str = ""


CALLER: ContextVar[Caller | None] = ContextVar("lora_server_caller", default=None)


class Refusal(Exception):
    """An answer that vLLM is not asked for."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Tenants:
    """ASGI. Raises ConfigError where there is no server."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], timings: Timings = DEFAULTS) -> None:
        address = os.environ.get(ADDRESS)
        if not address:
            raise ConfigError(f"{ADDRESS}: got none, expected the LoRA server that knows the tokens")
        self._app, self._directory, self._timings = app, Directory(address, timings=timings), timings
        self._header = os.environ.get(TENANT_HEADER, "").lower().encode()
        self._known: dict[str, tuple[float, pb.Caller | None]] = {}  # by token, until when

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse it, or hand it on as its tenant's."""
        if scope["type"] == "lifespan" or (scope["type"] == "http" and scope["path"] in OPEN):
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # a websocket that is never accepted
            await send({"type": "websocket.close", "code": 1008})
            return
        try:
            caller = await self._caller(scope)
            receive = await self._checked(scope, receive, caller)
        except Refusal as refusal:
            await _answer(send, refusal)
            return
        CALLER.set(caller)
        await self._app(scope, receive, send)

    async def _caller(self, scope: Scope) -> Caller:
        headers: dict[bytes, bytes] = {name.lower(): value for name, value in scope["headers"]}
        scheme, _, token = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        if scheme.lower() == "bearer" and token:
            found = await self._who(token.strip())
            if found is not None:
                return Caller(found.tenant, found.role, token.strip())
        elif self._header and (tenant := headers.get(self._header, b"").decode("latin-1")):
            return Caller(tenant, "engine")
        raise Refusal(401, "got no token that is good, expected Authorization: Bearer ls_...")

    async def _who(self, token: str) -> pb.Caller | None:
        until, caller = self._known.get(token, (0.0, None))
        if until > time.monotonic():
            return caller
        try:
            caller = await asyncio.to_thread(self._directory.who, token)
        except UnauthenticatedError:
            caller = None
        except LoraServerError as error:
            log.warning("who asks cannot be known now", reason=str(error))
            raise Refusal(503, "the LoRA server that knows the tokens does not answer; try again") from None
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
        seconds = self._timings.token_known if caller else self._timings.token_unknown
        self._known[token] = time.monotonic() + seconds, caller
        return caller

    async def _checked(self, scope: Scope, receive: Receive, caller: Caller) -> Receive:
        path, method = scope["path"].rstrip("/") or "/", scope["method"]
        if not caller.tenant and caller.role == "admin":
            pass  # the operator's admin may all that vLLM can
        elif not caller.tenant and path == METRICS:
            _require(caller, WATCH, path)
        elif path in (LOAD, UNLOAD):
            _require(caller, PUBLISH, path)
        elif not (path in ASKS and method == "POST") and not (path == MODELS and method == "GET"):
            raise Refusal(
                403, f"{method} {path[:100]}: not for tenants; expected one of {MODELS}, /v1/completions, ..."
            )
        elif path in ASKS:
            _require(caller, COMPUTE, path)
        return await self._as_tenants(scope, receive, caller) if path in ASKS else receive

    async def _as_tenants(self, scope: Scope, receive: Receive, caller: Caller) -> Receive:
        """The same request, with the tenant in front of the model's name; of the base model nothing is changed."""
        body = await _body(receive)
        try:
            asked = json.loads(body or b"{}")
            model = asked.get("model") or ""
        except (ValueError, AttributeError, RecursionError):
            raise Refusal(400, "got no JSON object, expected one with a model") from None
        if not isinstance(model, str) or OF in model:
            raise Refusal(400, f"model: got {str(model)[:100]!r}, expected a name")
        if caller.tenant and model and not scope["app"].state.openai_serving_models.is_base_model(model):
            asked["model"] = f"{caller.tenant}{OF}{model}"
            body = json.dumps(asked).encode()
        scope["headers"] = [one for one in scope["headers"] if one[0].lower() != b"content-length"]
        scope["headers"].append((b"content-length", str(len(body)).encode()))
        sent = False

        async def again() -> MutableMapping[str, Any]:
            nonlocal sent
            if sent:
                return await receive()
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        return again


def _require(caller: Caller, roles: frozenset[str], path: str) -> None:
    if caller.role not in roles:
        raise Refusal(403, f"{path}: got a token of role {caller.role}, expected {' or '.join(sorted(roles))}")


async def _body(receive: Receive) -> bytes:
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise Refusal(400, "the request ended early")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MAX_BODY:
            raise Refusal(413, f"got more than {MAX_BODY} bytes")
        if not message.get("more_body"):
            return b"".join(parts)


async def _answer(send: Send, refusal: Refusal) -> None:
    """As vLLM writes errors."""
    error = {"message": str(refusal), "type": "invalid_request_error", "param": None, "code": refusal.status}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if refusal.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
