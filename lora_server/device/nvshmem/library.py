"""A real GPU in NVSHMEM's world: all that calls nvshmem4py, and its host library. Nothing here ran on a GPU yet.

nvshmem4py's own `init` leaves the version of what it hands over unset (0.4.1), so it is written out here; and what it
calls with Python's lock held, and waits for others, is called by ctypes, which lets heartbeats go on.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Any

import structlog
import torch
from typing_extensions import override

from kernels_cuda.build import read_source
from kernels_cuda.cuda import on_device
from lora_server.device.nvshmem import nvshmem_build
from lora_server.device.nvshmem.world import UID_BYTES, WorldGpu
from lora_server.device.protocol import needs, source
from lora_server.device.protocol.cuda import CudaGpu
from lora_server.device.protocol.cuda_kernels import compiled
from lora_server.device.protocol.gpu import Memory
from lora_server.device.protocol.virtual_memory import as_tensor
from lora_server.errors import ConfigError

ENVIRONMENT = {  # unless it is set already
    "NVSHMEM_DISABLE_NCCL": "1",  # no collectives are used
    "NVSHMEM_DISABLE_NVLS": "1",
}
log = structlog.get_logger()
CACHE = "~/.cupy/kernel_cache"  # CuPy's own


def _network(index: int) -> dict[str, str]:
    """Return the settings for other nodes: the GPU itself reaches them (IBGDA), or none does."""
    lacks = needs.missing_for_network(dma_buf=needs.has_dma_buf(index))
    if lacks:
        log.warning("NVSHMEM reaches GPUs of this node alone", lacks=lacks)
        return {"NVSHMEM_REMOTE_TRANSPORT": "none"}
    return {"NVSHMEM_IB_ENABLE_IBGDA": "1"}


class _Heap(Memory):
    def __init__(self, address: int, nbytes: int, device: torch.device) -> None:
        self.address, self.tensor = address, as_tensor(address, nbytes, None, device)

    @override
    def close(self) -> None:
        """Do nothing: a world is never left, since a process that finalises alone waits for ever."""


class NvshmemModules:
    """Modules of one GPU. Kernels that call NVSHMEM are linked here, and know its state once the world was entered."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._modules: list[Any] = []
        self._is_in = False

    def load(self, name: str, defines: tuple[str, ...]) -> Any:
        """Compile a source, and link it if it calls NVSHMEM; see cuda_kernels.Load."""
        if name not in source.SOURCES:
            return compiled(name, defines)
        import cupy

        major, minor = torch.cuda.get_device_capability(self._device)
        arch = f"sm_{major}{minor}{'a' if major == 9 else ''}"
        folder = Path(os.environ.get("CUPY_CACHE_DIR", CACHE)).expanduser()
        options = [*defines, "-DNVSHMEM=1"]
        path = nvshmem_build.cached(read_source(name, source.FILES), arch, options, folder)
        module = cupy.RawModule(path=str(path))
        self._modules.append(module.module)
        if self._is_in:
            _initialise(module.module)
        return module

    def enter(self) -> None:
        """Tell all modules NVSHMEM's state, those that come later, too."""
        for module in self._modules:
            _initialise(module)
        self._is_in = True


def _initialise(module: Any) -> None:
    from nvshmem import bindings

    status = bindings.cumodule_init(module.ptr)
    if status:
        raise RuntimeError(f"nvshmemx_cumodule_init: {status}")


class NvshmemGpu(CudaGpu, WorldGpu):
    """A real GPU in a world; see WorldGpu."""

    def __init__(self, device: torch.device) -> None:
        self._modules = NvshmemModules(device)
        super().__init__(device, load=self._modules.load)

    @override
    def new_uid(self) -> bytes:
        needs.host_library()
        from nvshmem import bindings

        uid = bindings.uniqueid()
        bindings.get_uniqueid(uid.ptr)
        return ctypes.string_at(uid.ptr, UID_BYTES)

    @override
    def enter(self, rank: int, size: int, uid: bytes, nbytes: int) -> Memory:
        for name, value in {**ENVIRONMENT, **_network(self.device.index)}.items():
            os.environ.setdefault(name, value)
        os.environ.setdefault("NVSHMEM_SYMMETRIC_SIZE", str(nbytes + (64 << 20)))  # and NVSHMEM's own
        library = ctypes.CDLL(needs.host_library())
        from nvshmem import bindings

        with on_device(self.device):
            unique, attributes = bindings.uniqueid(), bindings.InitAttr()
            ctypes.memmove(unique.ptr, uid, UID_BYTES)
            attributes.version = (1 << 16) + bindings.init_attr_dtype.itemsize  # NVSHMEMX_INIT_ATTR_INITIALIZER
            bindings.set_attr_uniqueid_args(rank, size, unique.ptr, attributes.ptr)
            bindings.hostlib_init_attr(bindings.Flags.INIT_WITH_UNIQUEID, attributes.ptr)
            if (bindings.my_pe(), bindings.n_pes()) != (rank, size):
                raise RuntimeError(f"got PE {bindings.my_pe()} of {bindings.n_pes()}, expected {rank} of {size}")
            library.nvshmem_calloc.restype = ctypes.c_void_p
            library.nvshmem_calloc.argtypes = (ctypes.c_size_t, ctypes.c_size_t)
            address = library.nvshmem_calloc(1, nbytes)
            if not address:
                raise RuntimeError(f"no room for {nbytes} bytes of the symmetric heap; use fewer --nvshmem-clients, "
                                   "--max-step-rows or --slots")  # fmt: skip
            self._modules.enter()
        return _Heap(int(address), nbytes, self.device)

    @override
    def peer(self, address: int, pe: int) -> int:
        from nvshmem import bindings

        return int(bindings.ptr(address, pe))


@cache
def _open(device: torch.device) -> NvshmemGpu:
    needs.check(device)
    lacks = needs.missing_for_nvshmem(needs.host_library, nvshmem_build.missing)
    if lacks:
        raise ConfigError("transport nvshmem: " + "; and ".join(lacks) + "; gpu, cuda_ipc and tcp work without")
    return NvshmemGpu(device)


def open_nvshmem(device: torch.device) -> WorldGpu:
    """Return the device's one GPU of this process. Raises ConfigError that names what is missing, and its cure."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return _open(torch.device("cuda", index))
