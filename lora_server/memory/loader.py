"""Loading in the background, layer by layer, prefetched adapters first; where weights go is a Place's business."""

from __future__ import annotations

import heapq
import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from typing_extensions import override

from kernels_cuda.ops import Block, Pair, stack
from lora_server.adapters import Adapter, open_adapter
from lora_server.errors import AdapterLoadError, LoraServerError, ProtocolError, UnknownAdapterError
from lora_server.memory.store import Source, State, WeightStore
from lora_server.placement import Placement
from lora_server.spec import Site


class Place(ABC):
    """The memory of one adapter on this shard. `put` is the loader's alone; `free` comes after the last `put`."""

    nbytes: int = 0

    @abstractmethod
    def put(self, site: Site, expert: int, block: Block) -> None:
        """Take a block; raises AdapterLoadError if there is no room."""

    @abstractmethod
    def end_layer(self, layer: int) -> None:
        """All of a layer was put, and can be read from now on; raises AdapterLoadError if there is no room."""

    @abstractmethod
    def hide(self) -> None:
        """No step finds it from now on; another place may get its handle."""

    @abstractmethod
    def free(self) -> None:
        """Give all of it back, hidden before; idempotent."""


PlaceT = TypeVar("PlaceT", bound=Place)


@dataclass
class Entry(Generic[PlaceT]):
    """One adapter, from the command to load it to the one to drop it."""

    handle: int
    source: Source
    place: PlaceT
    layers: list[int]
    done: list[Callable[[LoraServerError | None], None]]
    urgent: bool = False
    finished: bool = False
    ready: set[int] = field(default_factory=set)
    failure: LoraServerError | None = None
    adapter: Adapter | None = None

    def state(self, layer: int) -> State:
        """Where a layer stands."""
        if layer in self.ready or (self.finished and self.failure is None):
            return State.READY
        return State.LOADING if self.failure is None else State.FAILED


class LoadingStore(WeightStore, Generic[PlaceT]):
    """One thread loads a layer at a time. `on_layer(handle, layers ready)` is called from it after each layer,
    and after a failure.
    """

    def __init__(
        self,
        placement: Placement,
        shard: int,
        dtype: torch.dtype,
        on_layer: Callable[[int, int], None] = lambda handle, layers: None,
    ) -> None:
        self._placement, self._shard, self._dtype, self._on_layer = placement, shard, dtype, on_layer
        self._layers = list(placement.layers(shard))
        self._entries: dict[int, Entry[PlaceT]] = {}
        self._queue: list[tuple[int, int, Entry[PlaceT]]] = []  # holds every unfinished entry but the one being loaded
        self._num_unfinished = 0
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="weight-loader", daemon=True)
        self._thread.start()

    @abstractmethod
    def _place(self, handle: int) -> PlaceT:
        """Memory for one more adapter, still empty."""

    @override
    def load(self, handle: int, source: Source, done: Callable[[LoraServerError | None], None]) -> None:
        with self._changed:
            entry = self._entries.get(handle)
            if entry is None:
                self._num_unfinished += 1
                entry = self._entries[handle] = Entry(handle, source, self._place(handle), list(self._layers), [done])
                self._enqueue(entry)
                return
            if entry.source.version != source.version:
                done(AdapterLoadError(f"handle {handle}: has version {entry.source.version[:12]} here already"))
                return
            if not entry.finished:
                entry.done.append(done)
                return
        done(entry.failure)

    @override
    def prefetch(self, handles: Sequence[int]) -> None:
        with self._changed:
            for handle in handles:
                entry = self._entries.get(handle)
                if entry is not None and entry.layers and not entry.urgent:
                    entry.urgent = True
                    self._enqueue(entry)

    def _enqueue(self, entry: Entry[PlaceT]) -> None:
        heapq.heappush(self._queue, (0 if entry.urgent else 1, next(self._order), entry))
        self._changed.notify()

    @override
    def drop(self, handle: int) -> None:
        with self._changed:
            entry = self._entries.pop(handle, None)
            if entry is None:
                return
            entry.place.hide()
            if not entry.finished:  # the loader, which may be writing to it, frees it
                entry.failure = AdapterLoadError(f"handle {handle}: dropped while it loaded")
                return
        entry.place.free()

    @override
    def state(self, handle: int, layer: int) -> State:
        entry = self._entries.get(handle)
        return State.UNKNOWN if entry is None else entry.state(layer)

    @override
    def loading(self, handles: Iterable[int], layer: int) -> int | None:
        for handle in handles if self._num_unfinished else ():
            entry = self._entries.get(handle)
            if entry is not None and layer not in entry.ready and entry.state(layer) is State.LOADING:
                return handle
        return None

    @override
    def layers_ready(self, handle: int) -> int:
        entry = self._entries.get(handle)
        return len(entry.ready) if entry is not None else 0

    @override
    def error(self, handle: int) -> LoraServerError:
        entry = self._entries.get(handle)
        failure = entry.failure if entry is not None else None
        return failure or AdapterLoadError(f"handle {handle}: not failed")

    def _refusal(self, handle: int, state: State, site: Site, expert: int, where: str) -> LoraServerError:
        """Why a segment has no weights here."""
        if state is State.READY:
            return ProtocolError(f"{site} expert {expert}: not on shard {self._shard}; placements differ, join again")
        if state is State.FAILED:
            return self.error(handle)
        return UnknownAdapterError(
            f"shard {self._shard} {where}: handle {handle} is {state.value} here; was it removed?"
        )

    @override
    def nbytes(self) -> int:
        return sum(entry.place.nbytes for entry in list(self._entries.values()))

    @override
    def close(self) -> None:
        for handle in list(self._entries):
            self.drop(handle)
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    return
                _, _, entry = heapq.heappop(self._queue)
            if entry.failure is None and not entry.finished:
                self._load_next(entry)
            if entry.failure is not None or not entry.layers:
                self._finish(entry)

    def _load_next(self, entry: Entry[PlaceT]) -> None:
        try:
            if entry.layers:
                self._load_layer(entry, entry.layers[0])
        except Exception as error:
            reason = (
                error if isinstance(error, LoraServerError) else AdapterLoadError(f"{entry.source.path}: {error!r}")
            )
            entry.failure = reason
        with self._changed:
            if entry.layers and entry.failure is None:
                self._enqueue(entry)
        self._on_layer(entry.handle, len(entry.ready))

    def _finish(self, entry: Entry[PlaceT]) -> None:
        if entry.adapter is not None:
            entry.adapter.close()
            entry.adapter = None
        with self._changed:
            self._num_unfinished -= not entry.finished
            entry.finished = True
            waiting, entry.done = entry.done, []
            dropped = self._entries.get(entry.handle) is not entry
        if dropped:
            entry.place.free()
        for done in waiting:
            done(entry.failure)

    def _load_layer(self, entry: Entry[PlaceT], layer: int) -> None:
        if entry.adapter is None:
            entry.adapter = self._open(entry.source)
        for site in (site for site in entry.adapter.sites() if site.layer == layer):
            for expert in self._placement.experts(site, self._shard):
                block = self._read(entry.adapter, site, expert)
                if block.pairs:
                    entry.place.put(site, expert, block)
        entry.place.end_layer(layer)
        entry.layers.remove(layer)
        entry.ready.add(layer)

    def _open(self, source: Source) -> Adapter:
        """The adapter that was registered; files touched since are read whole and must have the same content."""
        adapter = open_adapter(source.path, self._placement.spec)
        if adapter.stamp != source.stamp and adapter.version() != source.version:
            adapter.close()
            raise AdapterLoadError(
                f"{source.path}: its content changed since it was registered (version {source.version[:12]}); "
                "remove it and add it again"
            )
        return adapter

    def _read(self, adapter: Adapter, site: Site, expert: int) -> Block:
        return stack(
            [
                Pair(a_RK.to(self._dtype), b_OR.to(self._dtype), pair.scale, pair.out_begin)
                for pair, a_RK, b_OR in adapter.read(site, expert)
            ]
        )
