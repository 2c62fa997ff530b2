"""The GPU of a device: one per device and process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from lora_server.device.protocol.gpu import Gpu
from lora_server.errors import ConfigError

openers: dict[str, Callable[[torch.device], Gpu]] = {}  # by type of device
_G = TypeVar("_G")


def gpu_of(device: torch.device) -> Gpu:
    """Return the GPU of a device. Raises ConfigError if it is none."""
    if device.type == "cuda" and "cuda" not in openers:
        from lora_server.device.protocol.cuda import open_cuda

        openers["cuda"] = open_cuda
    return open_known(openers, device, "gpu")


def open_known(known: dict[str, Callable[[torch.device], _G]], device: torch.device, transport: str) -> _G:
    """Return what the opener of its type gives. Raises ConfigError that names `transport` where there is none."""
    if device.type not in known:
        raise ConfigError(f"transport {transport}: got a {device.type} device, expected a GPU; use transport auto")
    return known[device.type](device)
