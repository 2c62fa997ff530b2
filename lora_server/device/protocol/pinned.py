"""Host memory that a GPU can use."""

from __future__ import annotations

import contextlib
import ctypes

import torch

from kernels_cuda.cuda import on_device
from lora_server.errors import ConfigError

PORTABLE_AND_MAPPED = 3  # cudaHostRegister's flags


class Pinned:
    """Parts (begin, end) of host memory, whole pages, registered with the driver: a GPU can load and store there."""

    def __init__(self, memory: memoryview, parts: list[tuple[int, int]], device: torch.device) -> None:
        """Raises ConfigError where that is refused. Keeps no view of the memory."""
        import cupy

        self._runtime, self._device = cupy.cuda.runtime, device
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._registered: list[int] = []
        try:
            with on_device(device):
                for begin, end in parts:
                    self._runtime.hostRegister(self._address + begin, end - begin, PORTABLE_AND_MAPPED)
                    self._registered.append(self._address + begin)
        except self._runtime.CUDARuntimeError as error:
            self.close()
            raise ConfigError(f"{device} cannot pin host memory ({error}); raise the limit on locked memory") from error

    def pointer(self, offset: int) -> int:
        """Return the device's address of a byte of a registered part."""
        with on_device(self._device):
            return int(self._runtime.pointerGetAttributes(self._address + offset).devicePointer)

    def close(self) -> None:
        """Idempotent; no copy or kernel may still use it."""
        with on_device(self._device), contextlib.suppress(self._runtime.CUDARuntimeError):
            while self._registered:
                self._runtime.hostUnregister(self._registered.pop())
