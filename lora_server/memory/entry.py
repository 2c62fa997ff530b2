"""One adapter on one shard, and the state of each of its layers.

   REMOTE
    │  ▲                                its files are at a URL, and not in this node's disk cache
    ▼  │
    DISK ──► LOADING ──► READY          a layer is LOADING while the adapter has device memory and the layer is
      ▲  ╲   ▲   ╲          │           not there yet; it is HOST where packed weights lie in the host pool, and
      │   ▼  │    ▼         │           no device memory is taken for it
      │  HOST     FAILED ◄──┘
      └── evicted ──────────┘           FAILED is retried when the adapter is wanted again, after `load_retry`

Memory for an adapter is allocated, and freed, for all of its layers at once; they become READY one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from lora_server.errors import LoraServerError
from lora_server.memory.manifest import Manifest
from lora_server.memory.pools import Extent
from lora_server.telemetry import NOTHING

Done = Callable[[LoraServerError | None], None]
Answer = tuple[Done, LoraServerError | None]
NEVER = float("inf")


class Reason(Enum):
    """Reason to load an adapter. The last four are no demand: they evict nothing."""

    STEP = "a step waits for one of its layers"
    PREFETCH = "a client announced steps that need it"
    PARTIAL = "a step read some of its layers, so the others follow"
    ACTIVE = "a client holds it"
    ADD = "`adapters add` waits for it"
    PIN = "`adapters pin` waits for it"
    FETCH = "its files have to be fetched before they can be measured"
    ASKED = "a request or an operator waits until its files are measured"
    MEASURE = "its files have to be measured"
    PREWARM = "the controller loads it before a request needs it"
    PRELOAD = "it fills idle memory"

    @property
    def is_demand(self) -> bool:
        """Return whether other adapters are evicted for a want of this reason."""
        return self not in _BACKGROUND


_BACKGROUND = frozenset({Reason.ASKED, Reason.MEASURE, Reason.PREWARM, Reason.PRELOAD})


class Want(NamedTuple):
    """One owner's reason. Times are time.monotonic(). An adapter has at most one want of each owner."""

    reason: Reason
    owner: Hashable  # a client, the `done` to call, or the reason itself
    due: float = NEVER  # when it is needed; for a step, when the step came
    until: float = NEVER  # when the want expires
    done: Done | None = None
    trace: Mapping[str, str] = NOTHING  # of the request that made an adapter active


MIN_STAY, STAY_PER_LOAD = 0.05, 10.0  # seconds; an adapter in use stays for so many times its load time
HALF_LIFE = 60.0  # seconds, of the count of uses


class LayerState(Enum):
    """The state of the weights of (handle, layer) on this shard."""

    UNKNOWN = "unknown"
    REMOTE = "at its source alone"
    DISK = "on disk"
    HOST = "in host memory"
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"


@dataclass(frozen=True)
class Source:
    """Path of an adapter's files, and the content they must have (see Adapter.version, Adapter.stamp).

    A remote source has a URL and no path: its files are in the node's disk cache, or not on this node.
    """

    path: Path
    version: str
    stamp: str
    remote: str = ""

    def __str__(self) -> str:
        return self.remote or str(self.path)


class Files(NamedTuple):
    """Facts about files with checked content (see adapters.reopen)."""

    path: Path
    seen: str
    stamp: str
    outline: bytes  # its key


class LoadFailure(NamedTuple):
    """Error of the last load, and the time of the next attempt."""

    error: LoraServerError
    retry_at: float


@dataclass
class Usage:
    """Facts that eviction policies judge by. Times are time.monotonic()."""

    last: float = 0.0
    rate: float = 0.0  # uses up to `last`; halves every HALF_LIFE
    load_seconds: float = 0.0  # of the last complete load

    def count(self, now: float, uses: int = 1) -> None:
        """Add uses at `now`."""
        self.rate = self.rate * 0.5 ** (max(0.0, now - self.last) / HALF_LIFE) + uses
        self.last = max(self.last, now)


@dataclass
class Footprint:
    """Memory that an adapter takes on this shard, and the layout of its blocks there."""

    nbytes: int = 0  # of its extent
    size: int | None = None  # of that in the device pool; None until its files were measured
    manifest: Manifest | None = None  # while any of its bytes are in memory
    files: Files | None = None


@dataclass
class MemoryCopies:
    """Memory that an adapter has in each pool, and its layers there."""

    device: Extent | None = None
    host: Extent | None = None
    ready: set[int] = field(default_factory=set)
    packed: set[int] = field(default_factory=set)  # layers in `host`


@dataclass
class Progress:
    """Course of the current load, until the adapter is evicted."""

    first: int = 0  # index of the layer that a step needed last: loading starts there
    began: float = 0.0  # 0: not yet
    tier: str = ""  # "host" or "disk", from which it is loaded
    complete_since: float = 0.0


@dataclass(eq=False)
class AdapterEntry:
    """An adapter that the shard knows. The store's lock guards it."""

    handle: int
    source: Source
    layers: tuple[int, ...]  # of this shard
    order: int  # of registration
    footprint: Footprint = field(default_factory=Footprint)
    copies: MemoryCopies = field(default_factory=MemoryCopies)
    progress: Progress = field(default_factory=Progress)
    usage: Usage = field(default_factory=Usage)
    wants: dict[Hashable, Want] = field(default_factory=dict)  # by owner
    failure: LoadFailure | None = None

    def state(self, layer: int, is_remote: bool = False) -> LayerState:
        """Return the state of a layer; one that this shard has no part of is READY."""
        if layer in self.copies.ready or layer not in self.layers:
            return LayerState.READY
        if self.failure is not None:
            return LayerState.FAILED
        if self.copies.device is not None:
            return LayerState.LOADING
        if layer in self.copies.packed:
            return LayerState.HOST
        return LayerState.REMOTE if is_remote else LayerState.DISK

    def lacks(self, layer: int) -> bool:
        """Return whether a step of this layer has to wait."""
        return layer not in self.copies.ready and layer in self.layers and self.failure is None

    def is_complete(self) -> bool:
        """Return whether all layers are READY."""
        return len(self.copies.ready) == len(self.layers)

    def is_settled(self) -> bool:
        """Return whether there is nothing left to load, or loading failed."""
        return self.failure is not None or self.is_complete()

    def is_packed(self) -> bool:
        """Return whether the whole adapter is in the host pool, so that its files are not needed."""
        return self.footprint.manifest is not None and len(self.copies.packed) == len(self.layers)

    def next_layer(self) -> int:
        """Return the layer to load now: the one that was needed last, then those after it, then those before it."""
        turned = self.layers[self.progress.first :] + self.layers[: self.progress.first]
        return next(layer for layer in turned if layer not in self.copies.ready)

    @property
    def active(self) -> bool:
        """Return whether a client holds the adapter; then it is not evicted for one that no client holds."""
        return Reason.ACTIVE in self.wants

    def is_wanted(self) -> bool:
        """Return whether any of the adapter's wants is a demand."""
        return any(want.reason.is_demand for want in self.wants.values())

    def is_spare(self) -> bool:
        """Return whether the adapter only fills idle memory: any other evicts it, and it evicts none."""
        return Reason.PRELOAD in self.wants and not self.is_wanted()

    def deadline(self) -> float:
        """Return the time at which the adapter is needed first."""
        return min((want.due for want in self.wants.values()), default=NEVER)

    def expire_wants(self, now: float) -> None:
        """Remove the wants that have expired."""
        for owner in [owner for owner, want in self.wants.items() if want.until < now]:
            del self.wants[owner]

    def stays_until(self) -> float:
        """Return until when the adapter is not evicted while in use, so that its stay is worth its load."""
        stay = max(MIN_STAY, STAY_PER_LOAD * self.usage.load_seconds)
        return self.progress.complete_since + stay if self.is_complete() else 0.0

    def note_layer(self, now: float) -> None:
        """Account for a layer that has become READY."""
        if self.is_wanted():
            self.usage.count(now, 0)
        if self.is_complete():
            self.progress.complete_since, self.usage.load_seconds = now, now - self.progress.began

    def retry(self, now: float) -> bool:
        """Clear a failure that may be over by now; return whether there was one."""
        is_over = self.failure is not None and now > self.failure.retry_at
        if is_over:
            self.failure = None
        return is_over
