"""Shards in threads of this process, with clients that have a device, which is this CPU; see emulated_link."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from lora_server.demo.inproc import InprocServer
from lora_server.spec import ModelSpec
from lora_server.transport.base import DeviceMemory, Link
from lora_server.transport.shm_listener import ShmListener
from lora_server.wire.messages import Hello
from tests.support.gpu.emulated_link import MemfdMemory, emulated_link


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
