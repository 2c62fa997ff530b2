"""Remote adapters in a shard: REMOTE, DISK, READY; what waits for a fetch, and what does not."""

import shutil
from pathlib import Path

import pytest

from lora_server.adapters import open_adapter
from lora_server.errors import AdapterSourceError
from lora_server.memory.entry import Source
from tests.support.clocks import FAST
from tests.support.far import far_server, fetcher_of, left, size_of
from tests.support.serving import until
from tests.support.stores import SECONDS, Done, bytes_of, is_complete, load, reads
from tests.support.workload import spec_of


@pytest.fixture
def far(tmp_path):
    with far_server(tmp_path / "far") as server:
        yield server


@pytest.fixture
def make(make_store, tmp_path):
    """Make a store whose disk cache has a capacity."""
    return lambda capacity=1 << 30, **options: make_store(fetcher=fetcher_of(tmp_path / "cache", capacity), **options)


def know(store, handle, url, path, eager=False):
    """As the controller tells it."""
    done = Done()
    with open_adapter(path, spec_of("mixtral")) as adapter:
        store.load(handle, Source(Path(), adapter.version(), "", url), done, eager)
    return done


def state(store, handle):
    return store.state(handle, 0).value


def test_a_remote_adapter_is_fetched_on_demand_and_delays_no_other(make, far, tiny_adapters):
    store, far_away = make(), "at its source alone"
    done = know(store, 1, far.put("law", tiny_adapters["all"]), tiny_adapters["all"])
    assert done.result() is None and state(store, 1) == far_away and not far.got, "no step asked"
    far.open.clear()
    assert not reads(store, 1) and far.stalled.wait(SECONDS)
    assert load(store, 2, tiny_adapters["down"]).result() is None, "others load meanwhile"
    assert state(store, 1) == far_away and {one.handle: one.far for one in store.moved()} == {1: True, 2: False}
    far.open.set()
    until(lambda: reads(store, 1), "it is there")
    assert {one.handle: one.far for one in store.moved()}[1] is False
    until(lambda: is_complete(store, 1), "all of it is")
    store.check_integrity()


def test_an_adapter_without_a_size_is_looked_at_when_asked_again(make, far, tiny_adapters):
    """As for a request that asks for admission."""
    store, url = make(), far.put("law", tiny_adapters["all"])
    assert know(store, 1, url, tiny_adapters["all"]).result() is None
    assert not store.moved()[0].measured
    assert know(store, 1, url, tiny_adapters["all"]).result() is None
    assert store.moved()[0].measured
    known = far.got.total()
    assert know(store, 2, f"{far.url}/nowhere", tiny_adapters["all"]).result() is None
    assert load(store, 2, tiny_adapters["all"]).result() is None
    assert state(store, 2) == "ready" and far.got.total() == known, "where it was said to be last counts"


def test_a_fetch_that_fails_is_tried_again(make, far, tiny_adapters):
    store, url = make(timings=FAST), far.put("law", tiny_adapters["all"])
    far.statuses = [403] * 2
    error = know(store, 1, url, tiny_adapters["all"], eager=True).result()
    assert isinstance(error, AdapterSourceError) and "403" in str(error)
    assert state(store, 1) == "failed"
    until(lambda: reads(store, 1) and state(store, 1) == "ready", "tried again")


def test_a_store_follows_what_other_processes_do_to_the_disk_cache(make, far, tiny_adapters, tmp_path):
    store, url = make(), far.put("law", tiny_adapters["all"])
    know(store, 1, url, tiny_adapters["all"]).result()
    other = fetcher_of(tmp_path / "cache")
    other.fetch(url).close()
    store.note_disk(other.cache.versions())
    assert state(store, 1) == "on disk" and not store.moved()[0].far
    shutil.rmtree(tmp_path / "cache")
    store.note_disk(other.cache.versions())
    assert state(store, 1) == "at its source alone" and store.moved()[0].far


def test_a_cache_for_one_serves_many(make, far, tiny_adapters, tmp_path):
    """The pool has room for one, and so has the disk: all are served, and the cap holds."""
    kinds = ["all", "down", "bf16"]
    cap = max(size_of(tiny_adapters[kind]) for kind in kinds)
    store = make(cap)
    store.tier.pool.capacity = max(bytes_of(tiny_adapters[kind]) for kind in kinds)
    for handle, kind in enumerate(kinds, start=1):
        know(store, handle, far.put(kind, tiny_adapters[kind]), tiny_adapters[kind]).result()
    for handle in (1, 2, 3, 1, 3, 2):
        until(lambda handle=handle: reads(store, handle), f"{handle} is there")
        assert sum(int(name.split(".")[1]) for name in left(tmp_path / "cache")) <= cap
    assert far.got.total() > 3
    until(lambda: is_complete(store, 2), "all of it is")
    store.check_integrity()
