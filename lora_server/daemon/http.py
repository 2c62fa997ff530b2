"""The HTTP port of a process, for as long as it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

from prometheus_client.registry import Collector

from lora_server.config import ServeConfig
from lora_server.control.http import Answer, HttpServer
from lora_server.errors import ConfigError


def listen_http(
    config: ServeConfig,
    stack: contextlib.ExitStack,
    not_ready: Callable[[], str],
    collector: Collector | None = None,
    more: Mapping[str, Answer] = {},
) -> HttpServer:
    """Serve it until `stack` ends; raises ConfigError where it cannot be had."""
    try:
        server = HttpServer(config.http.host, config.http.port, not_ready, collector, more)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (while")[0]
        raise ConfigError(
            f"--http {config.http}: cannot listen there ({reason}); expected a free port of a name or an address of "
            "this host, such as 127.0.0.1:7401"
        ) from error
    stack.callback(server.close)
    return server
