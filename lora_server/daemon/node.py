"""One `lora-server serve`: the processes of a node. On rank 0 the controller, on every rank its shards."""

from __future__ import annotations

import contextlib
import functools
import itertools
import resource
import signal
import socket
import threading
import time
from pathlib import Path

import structlog

from lora_server.access import exposure
from lora_server.access.remote import RemoteGate
from lora_server.access.tls import certificate_of
from lora_server.address import Address, ControllerList
from lora_server.config import ProcessConfig, ServeConfig
from lora_server.config.types import AUTO_RANK, TCP
from lora_server.control.members.agreement import Agreement
from lora_server.daemon import processes
from lora_server.daemon.checks import check_start, node_secret
from lora_server.daemon.child_main import DISK_CACHE
from lora_server.daemon.forks import ForkServer
from lora_server.daemon.guard import cannot_listen, hold_port
from lora_server.daemon.http import NodeCollector, listen_http
from lora_server.daemon.node_stream import NodeStream
from lora_server.daemon.placements import NodeShards, OnFatal
from lora_server.daemon.processes import Child
from lora_server.daemon.rank import LeasedRank
from lora_server.daemon.run_directory import locked_data, run_directory
from lora_server.daemon.signals import on_signals
from lora_server.daemon.startup import Startup, ask
from lora_server.errors import ConfigError, LoraServerError, ServerUnavailableError
from lora_server.spec import ModelSpec

RETRY_SECONDS = 1.0
CONTROLLER, SHARD = "lora_server.daemon.controller_main", "lora_server.daemon.shard_main"
STANDBY = "lora_server.daemon.standby"
log = structlog.get_logger()


class Node:
    """A node, which its constructor starts and `close` stops. `stopped` is set when it fails; `failure` says why."""

    def __init__(self, config: ServeConfig, spec: ModelSpec, forks: ForkServer, stop: threading.Event) -> None:
        """Start the processes, and wait until the controller listens: this node's own, or another node's until `stop`.


        Raises ConfigError, ServerUnavailableError. `forks` is this node's own from now on.
        """
        self.config, self.spec, self._forks, self._stop = config, spec, forks, stop
        self.stopped = threading.Event()
        self.failure: LoraServerError | None = None
        self._stack = contextlib.ExitStack()
        self._controller: Child | None = None
        self._shards: NodeShards | None = None
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        if self.config.node_rank == AUTO_RANK:
            self._lease_rank()
        self._stack.enter_context(locked_data(self.config.data_dir, self.config.node_rank))
        run_dir = self._stack.enter_context(run_directory(self.config.data_dir))
        ports = self._stack.enter_context(contextlib.ExitStack())  # free once the children ended
        self._stack.callback(self._stop_children)
        self._stack.callback(self._forks.close)
        process = _process_config(self.config, self.spec.to_json(), run_dir, self._stop)
        exposure.check(self.config)
        log.info("starting", model=self.spec.name, layout=process.layout, node=process.node_rank)
        if process.node_rank:
            assert process.controller is not None
            certificate = certificate_of(process)
            self._shards = shards = NodeShards(process, self._start_shard, self._fail)
            collector = NodeCollector(self.spec, process, shards, certificate)
            gate = RemoteGate(process.controller, process)
            not_ready = functools.partial(self._not_up, process)
            http = listen_http(process, self._stack, not_ready, collector, gate=gate, certificate=certificate)
            update = {"http": process.http._replace(port=http.port)}
            self._follow(process.model_copy(update=update), shards)
            return
        held: dict[str, object] = {
            name: hold_port(f"--{name}", getattr(process, name), ports) for name in ("listen", "http")
        }
        if process.events_address is not None:
            held["events"] = f"{TCP}{hold_port('--events', process.events_address, ports)}"
        process = process.model_copy(update=held)
        if not process.has_standby or process.controller is None:
            process = process.model_copy(update={"controller": ControllerList((process.listen.local(),))})
        self._controller = self._start_child("controller", _controller_module(process), process, self._fail)
        self._controller.wait_up(process.timings.node_up)
        if not process.standby:
            self._shards = NodeShards(process, self._start_shard, self._fail)
            self._follow(process, self._shards)

    def _lease_rank(self) -> None:
        exposure.check(self.config)
        leased = LeasedRank(self.config)
        self._stack.callback(leased.close)
        self.config = self.config.model_copy(update={"node_rank": leased.acquire(self._stop)})
        leased.keep(self._fail)

    def _follow(self, process: ProcessConfig, shards: NodeShards) -> None:
        """Have the shards follow the controller."""
        assert process.controller is not None
        digest = Agreement.of(process, self.spec).digest()
        self._stack.callback(NodeStream(process, digest, shards, self._fail).close)
        self._stack.callback(Startup(process, process.controller, self.stopped, self._fail).close)

    def _start_shard(self, name: str, process: ProcessConfig, on_fatal: OnFatal) -> Child:
        return self._start_child(name, SHARD, process, on_fatal)

    def _start_child(self, name: str, module: str, process: ProcessConfig, on_fatal: OnFatal) -> Child:
        child = Child(name, module, self._forks, process, on_fatal, self._stop)
        child.start()
        return child

    def _stop_children(self) -> None:
        controller = [self._controller] if self._controller is not None else []
        shards = self._shards.close() if self._shards is not None else []
        processes.stop([*controller, *shards], self.config.timings.stop)

    def _fail(self, reason: LoraServerError) -> None:
        self.failure = self.failure or reason
        self.stopped.set()

    def _not_up(self, process: ProcessConfig) -> str:
        """Return why this node, above rank 0, does not serve, as the controller sees it; empty if it does."""
        assert process.controller is not None
        try:
            return ask(process.controller, process)[1]
        except LoraServerError as error:
            return f"the controller does not answer: {error}"

    def close(self) -> None:
        """Stop everything; idempotent."""
        self.stopped.set()
        self._stack.close()


def serve(config: ServeConfig) -> None:
    """Run a node until SIGINT or SIGTERM; raises why it failed. A second signal changes nothing."""
    spec = check_start(config)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # also of its children: a client takes two of each shard
    forks = ForkServer([_controller_module(config), SHARD], fork_seconds=config.timings.fork)
    forks.fork_off()
    stop = threading.Event()
    on_signals((signal.SIGINT, signal.SIGTERM), stop.set)  # by a thread: after the fork
    try:
        node = Node(config, spec, forks, stop)
    except ServerUnavailableError:
        if stop.is_set():
            return
        raise
    try:
        while not stop.wait(0.2) and not node.stopped.is_set():
            pass
        if node.failure is not None:
            raise node.failure
    finally:
        node.close()


def _controller_module(config: ServeConfig) -> str:
    return STANDBY if config.has_standby else CONTROLLER


def _process_config(config: ServeConfig, spec_json: str, run_dir: Path, stop: threading.Event) -> ProcessConfig:
    bind_host, advertise = _hosts(config, stop)
    found = {"spec_json": spec_json, "bind_host": bind_host, "advertise": advertise, "run_dir": run_dir}
    found["secret"] = node_secret(config)
    if config.join_token_file is None and config.nodes > 1 and not config.node_rank:
        log.warning("no --join-token-file: any process that reaches --listen can pose as a shard of another node")
    found["disk_cache"] = config.disk_cache or (config.data_dir or run_dir).resolve() / DISK_CACHE
    return ProcessConfig.model_validate(config.model_dump() | found)


def _hosts(config: ServeConfig, stop: threading.Event) -> tuple[str, str]:
    """Return the host where this node's shards bind, and the one where others reach them over TCP."""
    if config.node_rank and config.controller is not None:
        own = _towards(config.controller, config.controller_seconds, stop)
    else:
        own = _own_address(config.listen)
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


def _own_address(listen: Address) -> str:
    """Return the IP address of --listen's host; raises ConfigError if it is not an address of this machine."""
    failure: OSError | None = None
    try:
        for family, _, _, _, address in socket.getaddrinfo(listen.host, 0, type=socket.SOCK_STREAM):
            try:
                with socket.socket(family, socket.SOCK_STREAM) as probe:
                    probe.bind(address)
                return str(address[0])
            except OSError as error:  # a name may stand for ::1 where there is no IPv6
                failure = error
    except OSError as error:
        failure = error
    raise cannot_listen("--listen", listen, failure or OSError("no address")) from failure


def _towards(controllers: ControllerList, seconds: float, stop: threading.Event) -> str:
    """Return this host's address towards a controller; retries while its name or the network is not there yet.

    Raises ConfigError after `seconds`, or once `stop` is set.
    """
    said, deadline, candidates = "", time.monotonic() + seconds, itertools.cycle(controllers.addresses)
    while True:
        controller = next(candidates)
        try:
            family, _, _, _, address = socket.getaddrinfo(*controller, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
        except OSError as error:
            reason = error.strerror or str(error)
        if reason != said:
            log.warning("--controller cannot be reached; trying again", controller=str(controller), reason=reason)
            said = reason
        if stop.wait(RETRY_SECONDS) or time.monotonic() > deadline:
            raise ConfigError(f"--controller {controller}: cannot be reached: {reason}; expected node 0's --listen")
