"""Stores and kernels of a shard: concrete classes for `--device cpu` and `--device cuda`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import structlog
import torch

from kernels_cuda import cpu
from kernels_cuda.heuristics import STAGES
from kernels_cuda.launch import most_combined_entries
from kernels_cuda.layout import PAGE_BYTES
from lora_server.config import ServeConfig
from lora_server.device.host.connection import SlotsMemory
from lora_server.device.host.kernel import ServeKernel
from lora_server.device.nvshmem.opened import world_gpu_of
from lora_server.device.protocol.gpu import Gpu
from lora_server.device.protocol.opened import gpu_of
from lora_server.errors import ConfigError
from lora_server.host_memory import available_bytes
from lora_server.memory.eviction import POLICIES
from lora_server.memory.mapped import MappedPool
from lora_server.memory.on_cpu import CpuTier
from lora_server.memory.paged import PagedTier
from lora_server.memory.pages import PagePool
from lora_server.memory.pools import Pool
from lora_server.memory.resident import resident_tier
from lora_server.memory.store import WeightStore
from lora_server.memory.tier import Tier
from lora_server.placement import Placement
from lora_server.shard.compute import Compute, DeviceCompute, HostCompute, Launch
from lora_server.sources.fetch import Fetcher
from lora_server.timings import DEFAULTS, Timings
from lora_server.transport.base import DeviceMemory
from lora_server.transport.environment import prepare_environment
from lora_server.units import Size, size
from lora_server.wire.region import RegionLayout

log = structlog.get_logger()

GIB = 1 << 30
DEVICE_POOL = Size(share=0.8)
HOST_POOL_OF_GPUS = Size(share=0.25)  # the most that they get unless told

OnLayer = Callable[[int, int | None], None]


class Backend(NamedTuple):
    """A shard's store and compute on its device, for the loop."""

    store: WeightStore
    compute: Compute


@dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """Memory that a shard may use for adapters. A share is of what is free at the start, for each of the node's
    `sharing` shards, or of those that share a GPU."""

    device_pool: Size = DEVICE_POOL
    host_pool: Size | None = None
    eviction: str = "lru"
    link_gbps: float = 0.0
    sharing: int = 1
    local_index: int = 0  # of this shard among them
    fetcher: Fetcher | None = None  # of remote files
    preload: bool = False
    timings: Timings = DEFAULTS
    on_layer: OnLayer = lambda *_: None  # see WeightStore

    def bytes_of(self, size: Size, available: int, flag: str, sharing: int = 0) -> int:
        """Return the size of one pool, by default one of `self.sharing`; raises ConfigError if less is available."""
        nbytes = size.of(available) // (sharing or self.sharing if size.share else 1)
        if nbytes > available:
            raise ConfigError(f"{flag}: {nbytes / GIB:.1f} GiB asked for, {available / GIB:.1f} GiB are free")
        return nbytes

    def pinned_bytes(self, available: int, device_bytes: int) -> int:
        """Return a GPU's host pool size: as configured, else the device pool's, at most a quarter of the host."""
        if self.host_pool is not None:
            return self.bytes_of(self.host_pool, available, "--host-pool")
        return min(device_bytes, self.bytes_of(HOST_POOL_OF_GPUS, available, "--host-pool"))

    def store(self, placement: Placement, shard: int, tier: Tier, host_pool: Pool | None) -> WeightStore:
        """Create a shard's store."""
        return WeightStore(
            placement,
            shard,
            tier,
            host_pool,
            policy=POLICIES[self.eviction],
            link_gbps=self.link_gbps,
            on_layer=self.on_layer,
            fetcher=self.fetcher,
            preload=self.preload,
            timings=self.timings,
        )


def check(config: ServeConfig, local_shards: int) -> str:
    """Say what the pools of a node's shards would be. Raises ConfigError as their start would; allocates nothing."""
    memory = MemorySettings(device_pool=config.device_pool, host_pool=config.host_pool, sharing=local_shards)
    available = available_bytes()
    if config.device == "cuda":
        free, _ = torch.cuda.mem_get_info(_gpu(0))
        of_a_gpu = -(-local_shards // torch.cuda.device_count())
        pool = memory.bytes_of(memory.device_pool, free, "--device-pool", of_a_gpu)
        packed = memory.pinned_bytes(available, pool)
    else:
        pool = memory.bytes_of(memory.device_pool, available, "--device-pool")
        packed = memory.bytes_of(memory.host_pool or Size(), available, "--host-pool")
    return (
        f"{config.device}; for each of {local_shards} shards {size(pool)} of device pool, {size(packed)} of host pool"
    )


def host(placement: Placement, shard: int, dtype: torch.dtype, memory: MemorySettings = MemorySettings()) -> Backend:
    """Make a backend with weights in host memory and torch on the CPU. Raises ConfigError if memory is too small."""
    available = available_bytes()
    pool = MappedPool(memory.bytes_of(memory.device_pool, available, "--device-pool"))
    packed = memory.bytes_of(memory.host_pool or Size(), available, "--host-pool")
    tier = CpuTier(placement, shard, dtype, pool)
    store = memory.store(placement, shard, tier, MappedPool(packed) if packed else None)
    return Backend(store, HostCompute(cpu.lora_parts))


def paged(
    placement: Placement,
    shard: int,
    dtype: torch.dtype,
    pool: PagePool,
    launch: Launch,
    max_step_rows: int,
    host_pool: Pool | None = None,
    memory: MemorySettings = MemorySettings(),
    lost: Callable[[], bool] = lambda: False,
) -> Backend:
    """Make a backend with weights in pages of any device, computed by `launch`."""
    tier = PagedTier(placement, shard, dtype, pool)
    store = memory.store(placement, shard, tier, host_pool)
    return Backend(store, DeviceCompute(launch, tier.rows.table, placement.spec, dtype, max_step_rows, lost))


def cuda(placement: Placement, shard: int, dtype: torch.dtype, max_step_rows: int, memory: MemorySettings) -> Backend:
    """Make a backend with weights in GPU memory and our CUDA kernels. A node's shards take its GPUs in turn, and may
    share one.

    Raises ConfigError where there is no GPU, an old one, too little memory, no CuPy, or another dtype.
    """
    device = _gpu(memory.local_index)
    try:
        from kernels_cuda.cuda import kernels

        compiled = kernels(device)
        seconds = compiled.compile(dtype)
    except ImportError as error:
        raise ConfigError(f"--device cuda: {error}; pip install '.[cuda]' in a checkout of lora-server") from error
    except Exception as error:  # an old GPU, or a compiler that CuPy cannot find or run
        raise ConfigError(f"--device cuda: {torch.cuda.get_device_name(device)}: {error}") from error
    log.info("kernels compiled", device=torch.cuda.get_device_name(device), seconds=round(seconds, 1))
    _check_step_rows(max_step_rows, compiled.variant.stages)
    sharing = len(range(memory.local_index % torch.cuda.device_count(), memory.sharing, torch.cuda.device_count()))
    pool = _device_pool(device, memory, sharing)
    host_pool, lost = _pinned_pool(memory, pool.capacity), functools.partial(_is_lost, device)
    return paged(placement, shard, dtype, pool, compiled.launch, max_step_rows, host_pool, memory, lost)


def _check_step_rows(max_step_rows: int, stages: int) -> None:
    most = most_combined_entries(stages)
    if max_step_rows > most:
        raise ConfigError(f"--max-step-rows: got {max_step_rows}, expected at most {most} with --device cuda")


class DeviceBackend(NamedTuple):
    """A shard's store and kernel, where the kernel serves by itself."""

    store: WeightStore
    kernel: ServeKernel


def resident(
    placement: Placement,
    shard: int,
    dtype: torch.dtype,
    gpu: Gpu,
    region: RegionLayout,
    max_step_rows: int,
    pool: PagePool,
    host_pool: Pool | None = None,
    memory: MemorySettings = MemorySettings(),
) -> DeviceBackend:
    """Make a backend with weights in pages of any GPU, and a kernel that serves by itself. Raises ConfigError."""
    _check_step_rows(max_step_rows, STAGES)
    kernel = ServeKernel(gpu, placement.spec, dtype, region, max_step_rows)
    tier = resident_tier(placement, shard, dtype, pool, kernel)
    return DeviceBackend(memory.store(placement, shard, tier, host_pool), kernel)


def cuda_resident(
    placement: Placement,
    shard: int,
    dtype: torch.dtype,
    region: RegionLayout,
    max_step_rows: int,
    memory: MemorySettings,
    nvshmem: bool = False,
) -> DeviceBackend:
    """Make a backend like `resident`, on the GPU that `cuda` would give the shard. Raises ConfigError.

    A GPU serves one shard, since the kernel takes every multiprocessor. `nvshmem`: the kernel reaches other PEs.
    """
    device, gpus = _gpu(memory.local_index), torch.cuda.device_count()
    if memory.sharing > gpus:
        raise ConfigError(
            f"--gpu-transport: got {memory.sharing} shards on this node, expected at most {gpus}, a GPU each; use "
            "--gpu-transport cuda_ipc, or another --layout"
        )
    gpu = world_gpu_of(device) if nvshmem else gpu_of(device)
    pool = _device_pool(device, memory, 1)
    host_pool = _pinned_pool(memory, pool.capacity)
    return resident(placement, shard, dtype, gpu, region, max_step_rows, pool, host_pool, memory)


def _is_lost(device: torch.device) -> bool:
    """Return whether the CUDA context is lost: such an error is raised by every call, any other once."""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def client_memory(local_index: int, transport: str) -> DeviceMemory:
    """Return the memory for clients' rows on the GPU that `cuda` gave the shard. Thread-safe."""
    if transport != "cuda_ipc":
        prepare_environment()
        return SlotsMemory(gpu_of(_gpu(local_index)))
    from lora_server.device.host.device_memory import GpuMemory

    return GpuMemory(_gpu(local_index))


def _gpu(local_index: int) -> torch.device:
    if not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no NVIDIA GPU here; use --device cpu, or check the driver")
    device = torch.device("cuda", local_index % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _device_pool(device: torch.device, memory: MemorySettings, sharing: int) -> PagePool:
    free, _ = torch.cuda.mem_get_info(device)
    nbytes = memory.bytes_of(memory.device_pool, free, "--device-pool", sharing)
    if nbytes < PAGE_BYTES:
        raise ConfigError(f"--device-pool: got {nbytes} bytes, expected at least one page of {PAGE_BYTES}")
    try:
        return PagePool(nbytes // PAGE_BYTES, device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"--device-pool: {nbytes / GIB:.1f} GiB asked for, {free / GIB:.1f} GiB are free on {device}"
        ) from error


def _pinned_pool(memory: MemorySettings, device_bytes: int) -> PagePool | None:
    nbytes = memory.pinned_bytes(available_bytes(), device_bytes)
    return PagePool(nbytes // PAGE_BYTES, "cpu", pinned=True) if nbytes >= PAGE_BYTES else None
