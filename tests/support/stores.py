"""Tools to test a weight store: a gate that stops its loader, and its answers to loads."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lora_server.adapters import open_adapter
from lora_server.errors import LoraServerError
from lora_server.memory.entry import Source
from lora_server.memory.mapped import MappedPool
from lora_server.memory.on_cpu import CpuTier
from lora_server.memory.paged import PagedTier
from lora_server.memory.pages import PagePool
from lora_server.memory.store import WeightStore
from lora_server.placement import Layout, Placement
from lora_server.spec import Site
from tests.support.workload import spec_of

SECONDS = 60.0


def flip_last(path: Path, keeps_time: bool = False) -> None:
    """Change the last byte of a file; or that, and no time that a program can set."""
    before, data = path.stat(), path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    if keeps_time:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


class Gate:
    """An on_layer that writes down what was loaded, and stops the loader where the test says."""

    def __init__(self) -> None:
        self.loaded: list[tuple[int, int | None]] = []  # handles, and layers left
        self._open, self.arrived = threading.Event(), threading.Event()
        self._open.set()
        self.then: Callable[[int, int | None], None] = lambda handle, left: None

    def __call__(self, handle: int, left: int | None) -> None:
        self.loaded.append((handle, left))
        self.then(handle, left)
        self.arrived.set()
        assert self._open.wait(SECONDS)

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()


class Done:
    """A `done` that counts its calls, and checks that none is made with the store's lock."""

    def __init__(self, store: WeightStore) -> None:
        self.calls: list[LoraServerError | None] = []
        self._store, self._called, self._free = store, threading.Event(), True

    def __call__(self, error: LoraServerError | None) -> None:
        other = threading.Thread(target=self._store.report.use, daemon=True)
        other.start()
        other.join(SECONDS)
        self._free = self._free and not other.is_alive()
        self.calls.append(error)
        self._called.set()

    def result(self) -> LoraServerError | None:
        assert self._called.wait(2 * SECONDS), "done was not called"
        assert self._free, "done was called with the store's lock"
        (error,) = self.calls
        return error


def source_of(path: Path) -> Source:
    """Make the source that a controller would register; without version if the files cannot be opened."""
    try:
        with open_adapter(path, spec_of("mixtral")) as adapter:
            return Source(path, adapter.version(), adapter.stamp)
    except LoraServerError:
        return Source(path, "", "")


def cpu_store(
    placement: Placement, shard: int, dtype: torch.dtype, capacity: int = 1 << 30, **options: Any
) -> WeightStore:
    """Make a store in `capacity` bytes of host memory."""
    return WeightStore(placement, shard, CpuTier(placement, shard, dtype, MappedPool(capacity)), **options)


def paged_store(placement: Placement, shard: int, dtype: torch.dtype, pool: PagePool, **options: Any) -> WeightStore:
    """Make a store in the pages of a pool."""
    return WeightStore(placement, shard, PagedTier(placement, shard, dtype, pool), **options)


def load(store: WeightStore, handle: int, path: Path, eager: bool = True) -> Done:
    done = Done(store)
    store.adapters.load(handle, source_of(path), done, eager)
    return done


def reads(store: WeightStore, handle: int, layer: int = 0) -> bool:
    """Ask for a layer as a step does; whether it was served."""
    pin = store.pin([handle], layer, "a step", time.monotonic() + SECONDS)
    if pin is not None:
        store.unpin(pin)
    return pin is not None


def is_complete(store: WeightStore, handle: int) -> bool:
    return store.report.layers_ready(handle) == spec_of("mixtral").layers


def bytes_of(path: Path, dtype: torch.dtype = torch.float32) -> int:
    """Measure the bytes that an adapter takes of a pool of the operating system's pages."""
    store = cpu_store(Placement(spec_of("mixtral"), Layout(1, 1)), 0, dtype)
    assert load(store, 1, path).result() is None
    found = store.report.use().weight_bytes
    store.close()
    return found


def gather(store: WeightStore, site: Site, *named: tuple[int, int]) -> Any:
    """Gather the weights as a step of these (handle, expert) does, with one entry each."""
    segments = [(handle, expert, i, 1) for i, (handle, expert) in enumerate(named)]
    with pinned(store, {handle for handle, _ in named}, site.layer):
        return store.gather(site, np.array(segments, np.int32), "a test")


@contextlib.contextmanager
def pinned(store: WeightStore, handles: Collection[int], layer: int) -> Iterator[bool]:
    """Pin adapters as a step does; yields whether they were loaded."""
    pins = store.pin(handles, layer, "a test", time.monotonic())
    try:
        yield pins is not None
    finally:
        if pins is not None:
            store.unpin(pins)
