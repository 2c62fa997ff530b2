"""Which GPU a device is: one per device and process; one that reaches other PEs is another."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lora_server.errors import ConfigError
from lora_server.transport.gpu.gpu import Gpu
from lora_server.transport.gpu.world import WorldGpu

openers: dict[str, Callable[[torch.device], Gpu]] = {}  # by type of device
world_openers: dict[str, Callable[[torch.device], WorldGpu]] = {}


def gpu_of(device: torch.device) -> Gpu:
    """The GPU of a device; raises ConfigError where it is none."""
    if device.type == "cuda" and "cuda" not in openers:
        from lora_server.transport.gpu.cuda import open_cuda

        openers["cuda"] = open_cuda
    if device.type not in openers:
        raise ConfigError(f"transport gpu: got a {device.type} device, expected a GPU; use transport auto")
    return openers[device.type](device)


def world_gpu_of(device: torch.device) -> WorldGpu:
    """The same, in NVSHMEM's world. Raises ConfigError that names what is missing."""
    if device.type == "cuda" and "cuda" not in world_openers:
        from lora_server.transport.gpu.nvshmem import open_nvshmem

        world_openers["cuda"] = open_nvshmem
    if device.type not in world_openers:
        raise ConfigError(f"transport nvshmem: got a {device.type} device, expected a GPU; use transport auto")
    return world_openers[device.type](device)
