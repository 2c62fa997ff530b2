"""What the processes that a node starts have in common: configuration from stdin, and an end with its other end."""

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
from lora_server.spec import ModelSpec

DISK_CACHE = "disk-cache"  # its directory, where --disk-cache does not name one
log = structlog.get_logger()


class Process(Protocol):
    """What runs in a child."""

    def run(self) -> int:
        """Until it is stopped; the exit code. Says that it is up."""
        ...

    def stop(self) -> None:
        """From any thread."""
        ...


def open_fetcher(config: ProcessConfig, spec: ModelSpec, from_node0: FromNode0 | None = None) -> Fetcher:
    """Into the disk cache that this process shares with the others of its node. Raises ConfigError."""
    assert config.disk_cache is not None  # the node chose
    return Fetcher(DiskCache(config.disk_cache, config.disk_cache_size), spec, from_node0)


def _die(failure: threading.ExceptHookArgs) -> None:
    """A process without its listener, loader or stream would only look alive: better restarted."""
    log.critical("a thread died", thread=failure.thread.name if failure.thread else "", exc_info=failure.exc_value)
    os._exit(1)


def run_child(make: Callable[[ProcessConfig], Process]) -> None:
    """Never returns: daemon threads hold grpc, and nothing is left to flush."""
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
    """Raises ConfigError."""
    name = "controller" if config.shard < 0 else f"shard {config.shard}"
    if config.otlp_endpoint:
        telemetry.configure("lora-server", config.otlp_endpoint, **{"service.instance.id": name})
    else:
        telemetry.configure_from(os.environ, "lora-server")


def _watch_parent(process: Process, seconds: float) -> None:
    """A parent that lives would have killed a stuck child before `seconds` are over."""
    sys.stdin.buffer.read()
    process.stop()
    time.sleep(seconds)
    os._exit(1)
