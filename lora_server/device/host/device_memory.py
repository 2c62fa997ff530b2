"""Memory of a shard's GPU that it shares with its clients.

A shard creates the memory of a client's rows and hands it over as a descriptor (CUDA's virtual memory
management): the physical memory lives until the last process has unmapped it, so that neither side's
death takes it from under the other's kernels. Where a GPU or its driver does not support that the older IPC
handles are used: freeing what a client still maps is undefined there, so such memory is used again, once
its client's process has ended, and never freed. Either way it is zeroed before a client sees it.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable
from typing import ClassVar, Literal

import structlog
import torch

from kernels_cuda.cuda import on_device
from lora_server.device.protocol.pinned import Pinned
from lora_server.device.protocol.virtual_memory import Exported, as_tensor, can_share_descriptors, zero
from lora_server.errors import ConfigError, ShardUnavailableError
from lora_server.transport.base import Mirror
from lora_server.transport.rows import MirrorRows, Rows, mirror_bytes
from lora_server.wire.region import RegionLayout

BLOCK_BYTES = 2 << 20
log = structlog.get_logger()


class _DescriptorMirror:
    """A shard's end; see Mirror."""

    rows: Rows
    kind: Literal["fd", "ipc", "slots"] = "fd"
    handle = b""

    def __init__(self, layout: RegionLayout, device: torch.device) -> None:
        self._memory = Exported(mirror_bytes(layout), device)
        self.fd = self._memory.fd
        self.rows = MirrorRows(self._memory.tensor, layout)

    def free(self) -> bool:
        """Free the memory at once: the client's own mapping keeps what it maps. Idempotent."""
        try:
            self._memory.close()
        except RuntimeError as error:  # the GPU is lost to this process, and its next step ends it
            log.error("a client's GPU memory cannot be unmapped", reason=str(error))
        return True


# -- where descriptors cannot be had


class _HandleMirror:
    """A shard's end by an IPC handle; see Mirror. Freed, it waits in `spare` for the next client."""

    rows: Rows
    kind: Literal["fd", "ipc", "slots"] = "ipc"
    fd = -1

    def __init__(self, layout: RegionLayout, device: torch.device, spare: list[_HandleMirror]) -> None:
        import cupy

        self._spare, self._client = spare, -1
        nbytes = -(-mirror_bytes(layout) // BLOCK_BYTES) * BLOCK_BYTES  # a client maps whole blocks of it
        pointer = cupy.cuda.runtime.malloc(nbytes)
        try:
            self.handle: bytes = cupy.cuda.runtime.ipcGetMemHandle(pointer)
        except cupy.cuda.runtime.CUDARuntimeError:
            cupy.cuda.runtime.free(pointer)
            raise
        self._memory = as_tensor(pointer, nbytes, None, device)
        self.rows = MirrorRows(self._memory, layout)

    def give(self, pid: int) -> _HandleMirror:
        """Hand it to a client's process, zeroed."""
        zero(self._memory)
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
    """Memory of a shard's GPU for its clients; see DeviceMemory."""

    slots: ClassVar[bool] = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spare: list[_HandleMirror] = []
        self._lock = threading.Lock()

    def mirror(self, layout: RegionLayout, pid: int) -> Mirror:
        """Allocate a mirror for a client's process; raises ShardUnavailableError if that cannot be done."""
        with self._lock, on_device(self._device):
            try:
                if can_share_descriptors(self._device):
                    return _DescriptorMirror(layout, self._device)
                spare = self._spare.pop() if self._spare else _HandleMirror(layout, self._device, self._spare)
                return spare.give(pid)
            except (RuntimeError, ImportError) as error:
                raise ShardUnavailableError(
                    f"{self._device}: cannot share {mirror_bytes(layout)} bytes for a client's rows ({error}); start "
                    "the server with a smaller --device-pool, --max-step-rows or --slots"
                ) from error

    def pin(self, memory: memoryview) -> Callable[[], None]:
        """Memory that cannot be pinned is copied more slowly."""
        try:
            pinned = Pinned(memory, [(0, memory.nbytes)], self._device)
        except ConfigError as error:
            log.warning("slots are copied as pageable memory", reason=str(error))
            return lambda: None
        return pinned.close
