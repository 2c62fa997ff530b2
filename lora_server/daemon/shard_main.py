"""One shard process: `python -m lora_server.daemon.shard_main`, settings as one JSON line on stdin.

Its parent holds the other end of stdin; when that closes, however the parent ended, the shard stops.
The main thread runs the loop; threads serve the controller's stream, listeners and the loader.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import msgspec
import structlog
import torch

from lora_server import logs
from lora_server.daemon import backends
from lora_server.daemon.backends import Backend
from lora_server.errors import ConfigError, LoraServerError
from lora_server.memory.store import Source
from lora_server.placement import Layout, Placement
from lora_server.spec import ModelSpec
from lora_server.transport import park
from lora_server.transport.base import Grant, Port
from lora_server.transport.shm import ShmListener
from lora_server.transport.zmq import ZmqListener
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire import lora_server_pb2_grpc as rpc
from lora_server.wire.host import host_identity
from lora_server.wire.region import RegionLayout
from lora_server.wire.rpc import KEEPALIVE
from lora_server.worker.coordination import Coordinator, Follower, Independent, Leader
from lora_server.worker.shard import Shard

CONTROLLER_SECONDS = 60.0
STATS_SECONDS = 0.5
STUCK_SECONDS = 10.0  # without a parent; one that lives would have killed it before
SWITCH_SECONDS = 5e-4  # the loop must get the GIL back quickly from a loading thread
EXIT_NO_CONTROLLER, EXIT_REFUSED = 69, 78
log = structlog.get_logger()


class ShardSettings(msgspec.Struct, forbid_unknown_fields=True):
    """What a node tells its shard processes."""

    shard: int
    node: int
    spec_json: str
    layout: str
    dtype: str
    coordination: str
    max_step_rows: int
    slots: int
    threads: int
    agreement: str
    controller: str
    host: str  # to bind to
    advertise: str  # where others reach it, if that is another
    run_dir: str
    device: str
    pool_gib: float  # 0: most of what is free
    local_index: int  # among the shards of this node
    local_shards: int


class ShardProcess:
    """Everything of one shard, put together."""

    def __init__(self, settings: ShardSettings) -> None:
        self.settings = settings
        self._parent = os.getppid()
        spec, layout = ModelSpec.from_json(settings.spec_json), Layout.parse(settings.layout)
        placement = Placement(spec, layout)
        self.reports: queue.SimpleQueue[pb.ShardReport | None] = queue.SimpleQueue()
        self.stopping = threading.Event()
        self.exit_code = 0
        region = RegionLayout.for_model(spec, settings.max_step_rows, settings.slots)
        self.port = Port(region, on_gone=self._client_gone)
        self.shm = self._shm_listener()
        self.zmq = ZmqListener(self.port, settings.host, settings.advertise)
        backend = self._backend(placement)
        self.store = backend.store
        self.coordinator = self._coordinator(layout)
        self.shard = Shard(
            settings.shard, spec, settings.max_step_rows, self.port, self.store, self.coordinator, backend.compute
        )

    def _backend(self, placement: Placement) -> Backend:
        settings, dtype = self.settings, getattr(torch, self.settings.dtype)
        if settings.device == "cpu":
            return backends.host(placement, settings.shard, dtype, self._layer_loaded)
        return backends.cuda(
            placement,
            settings.shard,
            dtype,
            settings.max_step_rows,
            local_shards=settings.local_shards,
            local_index=settings.local_index,
            pool_gib=settings.pool_gib,
            on_layer=self._layer_loaded,
        )

    def _shm_listener(self) -> ShmListener | None:
        """None where the CPU does not keep stores in order: then there is ZeroMQ."""
        try:
            park.require_total_store_order()
        except ConfigError as error:
            log.warning("no shared memory", reason=str(error))
            return None
        directory, name = Path(self.settings.run_dir), f"shard-{self.settings.shard}"
        for killed in directory.glob(f"{name}-*.sock"):
            killed.unlink(missing_ok=True)
        make_twin = backends.exported_twins(self.settings.local_index) if self.settings.device == "cuda" else None
        return ShmListener(self.port, directory / f"{name}-{os.getpid()}.sock", make_twin)

    def _coordinator(self, layout: Layout) -> Coordinator:
        if self.settings.coordination == "independent":
            return Independent()
        if layout.ep_rank(self.settings.shard) == 0:
            return Leader(self.settings.host, self.settings.advertise)
        return Follower(self.port.ring)

    def run(self) -> int:
        """Serve until told to stop; returns the exit code."""
        threads = [
            threading.Thread(target=target, daemon=True, name=name)
            for target, name in ((self._commands, "controller"), (self._watch_parent, "parent"), (self._stats, "stats"))
        ]
        for thread in threads:
            thread.start()
        self.shard.run(self.stopping.is_set)
        if self.shm is not None:
            self.shm.close()
        self.zmq.close()
        self.coordinator.close()
        self.store.close()
        if os.getppid() != self._parent:  # a killed parent leaves its directory to its last shard
            with contextlib.suppress(OSError):
                Path(self.settings.run_dir).rmdir()
        return self.exit_code

    def stop(self, exit_code: int = 0) -> None:
        """From any thread."""
        self.exit_code = self.exit_code or exit_code
        self.stopping.set()
        self.port.ring()

    def _watch_parent(self) -> None:
        sys.stdin.buffer.read()
        self.stop()
        time.sleep(STUCK_SECONDS)
        os._exit(1)

    # -- reports

    def _client_gone(self, client: int, epoch: int) -> None:
        self.reports.put(pb.ShardReport(client_gone=pb.ClientGone(client=client, epoch=epoch)))

    def _layer_loaded(self, handle: int, layers: int) -> None:
        self.reports.put(pb.ShardReport(layers_ready=pb.LayersReady(handle=handle, layers=layers)))
        self.port.ring()

    def _stats(self) -> None:
        while not self.stopping.wait(STATS_SECONDS):
            counters = self.shard.counters
            followers = self.coordinator.followers if isinstance(self.coordinator, Leader) else 0
            stats = pb.ShardStats(
                **vars(counters),
                weight_bytes=self.store.nbytes(),
                clients=len(self.port.connections),
                followers=followers,
            )
            self.reports.put(pb.ShardReport(stats=stats))

    def _hello(self) -> pb.Hello:
        settings, shm = self.settings, self.shm.address if self.shm is not None else ""
        return pb.Hello(
            shard=settings.shard,
            node=settings.node,
            pid=os.getpid(),
            agreement=settings.agreement,
            endpoint=pb.Endpoint(
                shard=settings.shard,
                host=host_identity(),
                shm=shm,
                zmq=self.zmq.address,
                device=settings.device if self.shm is not None else "cpu",
            ),
            order_address=self.coordinator.address if isinstance(self.coordinator, Leader) else "",
        )

    # -- commands

    def _outgoing(self) -> Iterator[pb.ShardReport]:
        yield pb.ShardReport(hello=self._hello())
        while (report := self.reports.get()) is not None:
            yield report

    def _commands(self) -> None:
        channel = grpc.insecure_channel(self.settings.controller, options=KEEPALIVE)
        code = EXIT_NO_CONTROLLER
        try:
            grpc.channel_ready_future(channel).result(CONTROLLER_SECONDS)
            for command in rpc.ShardsStub(channel).Register(self._outgoing()):
                self._execute(command)
            log.warning("the controller closed the stream", shard=self.settings.shard)
        except grpc.FutureTimeoutError:
            log.error("controller not reached", controller=self.settings.controller, seconds=CONTROLLER_SECONDS)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                code = EXIT_REFUSED
            if not self.stopping.is_set():
                log.error("the controller ended the stream", shard=self.settings.shard, reason=error.details())
        finally:
            self.stop(0 if self.stopping.is_set() else code)

    def _execute(self, command: pb.ShardCommand) -> None:
        def done(error: LoraServerError | None = None) -> None:
            report = pb.Done(command=command.id)
            if error is not None:
                report.code, report.message = error.code, str(error)
            self.reports.put(pb.ShardReport(done=report))

        kind = command.WhichOneof("command")
        if kind == "load":
            load = command.load
            self.store.load(load.handle, Source(Path(load.path), load.version, load.stamp), done)
            return
        if kind == "grant":
            self.port.grant(Grant(command.grant.client, command.grant.epoch, command.grant.key))
        elif kind == "revoke":
            self.port.revoke(command.revoke)
        elif kind == "drop":
            self.store.drop(command.drop)
        elif kind == "prefetch":
            self.store.prefetch(list(command.prefetch.handles))
        elif kind == "follow" and isinstance(self.coordinator, Follower):
            self.coordinator.follow(command.follow)
        done()


def _die(failure: threading.ExceptHookArgs) -> None:
    """A shard without its listener, loader or stream would only look alive: better restarted."""
    log.critical("a thread died", thread=failure.thread.name if failure.thread else "", exc_info=failure.exc_value)
    os._exit(1)


def main() -> None:
    """Entry point of the process."""
    logs.configure()
    threading.excepthook = _die
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=ShardSettings)
    torch.set_num_threads(settings.threads)
    torch.set_grad_enabled(False)
    sys.setswitchinterval(SWITCH_SECONDS)
    code = 1
    try:
        process = ShardProcess(settings)
        signal.signal(signal.SIGTERM, lambda *_: process.stop())
        code = process.run()
        log.info("shard stopped", shard=settings.shard)
    except LoraServerError as error:
        log.error("shard cannot start", shard=settings.shard, error=str(error))
        code = EXIT_REFUSED
    except Exception:
        log.exception("shard failed", shard=settings.shard)
    os._exit(code)  # daemon threads hold grpc and zmq; nothing is left to flush


if __name__ == "__main__":
    main()
