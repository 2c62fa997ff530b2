"""/livez, /readyz and /metrics over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lora_server.control.controller import Controller

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse

# metric, help, field of ShardStats, factor
_COUNTERS = (
    ("lora_server_steps", "Steps served", "steps", 1.0),
    ("lora_server_failed_steps", "Steps answered with an error", "failed", 1.0),
    ("lora_server_entries", "Rows times experts computed", "entries", 1.0),
    ("lora_server_request_bytes", "Bytes of requests served", "request_bytes", 1.0),
    ("lora_server_response_bytes", "Bytes of responses pushed", "response_bytes", 1.0),
    ("lora_server_wait_seconds", "Time steps waited on their shard", "wait_ns", 1e-9),
    ("lora_server_compute_seconds", "Time shards computed", "compute_ns", 1e-9),
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
        for shard, claim in controller.shards.claims.items():
            up.add_metric([str(shard)], float(shard not in missing))
            restarts.add_metric([str(shard)], max(0, claim - 1))
        weights = GaugeMetricFamily("lora_server_weight_bytes", "Adapter weights held", labels=["shard"])
        for shard, handle in live.items():
            weights.add_metric([str(shard)], handle.stats.weight_bytes)
        yield from (up, restarts, weights)
        for name, text, field, factor in _COUNTERS:
            family = CounterMetricFamily(name, text, labels=["shard"])
            for shard, handle in live.items():
                family.add_metric([str(shard)], getattr(handle.stats, field) * factor)
            yield family
        yield GaugeMetricFamily("lora_server_clients", "Clients that hold a lease", len(controller.clients.leases))
        yield GaugeMetricFamily("lora_server_adapters", "Adapters registered", len(controller.adapters))


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Nothing: health checks are not news."""


class HttpServer:
    """Serves in threads of its own until closed. `not_ready` says why not, or ''."""

    def __init__(self, host: str, port: int, not_ready: Callable[[], str], collector: Collector | None) -> None:
        registry = CollectorRegistry()
        if collector is not None:
            registry.register(collector)
        metrics = make_wsgi_app(registry)

        def app(environ: dict[str, Any], start_response: StartResponse) -> Any:
            path = environ["PATH_INFO"]
            if path == "/metrics":
                return metrics(environ, start_response)
            reason = not_ready() if path == "/readyz" else "" if path == "/livez" else None
            status = "404 Not Found" if reason is None else "503 Service Unavailable" if reason else "200 OK"
            start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
            return [f"{reason or ('ok' if reason == '' else 'try /livez, /readyz or /metrics')}\n".encode()]

        self._server = make_server(host, port, app, server_class=_Server, handler_class=_Quiet)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
