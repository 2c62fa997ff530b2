"""Adapters from far in a shard: REMOTE, DISK, READY; what waits for a fetch, and what does not."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
import torch

from lora_server.adapters import open_adapter
from lora_server.errors import AdapterSourceError
from lora_server.memory.entry import Source
from lora_server.placement import Layout, Placement
from tests.support.far import far_server, fetcher_of, left, size_of
from tests.support.serving import until
from tests.support.stores import SECONDS, Done, cpu_store, load
from tests.support.workload import spec_of

LARGEST = 1 << 30


@pytest.fixture
def far(tmp_path):
    with far_server(tmp_path / "far") as server:
        yield server


@pytest.fixture
def make_store(tmp_path):
    stores = []

    def make(capacity=LARGEST, **options):
        placement = Placement(spec_of("mixtral"), Layout.parse("ep1-pp1"))
        fetcher = fetcher_of(tmp_path / "cache", capacity)
        stores.append(cpu_store(placement, 0, torch.float32, fetcher=fetcher, **options))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def know(store, handle, url, path, eager=False):
    """As the controller tells it."""
    done = Done()
    with open_adapter(path, spec_of("mixtral")) as adapter:
        store.load(handle, Source(Path(), adapter.version(), "", url), done, eager)
    return done


def state(store, handle):
    return store.state(handle, 0).value


def demand(store, handle):
    """As a step asks; whether it can be served."""
    pin = store.pin([handle], 0, "a step", time.monotonic() + SECONDS)
    if pin is not None:
        store.unpin(pin)
    return pin is not None


def test_it_comes_when_somebody_asks_and_keeps_nobody_waiting(make_store, far, tiny_adapters):
    store, far_away = make_store(), "at its source alone"
    done = know(store, 1, far.put("law", tiny_adapters["all"]), tiny_adapters["all"])
    assert done.result() is None and state(store, 1) == far_away and not far.got, "nobody asked"
    far.open.clear()
    assert not demand(store, 1) and far.stalled.wait(SECONDS)
    assert load(store, 2, tiny_adapters["down"]).result() is None, "others load meanwhile"
    assert state(store, 1) == far_away and {one.handle: one.far for one in store.moved()} == {1: True, 2: False}
    far.open.set()
    until(lambda: demand(store, 1), "it is there", SECONDS)
    assert {one.handle: one.far for one in store.moved()}[1] is False
    until(lambda: store.layers_ready(1) == 4, "all of it is", SECONDS)
    store.check_integrity()


def test_who_has_no_size_is_looked_at_when_asked_again(make_store, far, tiny_adapters):
    """As for a request that asks for admission."""
    store, url = make_store(), far.put("law", tiny_adapters["all"])
    assert know(store, 1, url, tiny_adapters["all"]).result() is None
    assert not store.moved()[0].measured
    assert know(store, 1, url, tiny_adapters["all"]).result() is None
    assert store.moved()[0].measured


def test_a_fetch_that_fails_is_tried_again(make_store, far, tiny_adapters, monkeypatch):
    monkeypatch.setattr("lora_server.memory.entry.RETRY_SECONDS", 0.0)
    store, url = make_store(), far.put("law", tiny_adapters["all"])
    far.statuses = [403] * 2
    error = know(store, 1, url, tiny_adapters["all"], eager=True).result()
    assert isinstance(error, AdapterSourceError) and "403" in str(error)
    assert state(store, 1) == "failed"
    until(lambda: demand(store, 1) and state(store, 1) == "ready", "tried again", SECONDS)


def test_where_it_was_said_to_be_last_counts(make_store, far, tiny_adapters):
    """As by a controller that was started with other flags."""
    store = make_store()
    assert know(store, 1, f"{far.url}/nowhere", tiny_adapters["all"]).result() is None
    assert load(store, 1, tiny_adapters["all"]).result() is None
    assert state(store, 1) == "ready" and not far.got


def test_the_disk_cache_is_followed(make_store, far, tiny_adapters, tmp_path):
    """Whoever of the node brings files, or takes them away."""
    store, url = make_store(), far.put("law", tiny_adapters["all"])
    know(store, 1, url, tiny_adapters["all"]).result()
    other = fetcher_of(tmp_path / "cache")
    other.fetch(url).close()
    store.note_disk(other.cache.versions())
    assert state(store, 1) == "on disk" and not store.moved()[0].far
    shutil.rmtree(tmp_path / "cache")
    store.note_disk(other.cache.versions())
    assert state(store, 1) == "at its source alone" and store.moved()[0].far


def test_a_cache_for_one_serves_many(make_store, far, tiny_adapters, tmp_path):
    """The pool has room for one, and so has the disk: all are served, and the cap holds."""
    kinds = ["all", "down", "bf16"]
    sizes = {}
    for kind in kinds:
        probe = cpu_store(Placement(spec_of("mixtral"), Layout.parse("ep1-pp1")), 0, torch.float32)
        assert load(probe, 1, tiny_adapters[kind]).result() is None
        sizes[kind] = probe.use().weight_bytes
        probe.close()
    cap = max(size_of(tiny_adapters[kind]) for kind in kinds)
    store = make_store(capacity=cap)
    store.tier.pool.capacity = max(sizes.values())
    for handle, kind in enumerate(kinds, start=1):
        know(store, handle, far.put(kind, tiny_adapters[kind]), tiny_adapters[kind]).result()
    for handle in (1, 2, 3, 1, 3, 2):
        until(lambda handle=handle: demand(store, handle), f"{handle} is there", SECONDS)
        assert sum(int(name.split(".")[1]) for name in left(tmp_path / "cache")) <= cap
    assert far.got.total() > 3
    until(lambda: store.layers_ready(2) == 4, "all of it is", SECONDS)
    store.check_integrity()
