"""Which GPU a device is: one per device and process; one that reaches other PEs is another."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from lora_server.errors import ConfigError
from lora_server.transport.gpu.gpu import Gpu
from lora_server.transport.gpu.world import WorldGpu

openers: dict[str, Callable[[torch.device], Gpu]] = {}  # by type of device
world_openers: dict[str, Callable[[torch.device], WorldGpu]] = {}
_G = TypeVar("_G")


def gpu_of(device: torch.device) -> Gpu:
    """The GPU of a device; raises ConfigError where it is none."""
    if device.type == "cuda" and "cuda" not in openers:
        from lora_server.transport.gpu.cuda import open_cuda

        openers["cuda"] = open_cuda
    return _open(openers, device, "gpu")


def world_gpu_of(device: torch.device) -> WorldGpu:
    """The same, in NVSHMEM's world. Raises ConfigError that names what is missing."""
    if device.type == "cuda" and "cuda" not in world_openers:
        from lora_server.transport.gpu.nvshmem import open_nvshmem

        world_openers["cuda"] = open_nvshmem
    return _open(world_openers, device, "nvshmem")


def _open(known: dict[str, Callable[[torch.device], _G]], device: torch.device, transport: str) -> _G:
    if device.type not in known:
        raise ConfigError(f"transport {transport}: got a {device.type} device, expected a GPU; use transport auto")
    return known[device.type](device)
