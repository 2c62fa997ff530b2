"""A shard's GPU memory in a client's process: mapped by a descriptor, or by an older IPC handle."""

from __future__ import annotations

import torch

from kernels_cuda.cuda import on_device
from lora_server.device.protocol.virtual_memory import Imported, as_tensor
from lora_server.errors import ConfigError
from lora_server.transport.rows import MirrorRows, mirror_bytes
from lora_server.wire.messages import Welcome
from lora_server.wire.region import RegionLayout


class ImportedMirror:
    """A shard's memory in a client's process; `rows` are views of it."""

    def __init__(self, welcome: Welcome, fd: int, layout: RegionLayout, device: torch.device) -> None:
        """Raises ConfigError where the memory was not offered, or cannot be mapped."""
        if not welcome.mirror:
            raise ConfigError(f"transport cuda_ipc: {welcome.why}; use transport='shm'")
        self._device, self._mapped, self._opened = device, None, 0
        try:
            with on_device(device):
                pointer = self._map(fd, layout) if welcome.mirror == "fd" else self._open(welcome.handle)
                self.rows = MirrorRows(as_tensor(pointer, mirror_bytes(layout), None, device), layout)
        except (RuntimeError, ImportError) as error:
            self.close()
            raise ConfigError(
                f"transport cuda_ipc: {device} cannot map the shard's GPU memory ({error}); is the shard's GPU "
                "visible to this process? transport='shm' works without"
            ) from error

    _mapped: Imported | None

    def _map(self, fd: int, layout: RegionLayout) -> int:
        self._mapped = Imported(fd, mirror_bytes(layout), self._device)
        return self._mapped.pointer

    def _open(self, handle: bytes) -> int:
        import cupy

        self._opened = cupy.cuda.runtime.ipcOpenMemHandle(handle)
        return self._opened

    def close(self) -> None:
        """Unmap; idempotent. The caller has waited for its kernels."""
        with on_device(self._device):
            if self._mapped is not None:
                self._mapped.close()
            if self._opened:
                import cupy

                cupy.cuda.runtime.ipcCloseMemHandle(self._opened)
                self._opened = 0
