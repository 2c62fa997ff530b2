"""A shard in this process with a kernel that serves: its store, host thread and listener, without a controller."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path

import torch

from lora_server.adapters import validate_adapter
from lora_server.control.adapters.records import FIRST_HANDLE
from lora_server.device.client.ends import HostEnds
from lora_server.device.client.link import KernelLink
from lora_server.device.host.connection import SlotsMemory
from lora_server.device.host.kernel import IDLE_NS, ServeKernel
from lora_server.device.protocol.codes import HANDLE_BITS
from lora_server.device.protocol.gpu import Gpu
from lora_server.errors import AdapterLoadError, LoraServerError
from lora_server.memory.entry import Source
from lora_server.memory.pages import PagePool
from lora_server.memory.resident import resident_tier
from lora_server.memory.store import WeightStore
from lora_server.placement import Placement
from lora_server.shard.device_host import DeviceShardHost
from lora_server.transport.base import Grant, Port
from lora_server.transport.shm_listener import ShmListener
from lora_server.wire.messages import Hello
from lora_server.wire.region import RegionLayout
from lora_server.wire.slot import Wire

DEPTH = 2
EPOCH, KEY = 1, b"key"
LOAD_SECONDS, STOP_SECONDS = 30.0, 60.0


class LocalShard:
    """Shard 0 of a placement; serves until `close`."""

    def __init__(
        self, directory: Path, gpu: Gpu, placement: Placement, *, rows: int, pages: int, wire: Wire = "exact",
        idle_ns: int = IDLE_NS,
    ) -> None:  # fmt: skip
        """`rows`: most entries of a step. `directory` gets the listener's socket."""
        self.spec, self.gpu, self.wire = placement.spec, gpu, wire
        region = RegionLayout.for_model(self.spec, rows, DEPTH, wire)
        self.kernel = ServeKernel(gpu, self.spec, torch.bfloat16, region, rows, idle_ns)
        self.port = Port(region)
        self.tier = resident_tier(placement, 0, torch.bfloat16, PagePool(pages, gpu.device), self.kernel)
        self.store = WeightStore(placement, 0, self.tier)
        self.host = DeviceShardHost(0, self.port, self.store, self.kernel)
        self.listener = ShmListener(self.port, directory / "shard.sock", SlotsMemory(gpu))
        self.clients, self._next = 0, FIRST_HANDLE
        self._free: list[int] = []  # handles at the places of dropped adapters
        self._sources: dict[Path, Source] = {}
        self._stop, self._ended = threading.Event(), Future[None]()
        self._thread = threading.Thread(target=self._run, daemon=True, name="shard")
        self._thread.start()

    def _run(self) -> None:
        try:
            self.host.run(self._stop.is_set)
        except BaseException as error:
            self._ended.set_exception(error)
        else:
            self._ended.set_result(None)

    def check(self) -> None:
        """Raise what ended the shard's thread, if anything has."""
        if self._ended.done():
            self._ended.result()

    def load(self, path: Path, *, eager: bool = True) -> int:
        """Load an adapter, or (not eager) only look at it; return its handle. Raises what the store says, or late."""
        if path not in self._sources:
            adapter, version = validate_adapter(path, self.spec)
            with adapter:
                self._sources[path] = Source(path, version, adapter.stamp)
        if not self._free:
            self._free, self._next = [self._next], self._next + 1
        handle = self._free.pop()
        answer = Future[LoraServerError | None]()
        self.store.adapters.load(handle, self._sources[path], answer.set_result, eager=eager)
        try:
            error = answer.result(LOAD_SECONDS)
        except TimeoutError:
            raise AdapterLoadError(f"{path}: not loaded within {LOAD_SECONDS:g} s") from None
        if error is not None:
            raise error
        return handle

    def drop(self, handle: int) -> None:
        """Forget an adapter; the next one gets its place, under another generation."""
        self.store.adapters.drop(handle)
        self._free.append(handle + (1 << HANDLE_BITS))

    def connect(self, handles: Iterable[int]) -> KernelLink:
        """A link of another client, which holds these adapters."""
        self.clients += 1
        self.port.grant(Grant(self.clients, EPOCH, KEY))
        self.port.hold(self.clients, handles)
        return KernelLink(self.gpu, HostEnds(self.listener.address, Hello(self.clients, EPOCH, KEY), 0, self.gpu))

    def stop(self) -> None:
        """End the kernel and its host's thread. Raises what ended them before, TimeoutError if they do not end."""
        self._stop.set()
        self.port.ring()
        self._ended.result(STOP_SECONDS)

    def close(self) -> None:
        """Stop, and free all of it."""
        self.stop()
        self.listener.close()
        self.store.close()
