"""Where a shard keeps weights and computes: concrete classes for `--device cpu` and `--device cuda`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import structlog
import torch

from kernels_cuda import cpu
from kernels_cuda.launch import most_combined_entries
from kernels_cuda.layout import PAGE_BYTES
from lora_server.errors import ConfigError
from lora_server.memory.paged import PagedStore
from lora_server.memory.pages import PagePool
from lora_server.memory.resident import ResidentStore
from lora_server.memory.store import WeightStore
from lora_server.placement import Placement
from lora_server.shard.compute import Compute, DeviceCompute, HostCompute, Launch
from lora_server.transport.base import DeviceMemory

log = structlog.get_logger()

GIB = 1 << 30
FREE_SHARE = 0.8  # of the device memory that is free at the start, unless --pool-gib says

OnLayer = Callable[[int, int], None]


class Backend(NamedTuple):
    """What one shard's loop needs of its device."""

    store: WeightStore
    compute: Compute


def host(placement: Placement, shard: int, dtype: torch.dtype, on_layer: OnLayer = lambda *_: None) -> Backend:
    """Weights in host memory, torch on the CPU."""
    return Backend(ResidentStore(placement, shard, dtype, on_layer), HostCompute(cpu.lora_step))


def paged(
    placement: Placement,
    shard: int,
    dtype: torch.dtype,
    pool: PagePool,
    launch: Launch,
    max_step_rows: int,
    on_layer: OnLayer = lambda *_: None,
    lost: Callable[[], bool] = lambda: False,
) -> Backend:
    """Weights in the pages of any device, computed by `launch`."""
    store = PagedStore(placement, shard, dtype, pool, on_layer)
    return Backend(store, DeviceCompute(launch, store.table, placement.spec, dtype, max_step_rows, lost))


def cuda(
    placement: Placement,
    shard: int,
    dtype: torch.dtype,
    max_step_rows: int,
    *,
    local_shards: int,
    local_index: int,
    pool_gib: float,
    on_layer: OnLayer,
) -> Backend:
    """Weights in the memory of a GPU, our CUDA kernels. Shards of a node take its GPUs in turn, and may share one.

    Raises ConfigError where there is no GPU, an old one, too little memory, no CuPy, or another dtype.
    """
    device = _gpu(local_index)
    try:
        from kernels_cuda.cuda import kernels

        compiled = kernels(device)
        seconds = compiled.compile(dtype)
    except ImportError as error:
        raise ConfigError(f"--device cuda: {error}; install lora-server[cuda]") from error
    except Exception as error:  # an old GPU, or a compiler that CuPy cannot find or run
        raise ConfigError(f"--device cuda: {torch.cuda.get_device_name(device)}: {error}") from error
    log.info("kernels compiled", device=torch.cuda.get_device_name(device), seconds=round(seconds, 1))
    most = most_combined_entries(compiled.variant.stages)
    if max_step_rows > most:
        raise ConfigError(f"--max-step-rows: got {max_step_rows}, expected at most {most} with --device cuda")
    sharing = len(range(local_index % torch.cuda.device_count(), local_shards, torch.cuda.device_count()))
    pool = _pool(device, pool_gib, sharing)
    return paged(
        placement, shard, dtype, pool, compiled.launch, max_step_rows, on_layer, functools.partial(_is_lost, device)
    )


def _is_lost(device: torch.device) -> bool:
    """An error that a context does not survive comes back at every call; any other was told once."""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def client_memory(local_index: int) -> DeviceMemory:
    """Where clients' rows go on the GPU that `cuda` gave the shard; from any thread."""
    from lora_server.transport.device_memory import GpuMemory

    return GpuMemory(_gpu(local_index))


def _gpu(local_index: int) -> torch.device:
    if not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no NVIDIA GPU here; use --device cpu, or check the driver")
    device = torch.device("cuda", local_index % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _pool(device: torch.device, pool_gib: float, sharing: int) -> PagePool:
    free, _ = torch.cuda.mem_get_info(device)
    nbytes = int(pool_gib * GIB) if pool_gib else int(free * FREE_SHARE / sharing)
    if nbytes < PAGE_BYTES:
        raise ConfigError(f"--pool-gib: got {nbytes} bytes, expected at least one page of {PAGE_BYTES}")
    try:
        return PagePool(nbytes // PAGE_BYTES, device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"--pool-gib: {nbytes / GIB:.1f} GiB asked for, {free / GIB:.1f} free on {device}") from error
