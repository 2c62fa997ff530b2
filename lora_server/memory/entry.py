"""One adapter on one shard, and where each of its layers stands.

   REMOTE
    │  ▲                                its source is far, and the node's disk cache does not have its files
    ▼  │
    DISK ──► LOADING ──► READY          a layer is LOADING while the adapter has device memory and the layer is
      ▲  ╲   ▲   ╲          │           not there yet; it is HOST where packed weights lie in the host pool, and
      │   ▼  │    ▼         │           no device memory is taken for it
      │  HOST     FAILED ◄──┘
      └── evicted ──────────┘           FAILED is tried again when somebody asks, after `load_retry`

An adapter's memory is allocated, and taken back, as a whole; its layers become READY one by one.
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

MIN_STAY, STAY_PER_LOAD = 0.05, 10.0  # seconds; an adapter stays so many times as long as its load took
HALF_LIFE = 60.0  # seconds, of the count of uses

Done = Callable[[LoraServerError | None], None]


class State(Enum):
    """Where the weights of (handle, layer) stand on this shard."""

    UNKNOWN = "unknown"
    REMOTE = "at its source alone"
    DISK = "on disk"
    HOST = "in host memory"
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"


@dataclass(frozen=True)
class Source:
    """Where an adapter's files are, and which content they must have (see Adapter.version, Adapter.stamp).

    `remote`: the URL of one from far, whose files are in the disk cache, or nowhere here; it has no path.
    """

    path: Path
    version: str
    stamp: str
    remote: str = ""

    def __str__(self) -> str:
        return self.remote or str(self.path)


class Files(NamedTuple):
    """What was learned of an adapter's files when they had the right content (see adapters.reopen)."""

    path: Path
    seen: str
    stamp: str
    outline: bytes  # its key


@dataclass
class Usage:
    """What eviction policies judge by. Times are time.monotonic()."""

    last: float = 0.0
    rate: float = 0.0  # uses up to `last`, fewer by half each HALF_LIFE
    load_seconds: float = 0.0  # of all layers, the last time

    def count(self, now: float, uses: int = 1) -> None:
        """So many uses, now."""
        self.rate = self.rate * 0.5 ** (max(0.0, now - self.last) / HALF_LIFE) + uses
        self.last = max(self.last, now)


class Demand(NamedTuple):
    """Somebody needs an adapter at `due`, which for a step is when it came, and not any more after `until`."""

    due: float
    until: float


@dataclass(eq=False)
class Entry:
    """From the command to know it to the one to drop it; the store's lock guards it.

    `demands` has who needs it.
    """

    handle: int
    source: Source
    layers: tuple[int, ...]  # of this shard
    order: int
    nbytes: int = 0  # of its extent
    size: int | None = None  # what that takes of the device pool; None until the files were looked at
    manifest: Manifest | None = None  # while anything of it is in memory
    files: Files | None = None
    device: Extent | None = None
    host: Extent | None = None
    ready: set[int] = field(default_factory=set)
    packed: set[int] = field(default_factory=set)  # layers in `host`
    demands: dict[Hashable, Demand] = field(default_factory=dict)
    stays: bool = False  # it never makes room (`adapters pin`)
    in_part: float | None = None  # when a step last used a layer of it, while not all are READY: the others follow
    trace: Mapping[str, str] = field(default_factory=dict)  # of the request that made it active
    active: bool = False  # a client holds it: it makes room for nobody who is not
    far: bool = False  # the disk cache does not have its files, as far as this shard knows
    preloaded: bool = False  # it came, or comes, before anybody asked, and nobody has used it yet
    eager: bool = False  # to be brought in, though nobody waits
    first: int = 0  # index of the layer that was asked for last: loading begins there
    looking: list[Done] = field(default_factory=list)  # who waits for a look at its files
    waiting: list[Done] = field(default_factory=list)  # for all of its layers
    failure: LoraServerError | None = None
    failed_at: float = 0.0
    dropped: bool = False
    withdrawn: object = None  # of the tier, until the last pin goes
    began: float = 0.0  # when its loading did, 0: it has not
    came_from: str = ""  # host or disk, the last time
    whole_since: float = 0.0
    usage: Usage = field(default_factory=Usage)

    def state(self, layer: int) -> State:
        """Where a layer stands; one that this shard has nothing of is READY."""
        if layer in self.ready or layer not in self.layers:
            return State.READY
        if self.failure is not None:
            return State.FAILED
        if self.device is not None:
            return State.LOADING
        if layer in self.packed:
            return State.HOST
        return State.REMOTE if self.far else State.DISK

    def lacks(self, layer: int) -> bool:
        """Whether a step of this layer has to wait."""
        return layer not in self.ready and layer in self.layers and self.failure is None

    def is_whole(self) -> bool:
        """Whether all layers are READY."""
        return len(self.ready) == len(self.layers)

    def next_layer(self) -> int:
        """The one to load now: the one asked for, those after it, and then those before it."""
        turned = self.layers[self.first :] + self.layers[: self.first]
        return next(layer for layer in turned if layer not in self.ready)

    def is_wanted(self) -> bool:
        """Whether somebody needs it, or waits for all of it."""
        looked_for = self.source.remote and self.looking
        return bool(self.demands or self.waiting or self.in_part is not None or self.active or self.eager or looked_for)

    def is_packed(self) -> bool:
        """Whether all of it is in the host pool: its files are not needed."""
        return self.manifest is not None and len(self.packed) == len(self.layers)

    def is_spare(self) -> bool:
        """Whether it makes room for anybody, and nobody for it."""
        return self.preloaded and not self.is_wanted()

    def deadline(self) -> float:
        """When it is needed first; infinite where nobody said."""
        first = min((demand.due for demand in self.demands.values()), default=float("inf"))
        return first if self.in_part is None else min(first, self.in_part)

    def forget_demands(self, now: float) -> None:
        """Those that are over."""
        if any(demand.until < now for demand in self.demands.values()):
            self.demands = {owner: demand for owner, demand in self.demands.items() if demand.until >= now}

    def stays_until(self) -> float:
        """A turn in memory that is worth its load: nobody takes an adapter that is in use before its time."""
        return self.whole_since + max(MIN_STAY, STAY_PER_LOAD * self.usage.load_seconds) if self.is_whole() else 0.0

    def arrived(self, now: float) -> None:
        """A layer is READY, perhaps the last."""
        if self.is_wanted():
            self.usage.count(now, 0)
        if self.is_whole():
            self.in_part, self.eager = None, False
            self.whole_since, self.usage.load_seconds = now, now - self.began

    def answered(self) -> list[Done]:
        """Who waits no longer."""
        over = self.failure is not None or self.is_whole()
        looked, self.looking = self.looking, []
        waited = self.waiting if over else []
        self.waiting = [] if over else self.waiting
        return looked + waited

    def retry(self, now: float, seconds: float) -> None:
        """Somebody asks for it: a failure that is so many seconds old may be over."""
        if self.failure is not None and now > self.failed_at + seconds:
            self.failure = None
