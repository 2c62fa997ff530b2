"""Idle memory is filled with the best of what is registered, and whoever needs memory has it back."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from lora_server.memory.entry import Entry, Source
from lora_server.memory.eviction import victims
from lora_server.placement import Layout, Placement
from tests.support.serving import until
from tests.support.stores import SECONDS, cpu_store, load
from tests.support.workload import spec_of

PLACEMENT = Placement(spec_of("mixtral"), Layout.parse("ep1-pp1"))


@pytest.fixture
def store(tiny_adapters):
    """With room for two of its five adapters, which are of one size."""
    probe = cpu_store(PLACEMENT, 0, torch.float32)
    assert load(probe, 1, tiny_adapters["all"]).result() is None
    size = probe.use().weight_bytes
    probe.close()
    made = cpu_store(PLACEMENT, 0, torch.float32, capacity=2 * size, preload=True)
    for handle in (1, 2):
        assert load(made, handle, tiny_adapters["all"]).result() is None
    yield made
    made.close()


def read(store, handle):
    """As a step asks; whether it was served."""
    pin = store.pin([handle], 0, "a step", time.monotonic() + SECONDS)
    if pin is not None:
        store.unpin(pin)
    return pin is not None


def use(store, handle, times=1):
    """Until steps have read it so often, and all of it is there."""
    for _ in range(times):
        until(lambda: read(store, handle), f"{handle} is there", SECONDS)
    until(lambda: is_whole(store, handle), f"all of {handle} is", SECONDS)


def is_whole(store, handle):
    return store.layers_ready(handle) == 4


def test_the_most_valuable_comes_back_and_goes_first(store, tiny_adapters):
    use(store, 1, 60)
    use(store, 2)
    for handle in (3, 4):
        load(store, handle, tiny_adapters["all"], eager=False).result()
        use(store, handle)
    assert not is_whole(store, 1) and not is_whole(store, 2) and store.use().evictions == 2
    store.drop(3)
    until(lambda: is_whole(store, 1), "what was used most comes first", SECONDS)
    assert not store.layers_ready(2), "nobody made room"
    found = store.use()
    assert (found.evictions, found.preloads, found.preload_hits) == (2, 1, 0)
    use(store, 2)
    assert not store.layers_ready(1) and is_whole(store, 4), "what was preloaded and not used goes first"
    store.drop(4)
    until(lambda: is_whole(store, 1), "again", SECONDS)
    use(store, 1)
    assert store.use().preload_hits == 1 and store.use().preloads == 2
    load(store, 5, tiny_adapters["all"], eager=False).result()
    use(store, 5)
    until(lambda: store.use().evictions == 4, "who was used takes turns as all do", SECONDS)
    store.check_integrity()


def test_who_was_preloaded_and_not_used_goes_before_those_of_less_value():
    spare, used = (Entry(handle, Source(Path(), "", ""), (0,), handle, nbytes=1) for handle in (1, 2))
    spare.preloaded = True
    values = {spare: 2.0, used: 1.0}
    assert victims(1, values, lambda one: 1, values.__getitem__) == [spare]
    spare.active = True  # a client holds it now
    assert victims(1, values, lambda one: 1, values.__getitem__) == [used]
