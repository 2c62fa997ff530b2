"""An engine on a GPU and a shard on the same host: the GPU puts each step where the shard finds it.

A put kernel (put.cu), on a stream of its own with the highest priority, stores tables and rows and then the
request signal, with release at system scope; nothing waits for the engine's GEMM, and the host waits for no
stream. Signals, headers and tables lie in the region, which this process pins. Rows and deltas lie in its
mirror, memory of the shard's GPU that the client has mapped too (device.host.device_memory), or, where there is
none, in the region as well. A GPU rings no bell: the shard looks at such clients' signals itself.

The host launches on one side, and waits for answers on the other: see Link.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Literal

import msgspec
import structlog
import torch
from typing_extensions import override

from kernels_cuda.cuda import on_device
from kernels_cuda.routing import Choice, Route, router
from lora_server.device.client import put
from lora_server.device.client.put import Put
from lora_server.device.client.steps import DeviceSteps
from lora_server.device.protocol.pinned import Pinned
from lora_server.device.protocol.virtual_memory import Imported, as_tensor
from lora_server.errors import ConfigError
from lora_server.transport.base import Link
from lora_server.transport.rows import MirrorRows, mirror_bytes
from lora_server.transport.shm import ShmLink
from lora_server.wire.messages import Hello, Welcome
from lora_server.wire.region import PAGE_BYTES, Region, RegionLayout
from lora_server.wire.slot import RequestHeader


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
        return self._mapped.address

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


HIGHEST = -100  # of a stream's priorities: lower than any GPU has, and torch takes the nearest
log = structlog.get_logger()


class CudaPuts:
    """A GPU as one link uses it: maps and pins memory, and puts steps in order, beside the engine's own work."""

    def __init__(self, device: torch.device) -> None:
        """Raises as CuPy does."""
        self.device = device
        self.stream = torch.cuda.Stream(device, priority=HIGHEST)
        self._held: list[ImportedMirror | Pinned] = []
        put.try_out(self.stream, device)
        router(device)  # compiled now, not in the first step

    def map(self, welcome: Welcome, fd: int, layout: RegionLayout) -> MirrorRows:
        """Map the mirror that a shard offers. Raises ConfigError."""
        mirror = ImportedMirror(welcome, fd, layout, self.device)
        self._held.append(mirror)
        return mirror.rows

    def pin(self, memory: memoryview, parts: list[tuple[int, int]]) -> Callable[[int], int]:
        """Let kernels use parts of host memory; return the address of an offset as a function. Raises ConfigError."""
        pinned = Pinned(memory, parts, self.device)
        self._held.append(pinned)
        return pinned.pointer

    def launch(self, step: Put, choice: Choice | None) -> None:
        """Route, if there is a choice, and put: after what the engine has queued. Does not wait."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        for tensor in (step.x, step.rows_M, *(choice.tensors if choice is not None else ())):
            if tensor is not None:
                tensor.record_stream(self.stream)
        if choice is not None:
            assert step.route is not None
            with torch.cuda.stream(self.stream):
                router(self.device).launch(choice, step.route)
        put.launch(step, self.stream)

    def close(self) -> None:
        """Unmap and unpin, once the kernels have ended, as those of a lost GPU have. Idempotent."""
        if self._held:
            with contextlib.suppress(RuntimeError):
                torch.cuda.synchronize(self.device)
        while self._held:
            with contextlib.suppress(RuntimeError):
                self._held.pop(0).close()


class IpcLink(Link):
    """The client's end; see Link. Shared memory carries the handshake, the headers and the answers' signals."""

    def __init__(
        self, address: str, hello: Hello, shard: int, puts: CudaPuts, mirror: Literal["must", "may", "no"]
    ) -> None:
        """`mirror`: whether rows must, may or shall not lie in the shard's GPU memory. Owns `puts`.

        Raises ConfigError without a mirror that there must be, or where the region cannot be pinned.
        """
        self.shard, self.epoch, self.device, self._puts = shard, hello.epoch, puts.device, puts
        asks = msgspec.structs.replace(hello, device=True, mirror=mirror != "no")
        try:
            self.shm = ShmLink(address, asks, shard, prepare=lambda *offer: self._prepare(mirror, *offer))
        except BaseException:
            puts.close()
            raise

    def _prepare(self, wanted: str, region: Region, welcome: Welcome, fd: int) -> tuple[bool, list[int]]:
        self.region, layout = region, region.layout
        mirror = None if wanted == "no" else self._map(wanted, welcome, fd)
        address_of = self._puts.pin(region.memory, _used_parts(layout, mirror is not None))
        slots = [address_of(PAGE_BYTES + i * layout.request_bytes) for i in range(layout.depth)]
        self._steps = DeviceSteps(self._puts.device, self.epoch, slots, address_of(0), mirror)
        self.transport = "shm"
        if mirror is not None:
            self.transport, self.rows = "cuda_ipc", mirror
        return mirror is not None, []

    def _map(self, wanted: str, welcome: Welcome, fd: int) -> MirrorRows | None:
        try:
            return self._puts.map(welcome, fd, self.region.layout)
        except ConfigError as error:
            if wanted == "must":
                raise
            log.warning("rows go through host memory", shard=self.shard, reason=str(error))
            return None

    @override
    def put_rows(self, header: RequestHeader, x_TK: torch.Tensor, rows_M: torch.Tensor) -> None:
        self._steps.put_rows(header, x_TK, rows_M)

    @override
    def put_routed(self, header: RequestHeader, x_TK: torch.Tensor, choice: Choice, by_entry: bool) -> None:
        self._steps.put_routed(header, x_TK, choice, by_entry)

    @override
    def routed(self, seq: int) -> Route:
        return self._steps.routed(seq)

    @override
    def push(self, seq: int, nbytes: int) -> None:
        """Launch the put; without rows it only signals, behind the steps that were pushed before."""
        self._puts.launch(*self._steps.take(seq))
        self.shm.ring()

    @override
    def wait(self, seq: int, deadline: float) -> None:
        self.shm.wait(seq, deadline)

    @override
    def check(self) -> None:
        self.shm.check()

    @override
    def close(self) -> None:
        self._puts.close()
        self.shm.close()


def _used_parts(layout: RegionLayout, mirror: bool) -> list[tuple[int, int]]:
    """Return the parts of a region that a GPU accesses: all of it, or with a mirror all but the rows."""
    return [(0, PAGE_BYTES), *layout.tables()] if mirror else [(0, layout.nbytes)]
