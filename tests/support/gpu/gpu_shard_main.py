"""A shard process with a kernel that serves on a GPU that is this CPU; see tests.support.gpu.gpu_serve."""

from __future__ import annotations

import torch

from lora_server.daemon import backends
from lora_server.daemon.child_main import run_child
from lora_server.daemon.shard_main import ShardProcess
from lora_server.daemon.shard_parts import ServingParts, ShardListeners
from lora_server.device.host.connection import SlotsMemory
from lora_server.memory.pages import PagePool
from lora_server.placement import Placement
from lora_server.shard.device_host import DeviceShardHost
from lora_server.transport.base import DeviceMemory
from tests.support.gpu.emulated_gpu import EmulatedGpu
from tests.support.gpu.emulated_world import EmulatedWorldGpu

GPU = EmulatedGpu()
PAGES = 6  # an adapter of a tiny model takes one


class EmulatedListeners(ShardListeners):
    def _client_memory(self) -> DeviceMemory:
        return SlotsMemory(GPU)


class EmulatedParts(ServingParts):
    def _serving(self, placement: Placement) -> DeviceShardHost:
        config, dtype = self.config, getattr(torch, self.config.dtype)
        pool = PagePool(PAGES, "cpu")
        return self.device_host(
            backends.resident(
                placement,
                config.shard,
                dtype,
                EmulatedWorldGpu() if config.gpu_transport == "nvshmem" else GPU,
                self.listeners.port.layout,
                config.max_step_rows,
                pool,
                memory=self.memory,
            )
        )


def main() -> None:
    run_child(lambda config: ShardProcess(config, EmulatedListeners, EmulatedParts))
