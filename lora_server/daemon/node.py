"""One `lora-server serve`: the node's shard processes and, on rank 0, controller, gRPC and HTTP."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import structlog

from lora_server import spec as specs
from lora_server.adapters import find_adapters
from lora_server.config import ServeConfig, split_address
from lora_server.control.controller import Controller, Settings
from lora_server.control.http import ControllerCollector, HttpServer
from lora_server.control.leases import Leases
from lora_server.control.prefetch import PrefetchListener
from lora_server.control.service import ControlServer
from lora_server.daemon.processes import ShardProcesses
from lora_server.daemon.shard_main import ShardSettings
from lora_server.errors import ConfigError, LoraServerError
from lora_server.placement import Layout, block

SWEEP_SECONDS = 0.5
GRACE_SECONDS = 1.0
log = structlog.get_logger()


class Node:
    """Started by its constructor, stopped by `close`; `wait` returns why it stopped ('' for a signal)."""

    def __init__(self, config: ServeConfig) -> None:
        self.config = config
        self.settings = _settings(config)
        self.stopped = threading.Event()
        self.failure = ""
        self.controller: Controller | None = None
        self._stack = contextlib.ExitStack()
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        config = self.config
        self._run_dir = self._stack.enter_context(_run_directory(config.data_dir))
        self.host = _advertised(config)
        controller_address = config.controller if config.node_rank else self._start_controller()
        http_host, http_port = split_address(config.http, "--http")
        collector = ControllerCollector(self.controller) if self.controller else None
        try:
            self.http = HttpServer(http_host, http_port, self._not_ready, collector)
        except OSError as error:
            raise ConfigError(f"--http {config.http}: {error.strerror or error}; choose another port") from error
        self._stack.callback(self.http.close)
        self.processes = ShardProcesses(self._shard_settings(controller_address), self._fail)
        self._stack.callback(self.processes.close)
        threading.Thread(target=self._background, name="background", daemon=True).start()

    def _start_controller(self) -> str:
        config = self.config
        controller = Controller(self.settings, Leases(config.lease_seconds))
        prefetch = PrefetchListener(self.host, controller.prefetch)
        self._stack.callback(prefetch.close)
        host, port = split_address(config.listen, "--listen")
        try:
            self.control = ControlServer(controller, f"{host}:{port}", prefetch.address)
        except RuntimeError as error:
            raise ConfigError(
                f"--listen {config.listen}: cannot listen there ({error}); choose another port"
            ) from error
        self._stack.callback(self.control.close, GRACE_SECONDS)
        self.controller = controller
        local = "127.0.0.1" if host in ("0.0.0.0", "") else "[::1]" if host == "::" else host
        return f"{local}:{self.control.port}"

    def _shard_settings(self, controller_address: str) -> list[ShardSettings]:
        config, settings = self.config, self.settings
        return [
            ShardSettings(
                shard=shard,
                node=config.node_rank,
                spec_json=settings.spec.to_json(),
                layout=str(settings.layout),
                dtype=config.dtype,
                coordination=config.coordination,
                max_step_rows=config.max_step_rows,
                slots=config.slots,
                threads=config.threads,
                agreement=settings.agreement(),
                controller=controller_address,
                host=self.host,
                run_dir=str(self._run_dir),
            )
            for shard in block(settings.layout.num_shards, config.nodes, config.node_rank)
        ]

    def _background(self) -> None:
        if self.controller is None:
            return
        try:
            found = find_adapters(self.config.adapters) if self.config.adapters else {}
        except LoraServerError as error:
            self._fail(str(error))
            return
        self.controller.register_directory(found)
        log.info("adapters registered", count=len(found), refused=len(self.controller.registry.refused))
        while not self.stopped.wait(SWEEP_SECONDS):
            self.controller.expire_leases()
            self.control.set_ready(not self._not_ready())

    def _not_ready(self) -> str:
        if self.controller is not None:
            return self.controller.not_ready()
        return ""

    def _fail(self, reason: str) -> None:
        self.failure = self.failure or reason
        self.stopped.set()

    def wait(self) -> str:
        """Until a signal or a failure; returns the failure."""
        self.stopped.wait()
        return self.failure

    def close(self) -> None:
        """Stop everything; idempotent."""
        self.stopped.set()
        self._stack.close()


def serve(config: ServeConfig) -> str:
    """Run a node until SIGINT or SIGTERM; returns '' or why it failed. A second signal changes nothing."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    node = Node(config)
    try:
        log.info(
            "serving",
            model=node.settings.spec.name,
            layout=str(node.settings.layout),
            node=config.node_rank,
            listen=config.listen if config.node_rank == 0 else "",
            http=config.http,
        )
        while not stop.wait(0.2) and not node.stopped.is_set():
            pass
        return node.failure
    finally:
        node.close()


def _settings(config: ServeConfig) -> Settings:
    model = specs.load(config.base_model)
    if config.max_step_rows < model.top_k:
        raise ConfigError(
            f"--max-step-rows: got {config.max_step_rows}, expected at least the model's top-k, {model.top_k}, "
            "since one token's rows travel together"
        )
    return Settings(model, Layout.parse(config.layout), config.dtype, config.coordination, config.max_step_rows)


@contextlib.contextmanager
def _run_directory(data_dir: Path | None) -> Iterator[Path]:
    if data_dir is not None:
        data_dir.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="lora-server-"))  # mode 0700; short, for a socket's path
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _advertised(config: ServeConfig) -> str:
    """The address at which this node's shards are reached over TCP."""
    if config.advertise:
        return config.advertise
    if config.node_rank:
        host, port = split_address(config.controller, "--controller")
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((host, port))
                return str(probe.getsockname()[0])
        except OSError as error:
            raise ConfigError(f"--controller {config.controller}: {error.strerror or error}") from error
    host, _ = split_address(config.listen, "--listen")
    return socket.gethostbyname(socket.gethostname()) if host in ("0.0.0.0", "::") else host
