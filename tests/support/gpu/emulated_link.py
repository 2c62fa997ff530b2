"""A device that is this CPU: links with emulated kernels, and shards with a memfd as device memory.

Both ends do all that they do with a GPU, but for the GPU itself: handshake, mirrors, put and route kernels.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from kernels_cuda import routing
from kernels_cuda.heuristics import Variant
from kernels_cuda.routing import Choice
from lora_server.demo.inproc import InprocServer
from lora_server.device.client.cuda_ipc import IpcLink
from lora_server.device.client.put import Put
from lora_server.errors import ConfigError, ShardUnavailableError
from lora_server.spec import ModelSpec
from lora_server.transport.base import DeviceMemory, Link
from lora_server.transport.mapping import Mapping
from lora_server.transport.rows import MirrorRows, mirror_bytes
from lora_server.transport.shm import create_memory
from lora_server.transport.shm_listener import ShmListener
from lora_server.wire.messages import Hello, Welcome
from lora_server.wire.region import RegionLayout
from tests.support.gpu import emulated

CPU = torch.device("cpu")
PUT = Variant(bulk_copy=False, warps=1)
ROUTE = Variant(bulk_copy=False, warps=2)
STACK_BYTES = 32 << 10


def _rows(memory: Mapping, layout: RegionLayout) -> MirrorRows:
    return MirrorRows(torch.frombuffer(memory.view, dtype=torch.uint8), layout)


class MemfdMirror:
    kind, handle = "fd", b""

    def __init__(self, layout: RegionLayout) -> None:
        self.fd, memory = create_memory("mirror", mirror_bytes(layout))
        self.rows = _rows(memory, layout)
        self.freed = threading.Event()

    def free(self) -> bool:
        os.close(self.fd)
        self.freed.set()
        return True


class MemfdMemory:
    """See DeviceMemory. `full`: there is no room for mirrors; `keeps`: what is pinned now."""

    slots = False

    def __init__(self, full: bool = False) -> None:
        self.full, self.mirrors, self.pinned = full, list[MemfdMirror](), 0

    def mirror(self, layout: RegionLayout, pid: int) -> MemfdMirror:
        if self.full:
            raise ShardUnavailableError("no room on this device")
        self.mirrors.append(MemfdMirror(layout))
        return self.mirrors[-1]

    def pin(self, memory: memoryview) -> Callable[[], None]:
        self.pinned += 1

        def unpin() -> None:
            self.pinned -= 1

        return unpin


class EmulatedPuts:
    """See CudaPuts. `can_map`: whether this client's device can map a mirror."""

    device = CPU

    def __init__(self, can_map: bool) -> None:
        self._can_map = can_map

    def map(self, welcome: Welcome, fd: int, layout: RegionLayout) -> MirrorRows:
        self.welcome = welcome
        if not (welcome.mirror and self._can_map):
            raise ConfigError(f"no mirror: {welcome.why or 'this device cannot map it'}")
        return _rows(Mapping(mirror_bytes(layout), fd), layout)

    def pin(self, memory: memoryview, parts: list[tuple[int, int]]) -> Callable[[int], int]:
        begin = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        return lambda offset: begin + offset

    def launch(self, step: Put, choice: Choice | None) -> None:
        assert all(t is None or t.device == self.device for t in (step.x, step.rows_M))
        if choice is not None:
            assert step.route is not None
            values = routing.arguments(choice, step.route)
            emulated.run("route", values, ROUTE, source="route.cu", stack_bytes=STACK_BYTES)
        emulated.run(step.kernel, step.arguments(), PUT, source="put.cu", grid=2, stack_bytes=STACK_BYTES)

    def close(self) -> None:
        """Keep nothing mapped: views of the memory do."""


def emulated_link(address: str, hello: Hello, shard: int, *, mirror: str = "must", can_map: bool = True) -> IpcLink:
    return IpcLink(address, hello, shard, EmulatedPuts(can_map), mirror)


class EmulatedServer(InprocServer):
    """`mirror`: "must" puts rows into device memory, "no" into the slots."""

    device: Callable[[], DeviceMemory | None] = MemfdMemory  # of a shard

    def __init__(
        self, directory: Path, spec: ModelSpec, paths: dict[str, Path], *, mirror: str, **options: object
    ) -> None:
        super().__init__(spec, paths, **options)
        self.mirror, self._stop = mirror, threading.Event()
        self.listeners = [
            ShmListener(shard.port, directory / f"shard-{shard.index}.sock", self.device()) for shard in self.shards
        ]
        self._threads = [threading.Thread(target=s.run, args=(self._stop.is_set,), daemon=True) for s in self.shards]
        for thread in self._threads:
            thread.start()

    def connect(self, hello: Hello) -> list[Link]:
        return [
            emulated_link(one.address, hello, index, mirror=self.mirror) for index, one in enumerate(self.listeners)
        ]

    def close(self) -> None:
        self._stop.set()
        for shard, thread, listener in zip(self.shards, self._threads, self.listeners, strict=True):
            shard.port.ring()
            thread.join(30)
            listener.close()
        super().close()
