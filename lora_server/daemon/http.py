"""The HTTP port of a process, for as long as it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from prometheus_client.registry import Collector

from lora_server.config import ServeConfig
from lora_server.control.http import HttpServer
from lora_server.errors import ConfigError


def listen_http(
    config: ServeConfig, stack: contextlib.ExitStack, not_ready: Callable[[], str], collector: Collector | None = None
) -> HttpServer:
    """Serve it until `stack` ends; raises ConfigError where it cannot be had."""
    try:
        server = HttpServer(config.http.host, config.http.port, not_ready, collector)
    except OSError as error:
        raise ConfigError(f"--http {config.http}: {error.strerror or error}; choose another port") from error
    stack.callback(server.close)
    return server
