"""CUDA IPC on one host: shared memory for headers and signals, a twin in GPU memory for rows and deltas.

The shard allocates a twin of each client's region on its own GPU and passes its IPC handle over the Unix
socket of the handshake. A client's put kernel gathers rows straight into that memory and then stores the
request signal, with release at system scope, into the region's signal line, which is pinned host memory;
nothing waits for the engine's GEMM, which runs on another stream. The shard's kernels read the rows where
they are, write the deltas beside them, and the client reads those through the same mapping.

The host launches and waits on both sides. A GPU cannot ring a doorbell, so a shard with such clients
looks at their signals every POLL_SECONDS (transport.base.Port).
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from lora_server.errors import ConfigError, ShardUnavailableError
from lora_server.transport.base import DeviceLink
from lora_server.transport.shm import ShmLink
from lora_server.transport.twin import DeviceTwin
from lora_server.wire import slot
from lora_server.wire.messages import Hello
from lora_server.wire.region import PAGE_BYTES, RegionLayout
from lora_server.wire.slot import RequestHeader

THREADS = 256
MAX_BLOCKS = 64
SOURCE = Path(__file__).with_name("put.cu")
VECTOR_BYTES, HALF_BYTES = 16, 2
PORTABLE_AND_MAPPED = 3  # cudaHostRegister's flags


def _view(pointer: int, nbytes: int, owner: object, device: torch.device) -> torch.Tensor:
    """A uint8 tensor over memory that is not torch's; it keeps `owner` alive."""
    import cupy

    memory = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(pointer, nbytes, owner, device.index), 0)
    return torch.as_tensor(cupy.ndarray((nbytes,), cupy.uint8, memory))


class ExportedTwin(DeviceTwin):
    """The shard's end: memory of its own GPU; `handle` is what a client needs to map it."""

    def __init__(self, layout: RegionLayout, device: torch.device) -> None:
        """Raises ShardUnavailableError where the GPU has no room, or cannot export its memory."""
        import cupy

        self._runtime, self._pointer = cupy.cuda.runtime, 0
        with cupy.cuda.Device(device.index):
            try:
                self._pointer = self._runtime.malloc(layout.nbytes)
                self.handle: bytes = self._runtime.ipcGetMemHandle(self._pointer)
            except self._runtime.CUDARuntimeError as error:
                self.free()
                raise ShardUnavailableError(
                    f"{device}: cannot set up {layout.nbytes} bytes for a client's rows ({error}); start the server "
                    "with a smaller --pool-gib, --max-step-rows or --slots, or attach with transport='shm'"
                ) from error
        super().__init__(_view(self._pointer, layout.nbytes, None, device), layout)

    def free(self) -> None:
        """Give the memory back; nobody may still map it. Idempotent."""
        if self._pointer:
            self._runtime.free(self._pointer)
            self._pointer = 0


class ImportedTwin(DeviceTwin):
    """The client's end: the shard's memory, mapped."""

    def __init__(self, handle: bytes, layout: RegionLayout, device: torch.device) -> None:
        """Raises ConfigError where the memory cannot be mapped."""
        import cupy

        self._runtime = cupy.cuda.runtime
        with cupy.cuda.Device(device.index):
            try:
                self._pointer = self._runtime.ipcOpenMemHandle(handle)
            except self._runtime.CUDARuntimeError as error:
                raise ConfigError(
                    f"transport cuda_ipc: {device} cannot map the shard's GPU memory ({error}); is the shard's GPU "
                    "visible to this process? transport='shm' works without"
                ) from error
        super().__init__(_view(self._pointer, layout.nbytes, None, device), layout)

    def close(self) -> None:
        """Unmap; idempotent. The caller has waited for its kernels."""
        if self._pointer:
            self._runtime.ipcCloseMemHandle(self._pointer)
            self._pointer = 0


class _Stream:
    """torch's stream, as CuPy takes those of others."""

    def __init__(self, pointer: int) -> None:
        self._pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._pointer


@cache
def _put_kernels() -> dict[int, Any]:
    import cupy

    module = cupy.RawModule(code=SOURCE.read_text(), options=("-std=c++17",))
    return {VECTOR_BYTES: module.get_function("put_vectors"), HALF_BYTES: module.get_function("put_halves")}


class CudaIpcLink(ShmLink, DeviceLink):
    """The client's end; see Link. Used from a process whose activations are on `device`."""

    def __init__(self, address: str, hello: Hello, shard: int, device: torch.device) -> None:
        import cupy

        super().__init__(address, Hello(hello.client, hello.epoch, hello.key, twin=True), shard)
        self._cupy, self._device = cupy, device
        self._waiting: tuple[RequestHeader, torch.Tensor, torch.Tensor] | None = None
        self._twin: ImportedTwin | None = None
        self._signals = 0  # the address of the pinned signal lines
        self._stream = torch.cuda.Stream(device)
        self._finished = torch.zeros(1, dtype=torch.int32, device=device)
        try:
            if not self.welcome.twin:
                raise ConfigError(f"transport cuda_ipc: shard {shard} does not compute on a GPU; use transport='shm'")
            self._twin = ImportedTwin(self.welcome.twin, self.region.layout, device)
            self._pin_signals()
            _put_kernels()  # compiled now, not in the first step
        except BaseException:
            self.close()
            raise
        self.region.twin = self._twin

    def _pin_signals(self) -> None:
        """Let this GPU store to the region's signal lines."""
        runtime = self._cupy.cuda.runtime
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.region.memory))
        try:
            with self._cupy.cuda.Device(self._device.index):
                runtime.hostRegister(address, PAGE_BYTES, PORTABLE_AND_MAPPED)
        except runtime.CUDARuntimeError as error:
            raise ConfigError(
                f"transport cuda_ipc: {self._device} cannot pin the signals of shard {self.shard} ({error}); "
                "use transport='shm'"
            ) from error
        self._signals = address

    @override
    def put_rows(self, header: RequestHeader, x_TK: torch.Tensor, rows_M: torch.Tensor) -> None:
        self._waiting = header, x_TK.contiguous(), rows_M.to(self._device)

    @override
    def push(self, seq: int, nbytes: int) -> None:
        """One kernel, beside what the engine's own stream does from here on."""
        if self._waiting is None:  # no rows: the host signals, but not before the steps that it pushed earlier
            self._stream.synchronize()
            super().push(seq, nbytes)
            return
        (header, x_TK, rows_M), self._waiting = self._waiting, None
        assert self._twin is not None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for tensor in (x_TK, rows_M):
            tensor.record_stream(self._stream)
        target, row_bytes = self._twin.request_rows(header), x_TK.shape[1] * x_TK.element_size()
        aligned = (x_TK.data_ptr() | target.data_ptr() | row_bytes) % VECTOR_BYTES == 0
        unit = VECTOR_BYTES if aligned else HALF_BYTES
        blocks = max(1, min(MAX_BLOCKS, -(-len(rows_M) * row_bytes // (unit * THREADS))))
        arguments = [x_TK.data_ptr(), rows_M.data_ptr(), target.data_ptr(), len(rows_M), row_bytes // unit]
        arguments += [self._finished.data_ptr(), self._signals, slot.signal(self.epoch, seq)]
        numbers = tuple(self._cupy.uint64(value) for value in arguments)
        stream = self._cupy.cuda.Stream.from_external(_Stream(self._stream.cuda_stream))
        with self._cupy.cuda.Device(self._device.index), stream:
            _put_kernels()[unit]((blocks,), (THREADS,), numbers)
        self._doorbell.wake()

    @override
    def close(self) -> None:
        if self._twin is not None:
            torch.cuda.synchronize(self._device)  # whoever reads or writes through the mapping
            self.region.twin = None
            self._twin.close()
            self._twin = None
        if self._signals:
            self._cupy.cuda.runtime.hostUnregister(self._signals)
            self._signals = 0
        super().close()
