"""The GPU of a device in NVSHMEM's world: one per device and process, and not the one of protocol.opened."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lora_server.device.nvshmem.world import WorldGpu
from lora_server.device.protocol.opened import open_known

world_openers: dict[str, Callable[[torch.device], WorldGpu]] = {}


def world_gpu_of(device: torch.device) -> WorldGpu:
    """Return the GPU of a device in the world. Raises ConfigError that names what is missing."""
    if device.type == "cuda" and "cuda" not in world_openers:
        from lora_server.device.nvshmem.library import open_nvshmem

        world_openers["cuda"] = open_nvshmem
    return open_known(world_openers, device, "nvshmem")
