"""Memory of a GPU that two processes share, and host memory that a GPU can use.

A shard creates the memory of a client's rows and hands it over as a descriptor (CUDA's virtual memory
management): the physical memory lives until the last process has unmapped it, so that neither side's
death takes it from under the other's kernels. Where a GPU or its driver does not support that the older IPC
handles are used: freeing what a client still maps is undefined there, so such memory is used again, once
its client's process has ended, and never freed. Either way it is zeroed before a client sees it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import structlog
import torch
from torch.utils.dlpack import from_dlpack

from lora_server.errors import ConfigError, ShardUnavailableError
from lora_server.transport.base import Twin
from lora_server.transport.rows import Rows, TwinRows, twin_bytes
from lora_server.wire.messages import Welcome
from lora_server.wire.region import RegionLayout

BLOCK_BYTES = 2 << 20
PORTABLE_AND_MAPPED = 3  # cudaHostRegister's flags
log = structlog.get_logger()


class _DriverError(RuntimeError):
    """A call of the CUDA driver failed."""


def _driver() -> Any:
    """cuda.bindings; raises ImportError where lora-server[cuda] is not installed."""
    from cuda.bindings import driver

    return driver


def _call(name: str, *arguments: object) -> Any:
    """One function of the driver: its results without the error code. Raises _DriverError."""
    error, *results = getattr(_driver(), name)(*arguments)
    if int(error) != 0:
        raise _DriverError(f"{name}: {error.name}")
    return results[0] if len(results) == 1 else results


@contextmanager
def _on(device: torch.device) -> Iterator[None]:
    """The device's context is this thread's; CuPy sets it even where torch believes that it is."""
    import cupy

    with cupy.cuda.Device(device.index):
        cupy.cuda.runtime.setDevice(device.index)
        yield


def as_tensor(pointer: int, nbytes: int, owner: object, device: torch.device) -> torch.Tensor:
    """uint8 [nbytes] over memory that is not torch's; it keeps `owner` alive.

    It is labelled as `device`'s, whichever GPU it lies on, so that no copy makes a context on another.
    """
    import cupy

    memory = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(pointer, nbytes, owner, device.index), 0)
    return from_dlpack(cupy.ndarray((nbytes,), cupy.uint8, memory))


# -- virtual memory management


def can_share_descriptors(device: torch.device) -> bool:
    """Whether memory of the device can be exported as a descriptor."""
    names = ("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED")
    attributes = _driver().CUdevice_attribute
    return all(
        _call("cuDeviceGetAttribute", getattr(attributes, f"CU_DEVICE_ATTRIBUTE_{name}"), device.index)
        for name in names
    )


class _Mapped:
    """Physical memory in this process's address space, readable and writable by one device."""

    def __init__(self, handle: Any, nbytes: int, device: torch.device) -> None:
        self.nbytes, self.pointer, self._mapped = nbytes, 0, False
        try:
            self.pointer = int(_call("cuMemAddressReserve", nbytes, 0, 0, 0))
            _call("cuMemMap", self.pointer, nbytes, 0, handle, 0)
            self._mapped = True
            access = _driver().CUmemAccessDesc()
            access.location = _location(device)
            access.flags = _driver().CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            _call("cuMemSetAccess", self.pointer, nbytes, [access], 1)
        except _DriverError:
            self.unmap()
            raise

    def unmap(self) -> None:
        """Idempotent; no kernel of this process may still use it. Does not wait for the GPU."""
        if self._mapped:
            _call("cuMemUnmap", self.pointer, self.nbytes)
            self._mapped = False
        if self.pointer:
            _call("cuMemAddressFree", self.pointer, self.nbytes)
            self.pointer = 0


def _location(device: torch.device) -> Any:
    location = _driver().CUmemLocation()
    location.type = _driver().CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = device.index
    return location


def _properties(device: torch.device) -> Any:
    """Of a twin's physical memory."""
    driver = _driver()
    wanted = driver.CUmemAllocationProp()
    wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location = _location(device)
    wanted.requestedHandleTypes = _descriptor()
    return wanted


def _descriptor() -> Any:
    return _driver().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def _whole(layout: RegionLayout, device: torch.device) -> int:
    """Bytes of a twin in whole units of allocation (2 MiB), which nobody else's memory shares."""
    minimum = _driver().CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    granularity = int(_call("cuMemGetAllocationGranularity", _properties(device), minimum))
    return -(-twin_bytes(layout) // granularity) * granularity


class _DescriptorTwin:
    """A shard's end; see Twin."""

    rows: Rows
    kind: Literal["fd", "ipc"] = "fd"
    handle = b""

    def __init__(self, layout: RegionLayout, device: torch.device) -> None:
        self._device, self.fd, self._memory = device, -1, None
        nbytes = _whole(layout, device)
        physical = _call("cuMemCreate", nbytes, _properties(device), 0)
        try:
            self.fd = int(_call("cuMemExportToShareableHandle", physical, _descriptor(), 0))
            self._memory = _Mapped(physical, nbytes, device)
            memory = as_tensor(self._memory.pointer, nbytes, None, device)
            _zero(memory)
        except BaseException:
            self.free()
            raise
        finally:
            _call("cuMemRelease", physical)  # the mapping and the descriptor hold it
        self.rows = TwinRows(memory, layout)

    _memory: _Mapped | None

    def free(self) -> bool:
        """At once, whatever the client does: its own mapping holds what it maps. Idempotent."""
        memory, self._memory = self._memory, None
        try:
            with _on(self._device):
                if memory is not None:
                    memory.unmap()
        except RuntimeError as error:  # the GPU is lost to this process, and its next step ends it
            log.error("a client's GPU memory cannot be unmapped", reason=str(error))
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        return True


def _zero(memory: torch.Tensor) -> None:
    """What a GPU's memory held before was another's."""
    stream = torch.cuda.Stream(memory.device)
    with torch.cuda.stream(stream):
        memory.zero_()
    stream.synchronize()


# -- where descriptors cannot be had


class _HandleTwin:
    """A shard's end by an IPC handle; see Twin. Freed, it waits in `spare` for the next client."""

    rows: Rows
    kind: Literal["fd", "ipc"] = "ipc"
    fd = -1

    def __init__(self, layout: RegionLayout, device: torch.device, spare: list[_HandleTwin]) -> None:
        import cupy

        self._spare, self._client = spare, -1
        nbytes = -(-twin_bytes(layout) // BLOCK_BYTES) * BLOCK_BYTES  # a client maps whole blocks of it
        pointer = cupy.cuda.runtime.malloc(nbytes)
        try:
            self.handle: bytes = cupy.cuda.runtime.ipcGetMemHandle(pointer)
        except cupy.cuda.runtime.CUDARuntimeError:
            cupy.cuda.runtime.free(pointer)
            raise
        self._memory = as_tensor(pointer, nbytes, None, device)
        self.rows = TwinRows(self._memory, layout)

    def give(self, pid: int) -> _HandleTwin:
        """To a client's process, which sees zeros."""
        _zero(self._memory)
        with contextlib.suppress(OSError):  # it has ended, or is out of sight: in another container, say
            self._client = os.pidfd_open(pid)
        return self

    def free(self) -> bool:
        """Not before the client's process has ended: until then it could read and write there."""
        if self._client < 0 or not select.select([self._client], [], [], 0)[0]:
            return False
        os.close(self._client)
        self._client = -1
        self._spare.append(self)
        return True


class GpuMemory:
    """What a shard's GPU has for its clients; see DeviceMemory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spare: list[_HandleTwin] = []
        self._lock = threading.Lock()

    def twin(self, layout: RegionLayout, pid: int) -> Twin:
        """For a client's process. Raises ShardUnavailableError where the GPU has no room, or cannot share it."""
        with self._lock, _on(self._device):
            try:
                if can_share_descriptors(self._device):
                    return _DescriptorTwin(layout, self._device)
                spare = self._spare.pop() if self._spare else _HandleTwin(layout, self._device, self._spare)
                return spare.give(pid)
            except (RuntimeError, ImportError) as error:
                raise ShardUnavailableError(
                    f"{self._device}: cannot share {twin_bytes(layout)} bytes for a client's rows ({error}); start the "
                    "server with a smaller --device-pool, --max-step-rows or --slots"
                ) from error

    def pin(self, memory: memoryview) -> Callable[[], None]:
        """Memory that cannot be pinned is copied more slowly."""
        try:
            pinned = Pinned(memory, [(0, memory.nbytes)], self._device)
        except ConfigError as error:
            log.warning("slots are copied as pageable memory", reason=str(error))
            return lambda: None
        return pinned.close


# -- the client's end


class ImportedTwin:
    """A shard's memory in a client's process; `rows` are views of it."""

    def __init__(self, welcome: Welcome, fd: int, layout: RegionLayout, device: torch.device) -> None:
        """Raises ConfigError where the memory was not offered, or cannot be mapped."""
        if not welcome.twin:
            raise ConfigError(f"transport cuda_ipc: {welcome.why}; use transport='shm'")
        self._device, self._mapped, self._opened = device, None, 0
        try:
            with _on(device):
                pointer = self._map(fd, layout) if welcome.twin == "fd" else self._open(welcome.handle)
                self.rows = TwinRows(as_tensor(pointer, twin_bytes(layout), None, device), layout)
        except (RuntimeError, ImportError) as error:
            self.close()
            raise ConfigError(
                f"transport cuda_ipc: {device} cannot map the shard's GPU memory ({error}); is the shard's GPU "
                "visible to this process? transport='shm' works without"
            ) from error

    _mapped: _Mapped | None

    def _map(self, fd: int, layout: RegionLayout) -> int:
        physical = _call("cuMemImportFromShareableHandle", fd, _descriptor())
        try:
            self._mapped = _Mapped(physical, _whole(layout, self._device), self._device)
        finally:
            _call("cuMemRelease", physical)
        return self._mapped.pointer

    def _open(self, handle: bytes) -> int:
        import cupy

        self._opened = cupy.cuda.runtime.ipcOpenMemHandle(handle)
        return self._opened

    def close(self) -> None:
        """Unmap; idempotent. The caller has waited for its kernels."""
        with _on(self._device):
            if self._mapped is not None:
                self._mapped.unmap()
            if self._opened:
                import cupy

                cupy.cuda.runtime.ipcCloseMemHandle(self._opened)
                self._opened = 0


class Pinned:
    """Parts (begin, end) of host memory, whole pages, registered with the driver: a GPU can load and store there."""

    def __init__(self, memory: memoryview, parts: list[tuple[int, int]], device: torch.device) -> None:
        """Raises ConfigError where that is refused. Keeps no view of the memory."""
        import cupy

        self._runtime, self._device = cupy.cuda.runtime, device
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._registered: list[int] = []
        try:
            with _on(device):
                for begin, end in parts:
                    self._runtime.hostRegister(self._address + begin, end - begin, PORTABLE_AND_MAPPED)
                    self._registered.append(self._address + begin)
        except self._runtime.CUDARuntimeError as error:
            self.close()
            raise ConfigError(f"{device} cannot pin host memory ({error}); raise the limit on locked memory") from error

    def pointer(self, offset: int) -> int:
        """Where the device finds a byte of a registered part."""
        with _on(self._device):
            return int(self._runtime.pointerGetAttributes(self._address + offset).devicePointer)

    def close(self) -> None:
        """Idempotent; no copy or kernel may still use it."""
        with _on(self._device), contextlib.suppress(self._runtime.CUDARuntimeError):
            while self._registered:
                self._runtime.hostUnregister(self._registered.pop())
