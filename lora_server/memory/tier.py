"""The memory that steps read: a pool, the format that lies in it, and the way from (handle, expert) to a block."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lora_server.errors import LoraServerError
from lora_server.memory.formats import Format
from lora_server.memory.manifest import Manifest
from lora_server.memory.pools import Extent, Pool
from lora_server.spec import Site

Refusal = Callable[[int, int], LoraServerError]  # of (handle, expert): why there is nothing to read


class Tier(ABC):
    """Whoever calls `publish` and `withdraw` sees to it that no step reads what is withdrawn (pins)."""

    pool: Pool
    format: Format[Any]
    device: torch.device

    @property
    def name(self) -> str:
        """Of the device, for people."""
        return str(self.device)

    def know(self, handle: int) -> None:  # noqa: B027  (for who is not asked about every step)
        """Steps that name it wait for it from now on. Raises AdapterLoadError where there is no place for it."""

    def forget(self, handle: int) -> None:  # noqa: B027
        """Steps that name it are refused from now on."""

    @abstractmethod
    def publish(self, handle: int, layer: int, extent: Extent, manifest: Manifest) -> None:
        """A layer's weights are in the extent: steps find them from now on, all or nothing.

        Raises AdapterLoadError if a table is full.
        """

    @abstractmethod
    def withdraw(self, handle: int) -> object:
        """No step finds anything of it from now on; returns what `release` gives back."""

    def release(self, withdrawn: object) -> None:  # noqa: B027  (only tables need it)
        """No step reads it any more: its place in tables is free."""

    @abstractmethod
    def gather(self, site: Site, segments_S4: npt.NDArray[np.int32], refusal: Refusal) -> Any:
        """The weights of a step, as this device's compute takes them; empty where there is no delta.

        segments_S4: handle, expert (one of the site's), first entry, entries. Raises what `refusal` says of the first
        segment that is not published here.
        """

    def take_uses(self) -> list[int]:
        """Handles that steps read since the last call where no step is pinned, the oldest use first."""
        return []

    def on_stream(self) -> contextlib.AbstractContextManager[object]:
        """Around the loader's device work, which goes beside the shard's own."""
        return contextlib.nullcontext()

    def synchronize(self) -> None:  # noqa: B027
        """Wait for the loader's copies."""
