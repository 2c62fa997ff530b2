"""The parts of a shard's process: where clients connect to it, and what serves their steps."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import structlog
import torch

from lora_server.access.tls import shard_certificate
from lora_server.config import ProcessConfig
from lora_server.daemon import backends
from lora_server.daemon.backends import Backend, DeviceBackend
from lora_server.daemon.world import ShardWorld
from lora_server.device.host.kernel import ServeKernel
from lora_server.device.nvshmem.world import WorldGpu
from lora_server.errors import ConfigError
from lora_server.placement import Layout, Placement
from lora_server.shard.coordination import Coordinator, Follower, Independent, Leader, StageRole
from lora_server.shard.device_host import DeviceShardHost
from lora_server.shard.loop import Shard
from lora_server.shard.numbers import KernelFollower, KernelLeader
from lora_server.sources.fetch import Fetcher
from lora_server.spec import ModelSpec
from lora_server.transport import park
from lora_server.transport.base import DeviceMemory, Port
from lora_server.transport.shm_listener import ShmListener
from lora_server.transport.tcp_listener import TcpListener
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire.host import host_identity
from lora_server.wire.region import RegionLayout

OnGone: TypeAlias = Callable[[int, int], None]  # (client, epoch) whose connection ended
log = structlog.get_logger()


class ShardListeners:
    """A shard's port, and the listeners through which clients connect to it."""

    def __init__(self, config: ProcessConfig, spec: ModelSpec, on_gone: OnGone) -> None:
        self.config = config
        region = RegionLayout.for_model(spec, config.max_step_rows, config.slots, config.wire)
        self.port = Port(region, on_gone=on_gone)
        self._shm = self._shm_listener()
        # if the control plane is encrypted, steps are too
        self.certificate = shard_certificate(config.shard) if config.tls_ca is not None else None
        self._tcp = TcpListener(
            self.port,
            config.bind_host,
            config.advertise,
            config.data_ports.data(config.shard),
            self._client_memory(),
            self.certificate,
            config.timings.handshake,
        )

    @property
    def endpoint(self) -> pb.Endpoint:
        """The endpoint at which clients find this shard."""
        return pb.Endpoint(
            shard=self.config.shard,
            host=host_identity(),
            shm=self._shm.address if self._shm is not None else "",
            tcp=self._tcp.address,
            device=self.config.device if self._shm is not None else "cpu",
            certificate=self.certificate.der if self.certificate is not None else b"",
        )

    def close(self) -> None:
        """Stop listening."""
        if self._shm is not None:
            self._shm.close()
        self._tcp.close()

    def _shm_listener(self) -> ShmListener | None:
        """Listen on shared memory; None on a CPU that does not keep stores in order, where clients use TCP."""
        try:
            park.require_total_store_order()
        except ConfigError as error:
            log.warning("no shared memory", reason=str(error))
            return None
        timings = self.config.timings
        path = _own_socket(self.config, f"shard-{self.config.generation}-{self.config.shard}")
        return ShmListener(self.port, path, self._client_memory(), timings.handshake, timings.quarantine)

    def _client_memory(self) -> DeviceMemory | None:
        config = self.config
        return backends.client_memory(_local_index(config), config.gpu_transport) if config.device == "cuda" else None


class ServingParts:
    """The parts that serve a shard's steps: its loop or its kernel's host, its role in its stage, its NVSHMEM world."""

    def __init__(
        self, config: ProcessConfig, placement: Placement, listeners: ShardListeners, fetcher: Fetcher
    ) -> None:
        self.config, self.listeners, self._fetcher = config, listeners, fetcher
        self.coordinator = StageRole()
        self.layers_moved = threading.Event()  # some layers were loaded, or a load failed
        self.world: ShardWorld | None = None
        self.shard = self._serving(placement)

    def _serving(self, placement: Placement) -> Shard | DeviceShardHost:
        """Return the loop, or the host of a kernel that serves by itself."""
        config = self.config
        if config.gpu_transport != "cuda_ipc":
            return self.device_host(self._resident(placement))
        store, compute = self._backend(placement)
        coordinator = self.coordinator = self._coordinator(placement.layout)
        return Shard(
            config.shard,
            placement.spec,
            config.max_step_rows,
            self.listeners.port,
            store,
            coordinator,
            compute,
            config.wire,
            foreign_seconds=config.timings.foreign_step,
            weights_seconds=config.timings.weights,
            turn_seconds=config.timings.turn,
        )

    def device_host(self, resident: DeviceBackend) -> DeviceShardHost:
        """Return the host of a kernel that serves by itself."""
        config, gpu, ready = self.config, resident.kernel.gpu, None
        if config.gpu_transport == "nvshmem":
            assert isinstance(gpu, WorldGpu)
            self.world = ShardWorld(gpu, config.shard, config.replicated.num_shards, self.listeners.port)
            ready = self.world.ready
        self.coordinator = self._part_of(resident.kernel)
        return DeviceShardHost(
            config.shard, self.listeners.port, resident.store, resident.kernel, ready, config.timings
        )

    def _resident(self, placement: Placement) -> DeviceBackend:
        config = self.config
        return backends.cuda_resident(
            placement,
            config.shard,
            getattr(torch, config.dtype),
            self.listeners.port.layout,
            config.max_step_rows,
            self.memory,
            nvshmem=config.gpu_transport == "nvshmem",
        )

    def _backend(self, placement: Placement) -> Backend:
        config, dtype = self.config, getattr(torch, self.config.dtype)
        if config.device == "cpu":
            return backends.host(placement, config.shard, dtype, self.memory)
        return backends.cuda(placement, config.shard, dtype, config.max_step_rows, self.memory)

    @property
    def memory(self) -> backends.MemorySettings:
        """Return the memory that the shard may use, as one of its node's."""
        config = self.config
        return backends.MemorySettings(
            device_pool=config.device_pool,
            host_pool=config.host_pool,
            eviction=config.eviction,
            link_gbps=config.host_link_gbps,
            sharing=len(config.local_shards),
            local_index=_local_index(config),
            fetcher=self._fetcher,
            preload=config.preload,
            timings=config.timings,
            on_layer=self.layer_loaded,
        )

    def _coordinator(self, layout: Layout) -> Coordinator:
        if self.config.coordination == "independent":
            return Independent()
        if layout.ep_rank(self.config.shard) == 0:
            orders = self.config.data_ports.orders(layout.stage(self.config.shard))
            bind_host, advertise, seconds = self.config.bind_host, self.config.advertise, self.config.timings.handshake
            return Leader(bind_host, advertise, orders, self.listeners.certificate, seconds)
        return Follower(self.config.shard, self.listeners.port.ring, self.config.slots, self.config.timings.handshake)

    def _part_of(self, kernel: ServeKernel) -> StageRole:
        """Return the role in leader mode of a kernel that serves by itself."""
        config = self.config
        if config.coordination == "independent":
            return StageRole()
        if config.replicated.ep_rank(config.shard):
            return KernelFollower(config.shard, kernel, config.timings.handshake)
        return KernelLeader(kernel, _own_socket(config, f"numbers-{config.shard}"), config.timings.handshake)

    def layer_loaded(self, handle: int, left: int | None) -> None:
        """Wake the loop: a layer of an adapter is there, or its load failed (None). Wake the reports for that, and each
        time that half of what was left is loaded: each report takes time of the controller, and of the steps here."""
        if left is None or not left & (left - 1):
            self.layers_moved.set()
        self.listeners.port.ring()


def _own_socket(config: ProcessConfig, name: str) -> Path:
    """Return the path of this process's socket; remove those of processes of this name that were killed."""
    for killed in config.run_dir.glob(f"{name}-*.sock"):
        killed.unlink(missing_ok=True)
    return config.run_dir / f"{name}-{os.getpid()}.sock"


def _local_index(config: ProcessConfig) -> int:
    return config.shard - config.local_shards.start
