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

import grpc
import structlog

from lora_server import spec as specs
from lora_server.adapters import find_adapters
from lora_server.config import ServeConfig, split_address
from lora_server.control.controller import Agreement, Controller
from lora_server.control.http import ControllerCollector, HttpServer
from lora_server.control.leases import Leases
from lora_server.control.prefetch import PrefetchListener
from lora_server.control.service import ControlServer
from lora_server.daemon.processes import ShardProcesses
from lora_server.daemon.shard_main import ShardSettings
from lora_server.errors import ConfigError, LoraServerError
from lora_server.placement import Layout, share
from lora_server.transport.address import bracketed
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire import lora_server_pb2_grpc as rpc
from lora_server.wire.rpc import call

SWEEP_SECONDS = 0.5
GRACE_SECONDS = 1.0
MAX_SOCKET_PARENT = 60  # a Unix socket's path holds 107
log = structlog.get_logger()


class Node:
    """Started by its constructor, stopped by `close`. `stopped` is set when it fails; `failure` says why."""

    def __init__(self, config: ServeConfig) -> None:
        self.config = config
        self.agreement = _agreement(config)
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
        self._found = find_adapters(config.adapters) if config.adapters and config.node_rank == 0 else {}
        self._run_dir = self._stack.enter_context(_run_directory(config.data_dir))
        self.bind_host, self.advertise = _hosts(config)
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
        controller = Controller(self.agreement, Leases(config.lease_seconds))
        prefetch = PrefetchListener(self.bind_host, self.advertise, controller.prefetch)
        self._stack.callback(prefetch.close)
        host, _ = split_address(config.listen, "--listen")
        try:
            self.control = ControlServer(controller, config.listen, prefetch.address)
        except RuntimeError as error:
            raise ConfigError(
                f"--listen {config.listen}: cannot listen there ({error}); choose another port"
            ) from error
        self._stack.callback(self.control.close, GRACE_SECONDS)
        self._stack.callback(controller.shards.close)
        self.controller = controller
        local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        return f"{bracketed(local)}:{self.control.port}"

    def _shard_settings(self, controller_address: str) -> list[ShardSettings]:
        config, agreement = self.config, self.agreement
        local = share(agreement.layout.num_shards, config.nodes, config.node_rank)
        return [
            ShardSettings(
                shard=shard,
                node=config.node_rank,
                spec_json=agreement.spec.to_json(),
                layout=str(agreement.layout),
                dtype=config.dtype,
                coordination=config.coordination,
                max_step_rows=config.max_step_rows,
                slots=config.slots,
                threads=config.threads,
                agreement=agreement.digest(),
                controller=controller_address,
                host=self.bind_host,
                advertise=self.advertise,
                run_dir=str(self._run_dir),
                device=config.device,
                pool_gib=config.pool_gib,
                local_index=index,
                local_shards=len(local),
            )
            for index, shard in enumerate(local)
        ]

    def _background(self) -> None:
        if self.controller is None:
            return
        self._name_ignored()
        self.controller.register_directory(self._found)
        log.info("adapters registered", count=len(self._found), refused=len(self.controller.registry.refused))
        while not self.stopped.wait(SWEEP_SECONDS):
            try:
                self.controller.expire_leases()
                self.control.set_ready(not self._not_ready())
            except Exception:
                log.exception("sweep failed; it goes on")

    def _name_ignored(self) -> None:
        """A sub-directory without an adapter's files is probably a mistake."""
        children = self.config.adapters.iterdir() if self.config.adapters else ()
        ignored = sorted(child.name for child in children if child.is_dir() and child.name not in self._found)
        if ignored:
            log.warning("no adapter files in these directories; ignored", directories=ignored)

    def _not_ready(self) -> str:
        if self.controller is not None:
            return self.controller.not_ready()
        return _not_up(self.config.controller, self.config.nodes, self.config.node_rank)

    def _fail(self, reason: str) -> None:
        self.failure = self.failure or reason
        self.stopped.set()

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
            model=node.agreement.spec.name,
            layout=str(node.agreement.layout),
            node=config.node_rank,
            listen=config.listen if config.node_rank == 0 else "",
            http=config.http,
        )
        while not stop.wait(0.2) and not node.stopped.is_set():
            pass
        return node.failure
    finally:
        node.close()


def _agreement(config: ServeConfig) -> Agreement:
    model = specs.load(config.base_model)
    if config.max_step_rows < model.top_k:
        raise ConfigError(
            f"--max-step-rows: got {config.max_step_rows}, expected at least the model's top-k, {model.top_k}, "
            "since one token's rows travel together"
        )
    return Agreement(model, Layout.parse(config.layout), config.dtype, config.coordination, config.max_step_rows)


@contextlib.contextmanager
def _run_directory(data_dir: Path | None) -> Iterator[Path]:
    """A private directory (mode 0700) for the shards' sockets: in data_dir where its path is short enough."""
    if data_dir is not None:
        data_dir.mkdir(parents=True, exist_ok=True)
    parents = [data_dir.resolve()] if data_dir is not None else []
    short = [parent for parent in (*parents, Path(tempfile.gettempdir())) if len(str(parent)) <= MAX_SOCKET_PARENT]
    if not short:
        raise ConfigError(
            f"sockets: {tempfile.gettempdir()} is longer than {MAX_SOCKET_PARENT} characters, too long for a Unix "
            "socket; set TMPDIR, or --data-dir, to a shorter path"
        )
    directory = Path(tempfile.mkdtemp(prefix="lora-server-", dir=short[0]))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _hosts(config: ServeConfig) -> tuple[str, str]:
    """Where this node's shards bind, and where others reach them over TCP."""
    if config.node_rank:
        host, port = split_address(config.controller, "--controller")
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                own = str(probe.getsockname()[0])
        except OSError as error:
            raise ConfigError(f"--controller {config.controller}: {error.strerror or error}") from error
    else:
        own, _ = split_address(config.listen, "--listen")
    if config.advertise:
        return ("::" if ":" in own else "0.0.0.0"), config.advertise
    if own in ("0.0.0.0", "::"):
        try:
            return own, socket.gethostbyname(socket.gethostname())
        except OSError as error:
            raise ConfigError(
                f"--listen {config.listen}: give --advertise, the address others reach ({error})"
            ) from error
    return own, own


def _not_up(controller: str, nodes: int, node: int) -> str:
    """A node above rank 0: why its shards do not serve, as the controller sees it."""
    with grpc.insecure_channel(controller) as channel:
        try:
            reply = call(rpc.ServerStub(channel).Status, pb.StatusRequest(), server=controller, seconds=2.0)
        except LoraServerError as error:
            return str(error)
    own = share(len(reply.shards), nodes, node)
    down = [shard.shard for shard in reply.shards if shard.shard in own and shard.state != "up"]
    return f"shards not up: {down}" if down else ""
