"""/livez, /readyz and /metrics over HTTP, and what else the caller has to say."""

from __future__ import annotations

import asyncio
import functools
import socket
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping

import structlog
import uvicorn
from anyio import CapacityLimiter, to_thread
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from lora_server.control.admission import Admission
from lora_server.control.controller import Controller
from lora_server.control.http_disk import disk_metrics
from lora_server.control.http_limits import MAX_CONNECTIONS, limited, one_line
from lora_server.control.tally import Tally
from lora_server.errors import AdapterFormatError

BLOCKING_THREADS = 4  # per path
CLOSE_SECONDS = 5.0
log = structlog.get_logger()
Answer = Callable[[Request], Response]

# metric, help, field of ShardStats, factor
_COUNTERS = (
    ("lora_server_steps", "Steps served", "steps", 1.0),
    ("lora_server_failed_steps", "Steps answered with an error", "failed", 1.0),
    ("lora_server_entries", "Rows times experts computed", "entries", 1.0),
    ("lora_server_request_bytes", "Bytes of requests served", "request_bytes", 1.0),
    ("lora_server_response_bytes", "Bytes of responses pushed", "response_bytes", 1.0),
    ("lora_server_wait_seconds", "Time steps waited on their shard", "wait_ns", 1e-9),
    ("lora_server_compute_seconds", "Time shards computed", "compute_ns", 1e-9),
    ("lora_server_loads", "Adapters brought into the device pool", "loads", 1.0),
    ("lora_server_loaded_bytes", "Bytes brought into the device pool", "loaded_bytes", 1.0),
    ("lora_server_preloads", "Adapters brought into idle memory before anybody asked", "preloads", 1.0),
    ("lora_server_preload_hits", "Of these, those that were used", "preload_hits", 1.0),
    ("lora_server_evictions", "Adapters that made room in the device pool", "evictions", 1.0),
)
# metric, help, fields of ShardStats for the device pool and for the host pool
_POOLS = (
    ("lora_server_weight_bytes", "Bytes that adapters take of a pool", "weight_bytes", "host_bytes"),
    ("lora_server_pool_bytes", "Bytes of a pool", "total_bytes", "host_total_bytes"),
)


class ControllerCollector(Collector):
    """The controller's state as Prometheus metrics, made when asked for."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def collect(self) -> Iterable[Metric]:
        """One family per quantity, labelled by shard."""
        controller = self._controller
        live = controller.shards.live()
        missing = set(controller.shards.missing())
        up = GaugeMetricFamily("lora_server_shard_up", "1 where the shard serves", labels=["shard"])
        restarts = CounterMetricFamily("lora_server_shard_restarts", "Restarts of a shard", labels=["shard"])
        for shard, count in controller.shards.restarts.items():
            up.add_metric([str(shard)], float(shard not in missing))
            restarts.add_metric([str(shard)], max(0, count))
        yield from (up, restarts)
        for name, text, device, host in _POOLS:
            pool = GaugeMetricFamily(name, text, labels=["shard", "tier"])
            for shard, handle in live.items():
                pool.add_metric([str(shard), "device"], getattr(handle.stats, device))
                pool.add_metric([str(shard), "host"], getattr(handle.stats, host))
            yield pool
        for name, text, field, factor in _COUNTERS:
            family = CounterMetricFamily(name, text, labels=["shard"])
            for shard, handle in live.items():
                family.add_metric([str(shard)], getattr(handle.stats, field) * factor)
            yield family
        ignored = CounterMetricFamily("lora_server_prefetches_ignored", "Prefetches ignored, by why", labels=["why"])
        for why, times in sorted(controller.clients.prefetches.ignored.items()):
            ignored.add_metric([why], times)
        yield ignored
        yield GaugeMetricFamily("lora_server_clients", "Clients that hold a lease", len(controller.clients.leases))
        yield GaugeMetricFamily("lora_server_adapters", "Adapters registered", len(controller.adapters))
        yield from _admission(controller.adapters.admission)
        yield _holds(controller.adapters.tally)
        yield from disk_metrics(controller)
        help_text = "Adapters of --adapters that are refused, by the error's code"
        refused = GaugeMetricFamily("lora_server_adapters_refused", help_text, labels=["code"])
        codes = Counter({AdapterFormatError.code: 0})  # there from the start, for alerts
        codes.update(one.code for one in controller.adapters.refused())
        for code, count in codes.items():
            refused.add_metric([code], count)
        yield refused


def _admission(admission: Admission) -> Iterable[Metric]:
    counters = admission.counters
    admitted = CounterMetricFamily("lora_server_admissions", "Requests that got their adapters", labels=["kind"])
    admitted.add_metric(["immediate"], counters.immediate)
    admitted.add_metric(["queued"], counters.queued)
    waited = "Time that queued requests waited until they were admitted"
    yield from (
        admitted,
        SummaryMetricFamily("lora_server_admission_wait_seconds", waited, counters.queued, counters.wait_seconds),
        GaugeMetricFamily("lora_server_admission_queue", "Requests that wait for a place", admission.num_queued),
        GaugeMetricFamily("lora_server_active_adapters", "Adapters that clients hold", len(admission.room.active)),
    )


def _holds(tally: Tally) -> Metric:
    text = "Time that requests held an adapter; (other): those without a line of their own"
    held = SummaryMetricFamily("lora_server_adapter_hold_seconds", text, labels=["adapter"])
    own, others = tally.sums()
    for name, sums in (*own.items(), ("(other)", others)):
        held.add_metric([name], sums.holds, sums.seconds)
    return held


class HttpServer:
    """Serves until closed. `not_ready` says why not, or ''; it and `more`, by path, may block.

    Raises OSError where it cannot listen.
    """

    def __init__(
        self,
        host: str,
        port: int,
        not_ready: Callable[[], str],
        collector: Collector | None,
        more: Mapping[str, Answer] = {},
    ) -> None:
        registry = CollectorRegistry()
        if collector is not None:
            registry.register(collector)
        self._socket = _listen(host, port)
        self.port: int = self._socket.getsockname()[1]
        self._server = uvicorn.Server(limited(_app(not_ready, registry, more)))
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception:
            log.exception("the HTTP server failed")

    async def _serve(self) -> None:
        asyncio.get_running_loop().set_exception_handler(one_line)
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            self._socket.close()
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()
            await asyncio.sleep(0)  # the loop drops them before it closes

    def close(self) -> None:
        """Stop listening; answers on their way have a second. Idempotent."""
        self._server.should_exit = True
        self._thread.join(CLOSE_SECONDS)


def _listen(host: str, port: int) -> socket.socket:
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return socket.create_server(address[:2], family=family, backlog=MAX_CONNECTIONS)


# -- what it answers


def _app(not_ready: Callable[[], str], registry: CollectorRegistry, more: Mapping[str, Answer]) -> Starlette:
    async def livez(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    def readyz(_: Request) -> Response:
        reason = not_ready()
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
    routes = [Route("/livez", livez), *(Route(path, _in_thread(answer)) for path, answer in blocking.items())]
    app = Starlette(routes=routes, middleware=[Middleware(GZipMiddleware)], exception_handlers={404: elsewhere})
    app.router.redirect_slashes = False
    return app


def _in_thread(answer: Answer) -> Callable[[Request], Awaitable[Response]]:
    """An endpoint that may block, and not the loop: BLOCKING_THREADS at a time. Not waited for at the end."""
    limiter = CapacityLimiter(BLOCKING_THREADS)

    async def endpoint(request: Request) -> Response:
        call = functools.partial(answer, request)
        return await to_thread.run_sync(call, abandon_on_cancel=True, limiter=limiter)

    return endpoint
