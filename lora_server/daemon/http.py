"""The HTTP port of a process, for as long as it runs; and what a node above rank 0 counts itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from lora_server.access.tls import ServerCertificate
from lora_server.config import ServeConfig
from lora_server.control.http.server import Answer, HttpGate, HttpServer
from lora_server.control.reports.build import build_info, certificate_expiry
from lora_server.daemon.guard import cannot_listen
from lora_server.daemon.placements import NodeShards
from lora_server.spec import ModelSpec


def listen_http(
    config: ServeConfig,
    stack: contextlib.ExitStack,
    not_ready: Callable[[], str],
    collector: Collector | None = None,
    more: Mapping[str, Answer] = {},
    gate: HttpGate | None = None,
    certificate: ServerCertificate | None = None,
) -> HttpServer:
    """Serve it until `stack` ends; raises ConfigError where it cannot be had."""
    tls = certificate.http() if certificate is not None else None
    host, port, seconds = *config.http, config.timings.http_request
    try:  # rank 0 holds the port for its controller
        server = HttpServer(host, port, not_ready, collector, more, gate, tls, seconds, held=not config.node_rank)
    except OSError as error:
        raise cannot_listen("--http", config.http, error) from error
    stack.callback(server.close)
    return server


class NodeCollector(Collector):
    """Metrics of a node above rank 0; rank 0 has all others."""

    def __init__(
        self,
        spec: ModelSpec,
        config: ServeConfig,
        shards: NodeShards,
        certificate: ServerCertificate | None = None,
    ) -> None:
        self._spec, self._config, self._shards, self._certificate = spec, config, shards, certificate

    def collect(self) -> Iterable[Metric]:
        """Yield the build, the certificate's expiry and the restarts of shards."""
        yield build_info(self._spec, self._shards.layout, self._config.replicas)
        yield certificate_expiry(self._certificate)
        restarts = CounterMetricFamily(
            "lora_server_node_restarts", "Restarts of a node's shard", labels=["node", "shard"]
        )
        for shard, count in self._shards.restarts().items():
            restarts.add_metric([str(self._config.node_rank), str(shard)], count)
        yield restarts
