"""CUDA's virtual memory management: memory that a process creates and hands over as a descriptor.

The physical memory lives until the last process has unmapped it, so that no side's death takes it from under another's
kernels.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack
from typing_extensions import override

from kernels_cuda.cuda import on_device
from lora_server.device.protocol.gpu import Memory, Shared

ZEROS_BYTES = 2 << 20


class DriverError(RuntimeError):
    """A call of the CUDA driver failed."""


def driver() -> Any:
    """Return the driver's bindings; raises ImportError if the extra [cuda] is not installed."""
    from cuda.bindings import driver as bindings

    return bindings


def call(name: str, *arguments: object) -> Any:
    """Call a function of the driver; return its results without the error code. Raises DriverError."""
    error, *results = getattr(driver(), name)(*arguments)
    if int(error) != 0:
        raise DriverError(f"{name}: {error.name}")
    return results[0] if len(results) == 1 else results


def as_tensor(pointer: int, nbytes: int, owner: object, device: torch.device) -> torch.Tensor:
    """Return a tensor, uint8 [nbytes], over memory that is not torch's; it keeps `owner` alive.

    It is labelled as `device`'s, whichever GPU it lies on, so that no copy makes a context on another.
    """
    import cupy

    memory = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(pointer, nbytes, owner, device.index), 0)
    return from_dlpack(cupy.ndarray((nbytes,), cupy.uint8, memory))


def can_share_descriptors(device: torch.device) -> bool:
    """Return whether memory of the device can be exported as a descriptor."""
    names = ("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED")
    attributes = driver().CUdevice_attribute
    return all(
        call("cuDeviceGetAttribute", getattr(attributes, f"CU_DEVICE_ATTRIBUTE_{name}"), device.index) for name in names
    )


class _Mapped:
    """Physical memory in this process's address space, readable and writable by one device."""

    def __init__(self, handle: Any, nbytes: int, device: torch.device) -> None:
        self.nbytes, self.pointer, self._mapped = nbytes, 0, False
        try:
            self.pointer = int(call("cuMemAddressReserve", nbytes, 0, 0, 0))
            call("cuMemMap", self.pointer, nbytes, 0, handle, 0)
            self._mapped = True
            access = driver().CUmemAccessDesc()
            access.location = _location(device)
            access.flags = driver().CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            call("cuMemSetAccess", self.pointer, nbytes, [access], 1)
        except DriverError:
            self.unmap()
            raise

    def unmap(self) -> None:
        """Unmap the memory; idempotent. No kernel of this process may still use it. Does not wait for the GPU."""
        if self._mapped:
            call("cuMemUnmap", self.pointer, self.nbytes)
            self._mapped = False
        if self.pointer:
            call("cuMemAddressFree", self.pointer, self.nbytes)
            self.pointer = 0


def _location(device: torch.device) -> Any:
    location = driver().CUmemLocation()
    location.type = driver().CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = device.index
    return location


def _properties(device: torch.device) -> Any:
    wanted = driver().CUmemAllocationProp()
    wanted.type = driver().CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location = _location(device)
    wanted.requestedHandleTypes = _descriptor()
    return wanted


def _descriptor() -> Any:
    return driver().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def _whole(nbytes: int, device: torch.device) -> int:
    """Round up to whole units of allocation (2 MiB), so that no other allocation shares one."""
    minimum = driver().CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    granularity = int(call("cuMemGetAllocationGranularity", _properties(device), minimum))
    return -(-nbytes // granularity) * granularity


def zero(memory: torch.Tensor) -> None:
    """Clear memory that another process may have used before.

    Copies do it: a kernel might not be scheduled beside one that serves; nor pinned memory, as pinning may wait for it.
    """
    zeros = torch.zeros(ZEROS_BYTES, dtype=torch.uint8)
    stream = torch.cuda.Stream(memory.device)
    with torch.cuda.stream(stream):
        for part in memory.split(ZEROS_BYTES):
            part.copy_(zeros[: len(part)])
    stream.synchronize()


class Imported(Memory):
    """Another process's memory, by a descriptor that stays the caller's."""

    def __init__(self, fd: int, nbytes: int, device: torch.device) -> None:
        """Import and map the memory; raises RuntimeError."""
        physical = call("cuMemImportFromShareableHandle", fd, _descriptor())
        try:
            self._mapped = _Mapped(physical, _whole(nbytes, device), device)
        finally:
            call("cuMemRelease", physical)
        self._device, self.address = device, self._mapped.pointer
        self.tensor = as_tensor(self.address, nbytes, None, device)

    @override
    def close(self) -> None:
        with on_device(self._device):
            self._mapped.unmap()


class Exported(Shared):
    """Memory of this process in whole units of allocation, all of which `tensor` is over."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        """Allocate the memory; raises RuntimeError if there is no room, or it cannot be shared."""
        self._device, self.fd, self._mapped = device, -1, None
        nbytes = _whole(nbytes, device)
        physical = call("cuMemCreate", nbytes, _properties(device), 0)
        try:
            self.fd = int(call("cuMemExportToShareableHandle", physical, _descriptor(), 0))
            self._mapped = _Mapped(physical, nbytes, device)
            self.address = self._mapped.pointer
            self.tensor = as_tensor(self.address, nbytes, None, device)
            zero(self.tensor)
        except BaseException:
            self.close()
            raise
        finally:
            call("cuMemRelease", physical)  # the mapping and the descriptor hold it

    _mapped: _Mapped | None

    @override
    def close(self) -> None:
        """Unmap the memory; other processes' mappings keep it alive for them. Idempotent; raises RuntimeError."""
        mapped, self._mapped = self._mapped, None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        with on_device(self._device):
            if mapped is not None:
                mapped.unmap()
