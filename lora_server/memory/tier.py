"""Memory that steps read: a pool, the format of the blocks in it, and a look-up from (handle, expert) to a block."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lora_server.adapters import Weights
from lora_server.errors import LoraServerError
from lora_server.memory.formats import Format
from lora_server.memory.manifest import Manifest, Placed
from lora_server.memory.pools import Extent, Pool
from lora_server.spec import Site

Refusal = Callable[[int, int], LoraServerError]  # returns why (handle, expert) cannot be read


class Tier(ABC):
    """The caller of `withdraw` makes sure by pins that no step reads the adapter."""

    pool: Pool
    format: Format[Any]
    device: torch.device

    @property
    def name(self) -> str:
        """Name of the device for operators."""
        return str(self.device)

    def know(self, handle: int) -> None:  # noqa: B027
        """Let steps that name the handle wait for it. Raises AdapterLoadError where a table is full."""

    def forget(self, handle: int) -> None:  # noqa: B027
        """Refuse steps that name the handle."""

    @abstractmethod
    def read(self, weights: Weights, site: Site, expert: int, extent: Extent, placed: Placed) -> None:
        """Read a block from files to its place in an extent; a copy from host to device memory may still be in flight.
        Raises AdapterFormatError."""

    @abstractmethod
    def prepare(self, layer: int, extent: Extent, manifest: Manifest) -> Any:
        """Build what `publish` needs of a layer that is in the extent. Called without the store's lock."""

    @abstractmethod
    def publish(self, handle: int, layer: int, extent: Extent, prepared: Any) -> None:
        """Let steps find a layer's weights, by what `prepare` built. Raises AdapterLoadError where a table is full."""

    @abstractmethod
    def withdraw(self, handle: int) -> object:
        """Let no step find the adapter any more; returns the argument of `release`."""

    def release(self, withdrawn: object) -> None:  # noqa: B027
        """Free the adapter's rows in tables, once no step reads it."""

    @abstractmethod
    def gather(self, site: Site, segments_S4: npt.NDArray[np.int32], refusal: Refusal) -> Any:
        """Return the weights of a step for this device's compute; empty where there is no delta.

        segments_S4: handle, expert (one of the site's), first entry, entries. Raises the `refusal` of the first segment
        that is not published.
        """

    def take_uses(self) -> list[int]:
        """Return the handles that steps without pins have read since the last call, the oldest use first."""
        return []

    def on_stream(self) -> contextlib.AbstractContextManager[object]:
        """Return a context for the loader's device work, which runs beside the shard's own."""
        return contextlib.nullcontext()

    def synchronize(self) -> None:  # noqa: B027
        """Wait for the loader's copies."""
