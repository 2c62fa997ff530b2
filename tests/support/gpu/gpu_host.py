"""A shard of this process whose kernel serves, and clients of it; its GPU is this CPU (emulated_gpu), or a real one."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import torch

from lora_server.adapters import validate_adapter
from lora_server.control.adapters.registry import FIRST_HANDLE
from lora_server.memory.entry import Source
from lora_server.memory.pages import PagePool
from lora_server.memory.resident import ResidentTier
from lora_server.memory.store import WeightStore
from lora_server.placement import Layout, Placement
from lora_server.shard.pump import Pump
from lora_server.transport.base import Grant, Port
from lora_server.transport.gpu.connection import SlotsMemory
from lora_server.transport.gpu.kernel import ServeKernel
from lora_server.transport.gpu.link import GpuLink
from lora_server.transport.shm_listener import ShmListener
from lora_server.wire.messages import Hello
from lora_server.wire.region import RegionLayout
from lora_server.wire.slot import Wire
from tests.support.gpu.emulated_gpu import EmulatedGpu
from tests.support.gpu.gpu_steps import Steps
from tests.support.stores import load
from tests.support.workload import spec_of


class Host:
    """Serves until `close`."""

    def __init__(
        self, directory: Path, *, idle_ns=1_000_000_000, pages=4, wire: Wire = "exact", gpu=None, rows=16
    ) -> None:
        self.spec, self.gpu, self.wire = spec_of("mixtral"), gpu or EmulatedGpu(), wire
        placement = Placement(self.spec, Layout.parse("ep1-pp1"))
        region = RegionLayout.for_model(self.spec, rows, 2, wire)
        self.kernel = ServeKernel(self.gpu, self.spec, torch.bfloat16, region, rows, idle_ns)
        self.port = Port(region)
        self.tier = ResidentTier(placement, 0, torch.bfloat16, PagePool(pages, self.gpu.device), self.kernel)
        self.store = WeightStore(placement, 0, self.tier)
        self.pump = Pump(0, self.port, self.store, self.kernel)
        self.listener = ShmListener(self.port, directory / "shard.sock", SlotsMemory(self.gpu))
        self._stop, self._clients, self._handles = threading.Event(), 0, FIRST_HANDLE
        self._thread = threading.Thread(target=self.pump.run, args=(self._stop.is_set,), daemon=True)
        self._thread.start()

    def load(self, path: Path, *, eager: bool = True) -> int:
        handle, self._handles = self._handles, self._handles + 1
        if eager:
            assert load(self.store, handle, path).result() is None
            return handle
        adapter, version = validate_adapter(path, self.spec)
        known = threading.Event()
        with adapter:
            source = Source(path, version, adapter.stamp)
        self.store.load(handle, source, lambda error: known.set(), eager=False)
        assert known.wait(30)
        return handle

    def join(self, handle: int) -> Steps:
        self._clients += 1
        self.port.grant(Grant(self._clients, 1, b"key"))
        self.port.hold(self._clients, [handle])
        link = GpuLink(self.listener.address, Hello(self._clients, 1, b"key"), 0, self.gpu)
        terms = SimpleNamespace(client=self._clients, epoch=1, spec=self.spec, wire=self.wire)
        return Steps(SimpleNamespace(links=[link], terms=terms), handle)

    def aim(self, steps: Steps, handle: int) -> None:
        self.port.hold(steps.terms.client, [handle])
        steps.handle = handle

    def peers(self) -> list:
        return [key.data for key in self.listener._selector.get_map().values() if hasattr(key.data, "twin")]

    def stop(self) -> None:
        self._stop.set()
        self.port.ring()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def close(self) -> None:
        self.stop()
        self.listener.close()
        self.store.close()
