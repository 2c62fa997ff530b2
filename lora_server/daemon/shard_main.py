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
from collections.abc import Iterator
from pathlib import Path

import grpc
import msgspec
import structlog
import torch

from kernels_cuda import cpu
from lora_server import logs
from lora_server.errors import LoraServerError
from lora_server.memory.store import ResidentStore
from lora_server.placement import Layout, Placement
from lora_server.spec import ModelSpec
from lora_server.transport.base import Grant, Listener, Port
from lora_server.transport.shm import ShmListener
from lora_server.transport.zmq import ZmqListener
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire import lora_server_pb2_grpc as rpc
from lora_server.wire.host import host_identity
from lora_server.wire.region import RegionLayout
from lora_server.worker.coordination import Coordinator, Follower, Independent, Leader
from lora_server.worker.shard import Shard

CONTROLLER_SECONDS = 60.0
STATS_SECONDS = 0.5
SWITCH_SECONDS = 5e-4  # the loop must get the GIL back quickly from a loading thread
EXIT_NO_CONTROLLER = 69
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
    host: str
    run_dir: str


class ShardProcess:
    """Everything of one shard, put together."""

    def __init__(self, settings: ShardSettings) -> None:
        self.settings = settings
        spec, layout = ModelSpec.from_json(settings.spec_json), Layout.parse(settings.layout)
        placement = Placement(spec, layout)
        self.reports: queue.SimpleQueue[pb.ShardReport | None] = queue.SimpleQueue()
        self.stopping = threading.Event()
        self.exit_code = 0
        region = RegionLayout.for_model(spec, settings.max_step_rows, settings.slots)
        self.port = Port(region, on_gone=self._client_gone)
        self.listeners: list[Listener] = [
            ShmListener(self.port, Path(settings.run_dir) / f"shard-{settings.shard}-{os.getpid()}.sock"),
            ZmqListener(self.port, settings.host),
        ]
        self.store = ResidentStore(placement, settings.shard, getattr(torch, settings.dtype), self._layer_loaded)
        self.coordinator = self._coordinator(layout)
        self.shard = Shard(
            settings.shard, spec, settings.max_step_rows, self.port, self.store, self.coordinator, cpu.lora_step
        )

    def _coordinator(self, layout: Layout) -> Coordinator:
        if self.settings.coordination == "independent":
            return Independent()
        if layout.ep_rank(self.settings.shard) == 0:
            return Leader(self.settings.host)
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
        for listener in self.listeners:
            listener.close()
        self.coordinator.close()
        self.store.close()
        with contextlib.suppress(OSError):  # a killed parent leaves its directory to its last shard
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
        settings, (shm, zmq) = self.settings, self.listeners
        leads = isinstance(self.coordinator, Leader)
        return pb.Hello(
            shard=settings.shard,
            node=settings.node,
            pid=os.getpid(),
            agreement=settings.agreement,
            endpoint=pb.Endpoint(shard=settings.shard, host=host_identity(), shm=shm.address, zmq=zmq.address),
            order_address=self.coordinator.address if isinstance(self.coordinator, Leader) and leads else "",
        )

    # -- commands

    def _outgoing(self) -> Iterator[pb.ShardReport]:
        yield pb.ShardReport(hello=self._hello())
        while (report := self.reports.get()) is not None:
            yield report

    def _commands(self) -> None:
        channel = grpc.insecure_channel(self.settings.controller)
        try:
            grpc.channel_ready_future(channel).result(CONTROLLER_SECONDS)
            for command in rpc.ShardsStub(channel).Register(self._outgoing()):
                self._execute(command)
            log.warning("the controller closed the stream", shard=self.settings.shard)
        except grpc.FutureTimeoutError:
            log.error("controller not reached", controller=self.settings.controller, seconds=CONTROLLER_SECONDS)
        except grpc.RpcError as error:
            if not self.stopping.is_set():
                log.error("lost the controller", shard=self.settings.shard, error=error.details())
        finally:
            self.stop(EXIT_NO_CONTROLLER)

    def _execute(self, command: pb.ShardCommand) -> None:
        def done(error: LoraServerError | None = None) -> None:
            report = pb.Done(command=command.id)
            if error is not None:
                report.code, report.message = error.code, str(error)
            self.reports.put(pb.ShardReport(done=report))

        kind = command.WhichOneof("command")
        if kind == "load":
            self.store.load(command.load.handle, Path(command.load.path), done)
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


def main() -> None:
    """Entry point of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent decides
    logs.configure()
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=ShardSettings)
    torch.set_num_threads(settings.threads)
    torch.set_grad_enabled(False)
    sys.setswitchinterval(SWITCH_SECONDS)
    process = ShardProcess(settings)
    signal.signal(signal.SIGTERM, lambda *_: process.stop())
    code = process.run()
    log.info("shard stopped", shard=settings.shard)
    os._exit(code)  # daemon threads hold grpc and zmq; nothing is left to flush


if __name__ == "__main__":
    main()
