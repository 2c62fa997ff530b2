"""Bootstrap of a node's child processes: read the configuration from stdin; exit when stdin closes."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol

import structlog

from lora_server import logs, telemetry
from lora_server.config import ProcessConfig
from lora_server.daemon.forks import call_myself
from lora_server.daemon.processes import EXIT_REFUSED, Up, say
from lora_server.daemon.signals import on_signals
from lora_server.errors import LoraServerError
from lora_server.sources.cache import DiskCache
from lora_server.sources.fetch import Fetcher, FromNode0
from lora_server.sources.urls import prefixes
from lora_server.spec import ModelSpec

DISK_CACHE = "disk-cache"  # its directory, where --disk-cache does not name one
log = structlog.get_logger()


class Process(Protocol):
    """The object that a child process runs."""

    def run(self) -> int:
        """Say that the process is up, serve until stopped, and return the exit code."""
        ...

    def stop(self) -> None:
        """Stop `run`, from any thread."""
        ...


def open_fetcher(config: ProcessConfig, spec: ModelSpec, from_node0: FromNode0 | None = None) -> Fetcher:
    """Open a fetcher into the disk cache that all processes of the node share. Raises ConfigError."""
    assert config.disk_cache is not None  # the node chose
    cache = DiskCache(config.disk_cache, config.disk_cache_size)
    return Fetcher(cache, spec, from_node0, prefixes(config.allow_source))


def _die(failure: threading.ExceptHookArgs) -> None:
    """End the process: without its listener, loader or stream it would only look alive."""
    log.critical("a thread died", thread=failure.thread.name if failure.thread else "", exc_info=failure.exc_value)
    os._exit(1)


def run_child(make: Callable[[ProcessConfig], Process]) -> None:
    """Run a child process until its end; never returns, since daemon threads hold grpc."""
    logs.configure()
    threading.excepthook = _die
    line = sys.stdin.buffer.readline()
    if not line:  # its node ended first
        os._exit(0)
    config = ProcessConfig.model_validate_json(line)
    call_myself(f"lora-shard-{config.shard}" if config.shard >= 0 else "lora-controller")
    logs.configure(form=config.log_format)
    code = 1
    try:
        _trace(config)
        process = make(config)
        on_signals((signal.SIGTERM,), process.stop)
        threading.Thread(target=_watch_parent, args=(process, config.timings.stuck), daemon=True, name="parent").start()
        code = process.run()
    except LoraServerError as error:
        say(Up(refused=str(error)))
        log.error("cannot start", shard=config.shard, error=str(error))
        code = EXIT_REFUSED
    except Exception:
        log.exception("failed", shard=config.shard)
    telemetry.shutdown()
    os._exit(code)


def _trace(config: ProcessConfig) -> None:
    """Configure traces if the node has a collector; raises ConfigError."""
    name = "controller" if config.shard < 0 else f"shard {config.shard}"
    if config.otlp_endpoint:
        telemetry.configure("lora-server", config.otlp_endpoint, **{"service.instance.id": name})
    else:
        telemetry.configure_from(os.environ, "lora-server")


def _watch_parent(process: Process, seconds: float) -> None:
    """Stop when stdin closes, and exit after `seconds`: a living parent would have killed a stuck child by then."""
    sys.stdin.buffer.read()
    process.stop()
    time.sleep(seconds)
    os._exit(1)
