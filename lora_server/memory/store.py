"""Adapter weights of one shard, as its loop and its controller see them; see resident and paged.

READY is per (handle, layer): a step at layer 0 can run when layer 0 is there. A wait for weights is
the caller's: the store only says where a layer stands.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lora_server.errors import LoraServerError
from lora_server.spec import Site


class State(Enum):
    """Where the weights of (handle, layer) stand on this shard."""

    UNKNOWN = "unknown"
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"


@dataclass(frozen=True)
class Source:
    """Where an adapter's files are, and which content they must have (see Adapter.version, Adapter.stamp)."""

    path: Path
    version: str
    stamp: str


class Memory(NamedTuple):
    """Where weights are kept, and how much room there is."""

    device: str
    free_bytes: int
    total_bytes: int


class WeightStore(ABC):
    """Weights of the (site, expert)s that one shard owns. Thread-safe."""

    @abstractmethod
    def load(self, handle: int, source: Source, done: Callable[[LoraServerError | None], None]) -> None:
        """Bring an adapter in, layer by layer, in the background; `done` is called once, from any thread.

        Loading what is here already only calls `done`.
        """

    @abstractmethod
    def prefetch(self, handles: Sequence[int]) -> None:
        """These are needed soon: load them before everything else that waits. Unknown handles are ignored."""

    @abstractmethod
    def drop(self, handle: int) -> None:
        """Forget an adapter and free its memory. Unknown handles are ignored.

        A load under way stops, and its `done` gets an AdapterLoadError.
        """

    @abstractmethod
    def state(self, handle: int, layer: int) -> State:
        """Where a layer stands."""

    @abstractmethod
    def loading(self, handles: Iterable[int], layer: int) -> int | None:
        """One of these whose layer is LOADING, if there is one."""

    @abstractmethod
    def layers_ready(self, handle: int) -> int:
        """How many of its layers are; 0 for one that is unknown."""

    @abstractmethod
    def error(self, handle: int) -> LoraServerError:
        """Why a handle is FAILED."""

    @abstractmethod
    def gather(self, site: Site, segments_S4: npt.NDArray[np.int32], where: str) -> Any:
        """The weights of a step, as this shard's compute takes them; empty where there is no delta.

        segments_S4: handle, expert (one of the site's), first entry, entries. `where` names the step in errors, which
        are those of the first segment without weights here: why loading it FAILED, UnknownAdapterError if it is
        not READY (any more), ProtocolError for what another shard owns.
        """

    def reading(self) -> contextlib.AbstractContextManager[object]:
        """While it is held, what `gather` returned stays where it is."""
        return contextlib.nullcontext()

    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of weights held now."""

    @abstractmethod
    def memory(self) -> Memory:
        """What weights may still take; on a CPU others of the machine may take it too."""

    @abstractmethod
    def close(self) -> None:
        """Drop everything and stop."""
