"""Which GPU a device is: one per device and process."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lora_server.errors import ConfigError
from lora_server.transport.gpu.gpu import Gpu

openers: dict[str, Callable[[torch.device], Gpu]] = {}  # by type of device


def gpu_of(device: torch.device) -> Gpu:
    """The GPU of a device; raises ConfigError where it is none."""
    if device.type == "cuda" and "cuda" not in openers:
        from lora_server.transport.gpu.cuda import open_cuda

        openers["cuda"] = open_cuda
    if device.type not in openers:
        raise ConfigError(f"transport gpu: got a {device.type} device, expected a GPU; use transport auto")
    return openers[device.type](device)
