"""Idle memory is filled with the most valuable adapters, and given back to any that is needed."""

from pathlib import Path

import pytest

from lora_server.memory.entry import Entry, Source
from lora_server.memory.eviction import victims
from tests.support.serving import until
from tests.support.stores import bytes_of, is_complete, load, reads


@pytest.fixture
def store(make_store, tiny_adapters):
    """With room for two of its five adapters, which are of one size."""
    made = make_store(2 * bytes_of(tiny_adapters["all"]), preload=True)
    for handle in (1, 2):
        assert load(made, handle, tiny_adapters["all"]).result() is None
    return made


def use(store, handle, times=1):
    """Until steps have read it so often, and all of it is there."""
    for _ in range(times):
        until(lambda: reads(store, handle), f"{handle} is there")
    until(lambda: is_complete(store, handle), f"all of {handle} is")


def test_the_most_valuable_adapter_is_preloaded_and_evicted_first_while_unused(store, tiny_adapters):
    use(store, 1, 60)
    use(store, 2)
    for handle in (3, 4):
        load(store, handle, tiny_adapters["all"], eager=False).result()
        use(store, handle)
    assert not is_complete(store, 1) and not is_complete(store, 2) and store.use().evictions == 2
    store.drop(3)
    until(lambda: is_complete(store, 1), "what was used most comes first")
    assert not store.layers_ready(2), "nothing was evicted for it"
    found = store.use()
    assert (found.evictions, found.preloads, found.preload_hits) == (2, 1, 0)
    use(store, 2)
    assert not store.layers_ready(1) and is_complete(store, 4), "what was preloaded and not used goes first"
    store.drop(4)
    until(lambda: is_complete(store, 1), "again")
    use(store, 1)
    assert store.use().preload_hits == 1 and store.use().preloads == 2
    load(store, 5, tiny_adapters["all"], eager=False).result()
    use(store, 5)
    until(lambda: store.use().evictions == 4, "one that was used takes turns as all do")
    store.check_integrity()


def test_an_unused_preloaded_adapter_is_evicted_before_those_of_less_value():
    spare, used = (Entry(handle, Source(Path(), "", ""), (0,), handle, nbytes=1) for handle in (1, 2))
    spare.preloaded = True
    values = {spare: 2.0, used: 1.0}
    assert victims(1, values, lambda one: 1, values.__getitem__) == [spare]
    spare.active = True  # a client holds it now
    assert victims(1, values, lambda one: 1, values.__getitem__) == [used]
