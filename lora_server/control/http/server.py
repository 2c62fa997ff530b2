"""An HTTP server for /livez, /readyz, /metrics and further paths of the process that runs it."""

from __future__ import annotations

import asyncio
import functools
import ssl
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol, cast

import structlog
import uvicorn
from anyio import CapacityLimiter, to_thread
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from lora_server.address import Address
from lora_server.control.connections import ConnectionLimit, Peer
from lora_server.control.http.limits import MAX_CONNECTIONS, limited, one_line
from lora_server.errors import LoraServerError, PermissionDeniedError, UnauthenticatedError
from lora_server.timings import Timings

BLOCKING_THREADS = 4  # per path
CLOSE_SECONDS = 5.0
log = structlog.get_logger()
Answer = Callable[[Request], Response]
LOGIN = {"WWW-Authenticate": 'Basic realm="lora-server", charset="UTF-8"'}  # a browser's password is the token


class HttpGate(Protocol):
    """Decides which paths a caller may see. Both methods may block."""

    def admit(self, call: str, authorization: str) -> object:
        """Admit a call; raises LoraServerError if its token does not allow it."""

    def allows(self, call: str, authorization: str) -> bool:
        """Return whether `admit` would admit a call; used to choose what a page shows."""


class HttpServer:
    """An HTTP server, which serves until closed. `not_ready` returns why the process is not ready, or ''; what follows
    its first colon may name adapters and hosts, and needs a token. It and the handlers of `more`, by path, may block.

    Raises OSError where it cannot listen.
    """

    def __init__(
        self,
        host: str,
        port: int,
        not_ready: Callable[[], str],
        collector: Collector | None,
        more: Mapping[str, Answer] = {},
        gate: HttpGate | None = None,
        tls: ssl.SSLContext | None = None,
        request_seconds: float = Timings.http_request,
        look_seconds: float = Timings.connection_look,
        held: bool = False,
    ) -> None:
        """`held`: a socket of this user that does not listen already holds the port."""
        registry = CollectorRegistry()
        if collector is not None:
            registry.register(collector)
        self._socket, self._look_seconds = Address(host, port).listen(MAX_CONNECTIONS, held=held), look_seconds
        self.port: int = self._socket.getsockname()[1]
        config = limited(_app(not_ready, registry, more, gate), request_seconds)
        if tls is not None:
            config.load()
            config.ssl = tls
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception:
            log.exception("the HTTP server failed")

    async def _serve(self) -> None:
        asyncio.get_running_loop().set_exception_handler(one_line())
        bounding = asyncio.ensure_future(self._bound_handshakes())
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            bounding.cancel()
            self._socket.close()
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()
            await asyncio.sleep(0)  # the loop drops them before it closes

    async def _bound_handshakes(self) -> None:
        """Limit connections that are still in the TLS handshake, which uvicorn does not count. Runs until cancelled."""
        limit = ConnectionLimit(self.port)
        while self._server.config.ssl is not None:
            here = [cast(H11Protocol, one).client for one in self._server.server_state.connections]
            limit.proven = {Peer.of(*client) for client in here if client}
            limit.enforce()
            await asyncio.sleep(self._look_seconds)

    def close(self) -> None:
        """Stop listening; answers on their way have a second. Idempotent."""
        self._server.should_exit = True
        self._thread.join(CLOSE_SECONDS)


# -- what it answers


def _app(
    not_ready: Callable[[], str], registry: CollectorRegistry, more: Mapping[str, Answer], gate: HttpGate | None
) -> Starlette:
    async def livez(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    def readyz(request: Request) -> Response:
        reason = not_ready()
        if reason and gate is not None and not gate.allows("/status.json", _shown(request)):
            reason = f"{reason.partition(':')[0]}; a token of the operator shows more"
        return PlainTextResponse(f"{reason or 'ok'}\n", 503 if reason else 200)

    def metrics(request: Request) -> Response:
        try:
            encode, content_type = choose_encoder(request.headers.get("accept", ""))
        except (TypeError, ValueError):  # it compares whatever stands after "version="
            return PlainTextResponse("Accept: not understood\n", 400)
        return Response(encode(registry), headers={"Content-Type": content_type})

    async def elsewhere(_: Request, __: Exception) -> Response:
        return PlainTextResponse(f"try {', '.join(['/livez', *blocking])}\n", 404)

    blocking: dict[str, Answer] = {"/readyz": readyz, "/metrics": metrics, **more}
    answers = {path: _gated(path, answer, gate) for path, answer in blocking.items()}
    routes = [Route("/livez", livez), *(Route(path, _in_thread(answer)) for path, answer in answers.items())]
    app = Starlette(routes=routes, middleware=[Middleware(GZipMiddleware)], exception_handlers={404: elsewhere})
    app.router.redirect_slashes = False
    return app


def _shown(request: Request) -> str:
    return request.headers.get("authorization", "")


def _gated(path: str, answer: Answer, gate: HttpGate | None) -> Answer:
    """Wrap a handler so that callers without the right get 401 or 403."""
    if gate is None:
        return answer

    def gated(request: Request) -> Response:
        try:
            gate.admit(path, _shown(request))
        except UnauthenticatedError as error:
            return PlainTextResponse(f"{error}\n", 401, LOGIN)
        except PermissionDeniedError as error:
            return PlainTextResponse(f"{error}\n", 403)
        except LoraServerError as error:  # tokens cannot be checked now
            return PlainTextResponse(f"{error}\n", 503)
        return answer(request)

    return gated


def _in_thread(answer: Answer) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint that runs a handler in one of BLOCKING_THREADS threads, so that it does not block the loop.

    The server does not wait for the threads at its end.
    """
    limiter = CapacityLimiter(BLOCKING_THREADS)

    async def endpoint(request: Request) -> Response:
        call = functools.partial(answer, request)
        return await to_thread.run_sync(call, abandon_on_cancel=True, limiter=limiter)

    return endpoint
