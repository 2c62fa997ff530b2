"""The HTTP port of a process, for as long as it runs; and what a node above rank 0 counts itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from lora_server.access import tls as tls_files
from lora_server.config import ServeConfig
from lora_server.control.http.server import Answer, HttpGate, HttpServer
from lora_server.control.reports.build import build_info
from lora_server.errors import ConfigError
from lora_server.placement import Layout


def listen_http(
    config: ServeConfig,
    stack: contextlib.ExitStack,
    not_ready: Callable[[], str],
    collector: Collector | None = None,
    more: Mapping[str, Answer] = {},
    gate: HttpGate | None = None,
) -> HttpServer:
    """Serve it until `stack` ends; raises ConfigError where it cannot be had."""
    try:
        tls = tls_files.context(config) if config.tls_cert is not None else None
        host, port, seconds = *config.http, config.timings.http_request
        server = HttpServer(host, port, not_ready, collector, more, gate, tls, seconds)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (while")[0]
        raise ConfigError(
            f"--http {config.http}: cannot listen there ({reason}); expected a free port of a name or an address of "
            "this host, such as 127.0.0.1:7401"
        ) from error
    stack.callback(server.close)
    return server


class NodeCollector(Collector):
    """What a node above rank 0 knows itself; the rest is at rank 0."""

    def __init__(self, model: str, layout: Layout, node: int, restarts: Callable[[], dict[int, int]]) -> None:
        """`restarts`: of this node's shards."""
        self._model, self._layout, self._node, self._restarts = model, layout, node, restarts

    def collect(self) -> Iterable[Metric]:
        """What runs here, and what died."""
        yield build_info(self._model, self._layout)
        restarts = CounterMetricFamily(
            "lora_server_node_restarts", "Restarts of a node's shard", labels=["node", "shard"]
        )
        for shard, count in self._restarts().items():
            restarts.add_metric([str(self._node), str(shard)], count)
        yield restarts
