"""One shard process; see processes for how it is started and stopped.

The main thread runs the loop; threads serve the controller's stream, listeners and the loader.
"""

from __future__ import annotations

import os
import sys
import threading
import time

import structlog
import torch

from lora_server.access.tls import own_credentials
from lora_server.config import ProcessConfig
from lora_server.control.members.agreement import Agreement
from lora_server.daemon import backends
from lora_server.daemon.backends import Backend, DeviceBackend
from lora_server.daemon.child_main import open_fetcher, run_child
from lora_server.daemon.files import Node0
from lora_server.daemon.processes import EXIT_REFUSED, Up, say
from lora_server.daemon.run_directory import hold, leave
from lora_server.daemon.shard_commands import ShardCommands
from lora_server.daemon.shard_reports import ShardReports
from lora_server.daemon.stream import ControllerStream, Done
from lora_server.daemon.world import ShardWorld
from lora_server.device.host.kernel import ServeKernel
from lora_server.device.nvshmem.world import WorldGpu
from lora_server.errors import ConfigError, LeaseError
from lora_server.placement import Layout, Placement
from lora_server.shard.coordination import Coordinator, Follower, Independent, Leader, StageRole
from lora_server.shard.device_host import DeviceShardHost
from lora_server.shard.loop import Shard
from lora_server.shard.numbers import KernelFollower, KernelLeader
from lora_server.spec import ModelSpec
from lora_server.transport import park
from lora_server.transport.base import DeviceMemory, Port
from lora_server.transport.shm_listener import ShmListener
from lora_server.transport.tcp_listener import TcpListener
from lora_server.transport.tls import ShardCertificate
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire.host import host_identity
from lora_server.wire.region import RegionLayout

SWITCH_SECONDS = 1e-4  # the loop must get the GIL back quickly from a loading thread, and give it when it spins
log = structlog.get_logger()


class ShardProcess:
    """A shard: the object that puts all its parts together."""

    def __init__(self, config: ProcessConfig) -> None:
        self._began = time.monotonic()
        torch.set_num_threads(config.threads)
        torch.set_grad_enabled(False)
        sys.setswitchinterval(SWITCH_SECONDS)
        self.config = config
        self._parent, self._held = os.getppid(), hold(config.run_dir)
        spec, layout = ModelSpec.from_json(config.spec_json), Layout.parse(config.layout)
        self._agreement = Agreement.of(config, spec).digest()
        self.stopping = threading.Event()
        self.exit_code = 0
        region = RegionLayout.for_model(spec, config.max_step_rows, config.slots, config.wire)
        timings = config.timings
        self.port = Port(region, on_gone=self._client_gone)
        self.shm = self._shm_listener()
        data = config.data_ports.data(config.shard)
        self.certificate = self._own_certificate()
        self.tcp = TcpListener(
            self.port,
            config.bind_host,
            config.advertise,
            data,
            self._client_memory(),
            self.certificate,
            timings.handshake,
        )
        self.stream = ControllerStream(
            str(config.controller),
            own_credentials(config),
            self._registration,
            self._execute,
            self._layers_ready,
            timings,
        )
        node0 = Node0(str(config.controller), own_credentials(config), config.shard, self.stream.instance, timings)
        self.fetcher = open_fetcher(config, spec, node0.files)
        self.coordinator = StageRole()
        self.world: ShardWorld | None = None
        self.shard = self._serving(Placement(spec, layout))
        self.store = self.shard.store
        self._reports = ShardReports(
            self.shard, self.port, self.coordinator, self.fetcher, self.stream.report, timings.shard_report
        )
        self._commands = ShardCommands(
            config.node_rank,
            self.port,
            self.store,
            self.coordinator,
            self.world,
            self._reports.moved,
            self.stop,
            timings.expected_step,
        )

    def _serving(self, placement: Placement) -> Shard | DeviceShardHost:
        """Return the loop, or the host of a kernel that serves by itself."""
        config = self.config
        if config.gpu_transport != "cuda_ipc":
            return self._device_host(self._resident(placement))
        store, compute = self._backend(placement)
        coordinator = self.coordinator = self._coordinator(placement.layout)
        return Shard(
            config.shard,
            placement.spec,
            config.max_step_rows,
            self.port,
            store,
            coordinator,
            compute,
            config.wire,
            foreign_seconds=config.timings.foreign_step,
            turn_seconds=config.timings.turn,
        )

    def _device_host(self, resident: DeviceBackend) -> DeviceShardHost:
        config, gpu, ready = self.config, resident.kernel.gpu, None
        if config.gpu_transport == "nvshmem":
            assert isinstance(gpu, WorldGpu)
            self.world = ShardWorld(gpu, config.shard, Layout.parse(config.layout).num_shards, self.port)
            ready = self.world.ready
        self.coordinator = self._part_of(resident.kernel)
        return DeviceShardHost(config.shard, self.port, resident.store, resident.kernel, ready, config.timings)

    def _resident(self, placement: Placement) -> DeviceBackend:
        config = self.config
        return backends.cuda_resident(
            placement,
            config.shard,
            getattr(torch, config.dtype),
            self.port.layout,
            config.max_step_rows,
            local_shards=len(config.local_shards),
            local_index=self._local_index,
            memory=self._memory(1),
            on_layer=self._layer_loaded,
            nvshmem=config.gpu_transport == "nvshmem",
        )

    def _backend(self, placement: Placement) -> Backend:
        config, dtype = self.config, getattr(torch, self.config.dtype)
        if config.device == "cpu":
            return backends.host(
                placement, config.shard, dtype, self._memory(len(config.local_shards)), self._layer_loaded
            )
        return backends.cuda(
            placement,
            config.shard,
            dtype,
            config.max_step_rows,
            local_shards=len(config.local_shards),
            local_index=self._local_index,
            memory=self._memory(1),
            on_layer=self._layer_loaded,
        )

    def _memory(self, sharing: int) -> backends.MemorySettings:
        config = self.config
        return backends.MemorySettings(
            device_pool=config.device_pool,
            host_pool=config.host_pool,
            eviction=config.eviction,
            link_gbps=config.host_link_gbps,
            sharing=sharing,
            fetcher=self.fetcher,
            preload=config.preload,
            timings=config.timings,
        )

    @property
    def _local_index(self) -> int:
        return self.config.shard - self.config.local_shards.start

    def _shm_listener(self) -> ShmListener | None:
        """Listen on shared memory; None on a CPU that does not keep stores in order, where clients use TCP."""
        try:
            park.require_total_store_order()
        except ConfigError as error:
            log.warning("no shared memory", reason=str(error))
            return None
        directory, name = self.config.run_dir, f"shard-{self.config.shard}"
        for killed in directory.glob(f"{name}-*.sock"):
            killed.unlink(missing_ok=True)
        path, timings = directory / f"{name}-{os.getpid()}.sock", self.config.timings
        return ShmListener(self.port, path, self._client_memory(), timings.handshake, timings.quarantine)

    def _own_certificate(self) -> ShardCertificate | None:
        """Return a certificate if the control plane is encrypted: then steps are too."""
        if self.config.tls_ca is None:
            return None
        from lora_server.access.certificate import shard_certificate  # which takes its time to be imported

        return shard_certificate(self.config.shard)

    def _client_memory(self) -> DeviceMemory | None:
        config = self.config
        return backends.client_memory(self._local_index, config.gpu_transport) if config.device == "cuda" else None

    def _coordinator(self, layout: Layout) -> Coordinator:
        if self.config.coordination == "independent":
            return Independent()
        if layout.ep_rank(self.config.shard) == 0:
            orders = self.config.data_ports.orders(layout.stage(self.config.shard))
            bind_host, advertise, seconds = self.config.bind_host, self.config.advertise, self.config.timings.handshake
            return Leader(bind_host, advertise, orders, self.certificate, seconds)
        return Follower(self.config.shard, self.port.ring, self.config.slots, self.config.timings.handshake)

    def _part_of(self, kernel: ServeKernel) -> StageRole:
        """Return the role in leader mode of a kernel that serves by itself."""
        config = self.config
        if config.coordination == "independent":
            return StageRole()
        if Layout.parse(config.layout).ep_rank(config.shard):
            return KernelFollower(config.shard, kernel, config.timings.handshake)
        name = f"numbers-{config.shard}"
        for killed in config.run_dir.glob(f"{name}-*.sock"):
            killed.unlink(missing_ok=True)
        return KernelLeader(kernel, config.run_dir / f"{name}-{os.getpid()}.sock", config.timings.handshake)

    def run(self) -> int:
        """Serve until stopped; return the exit code."""
        for target, name in ((self._follow_controller, "controller"), (self._report, "stats")):
            threading.Thread(target=target, daemon=True, name=name).start()
        self.shard.run(self.stopping.is_set)
        if self.shm is not None:
            self.shm.close()
        self.tcp.close()
        self.coordinator.close()
        self.store.close()
        self.stream.leave(self.config.timings.shard_leave)
        if os.getppid() != self._parent:
            leave(self.config.run_dir, self._held)
        log.info("shard stopped", shard=self.config.shard)
        return self.exit_code

    def stop(self) -> None:
        """Stop `run`, from any thread."""
        self.stopping.set()
        self.port.ring()

    def _follow_controller(self) -> None:
        threading.Thread(target=self._say_up, daemon=True, name="up").start()
        refused = self.stream.run(self.stopping)
        if refused is not None:
            if not isinstance(refused, LeaseError):  # that rank is another's now: this one ends, and may come again
                say(Up(refused=str(refused)))
                self.exit_code = EXIT_REFUSED
            self.stop()

    def _say_up(self) -> None:
        self.stream.up.wait()
        log.info("shard started", shard=self.config.shard, seconds=round(time.monotonic() - self._began, 2))
        say(Up())

    # -- to and from the controller

    def _client_gone(self, client: int, epoch: int) -> None:
        self.stream.report(pb.ShardReport(client_gone=pb.ClientGone(client=client, epoch=epoch)))

    def _layer_loaded(self, handle: int, layers: int) -> None:
        self.port.ring()

    def _layers_ready(self, handle: int) -> int:
        return self.store.report.layers_ready(handle)

    def _report(self) -> None:
        self._reports.run(self.stopping)

    def _execute(self, command: pb.ShardCommand, done: Done) -> None:
        self._commands.execute(command, done)

    def _registration(self) -> pb.Registration:
        config = self.config
        endpoint = pb.Endpoint(
            shard=config.shard,
            host=host_identity(),
            shm=self.shm.address if self.shm is not None else "",
            tcp=self.tcp.address,
            device=config.device if self.shm is not None else "cpu",
            certificate=self.certificate.der if self.certificate is not None else b"",
        )
        return pb.Registration(
            shard=config.shard,
            node=config.node_rank,
            pid=os.getpid(),
            agreement=self._agreement,
            endpoint=endpoint,
            pool_bytes=self.store.tier.pool.capacity,
            order_address=self.coordinator.address,
            order_badge=self.coordinator.badge,
            place=self.world.place if self.world is not None else None,
        )


def main() -> None:
    """Entry point of a shard's process, after the fork."""
    run_child(ShardProcess)
