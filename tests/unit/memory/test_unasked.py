"""What comes before anybody asks is the same on every shard, and idle memory is filled with the most valuable."""

import contextlib
import random
import time
from pathlib import Path

import pytest
import torch

from lora_server.control.members.shards import wait_all
from lora_server.control.sync.prewarm import Prewarm, PrewarmLoad
from lora_server.control.sync.residency import ResidencyTable
from lora_server.control.sync.sizes import PoolSizes
from lora_server.demo import tiny
from lora_server.memory.entry import AdapterEntry, Footprint, Reason, Source, Want
from lora_server.memory.eviction import IN_USE_SECONDS, victims
from lora_server.placement import Layout, Placement
from lora_server.wire import lora_server_pb2 as pb
from tests.support.serving import until
from tests.support.stores import bytes_of, cpu_store, is_complete, load, reads
from tests.support.told_stores import LAYOUT, PLACEMENT, ToldServer

TARGETS = ("all", "experts", "gate_up", "attention", "qv")


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Ten adapters of many sizes; what some take on some shards is nothing."""
    model, root = tiny.make_model("mixtral"), tmp_path_factory.mktemp("adapters")
    for number in range(10):
        rank, targets = 3 + 5 * number % 7, TARGETS[number % len(TARGETS)]
        tiny.make_adapter(model, root / f"a{number}", lora_rank=rank, seed=number, targets=targets)
    return {path.name: path for path in sorted(root.iterdir())}


@pytest.fixture(scope="module")
def sizes(paths):
    """By name: what it takes on each shard."""
    found = {name: [] for name in paths}
    for shard in range(LAYOUT.num_shards):
        store = cpu_store(PLACEMENT, shard, torch.float32)
        for handle, (name, path) in enumerate(paths.items(), start=1):
            assert load(store, handle, path).result() is None
            found[name].append(store._table.entries[handle].footprint.size)
        store.close()
    return found


def half(sizes):
    """What half of all of them take, on the shard where that is the most."""
    return [max(map(sum, zip(*sizes.values(), strict=True))) // 2] * LAYOUT.num_shards


def who_comes(order, sizes, capacities):
    """The rule, the slow way: in this order, whoever fits every shard beside those before it."""
    chosen = []
    for name in order:
        together = [sum(sizes[one][shard] for one in [*chosen, name]) for shard in range(LAYOUT.num_shards)]
        if all(taken <= capacity for taken, capacity in zip(together, capacities, strict=True)):
            chosen.append(name)
    return set(chosen)


def server_of(capacities, seed):
    return contextlib.closing(ToldServer(capacities, seed))


def check_even(server, sizes):
    """Every adapter is `ready` and whole on all shards, or `disk`, and on none or without room on the others."""
    states, whole = server.at_rest(), server.whole()
    free = [store.store.tier.pool.free for store in server.stores]
    for name, state in states.items():
        has = [name in names for names in whole]
        assert (state == "ready") == all(has) and state in ("ready", "disk"), (name, state, has)
        fits = all(has[shard] or sizes[name][shard] <= free[shard] for shard in range(LAYOUT.num_shards))
        assert state == "ready" or not any(has) or not fits, (name, has)
    return {name for name, state in states.items() if state == "ready"}


@pytest.mark.parametrize("seed", range(6))
def test_every_shard_has_those_that_fit_all_of_them_first_come_first(seed, paths, sizes):
    dice = random.Random(seed)
    order = dice.sample(sorted(paths), len(paths))
    capacities = [round(one * dice.uniform(0.5, 1.5)) for one in half(sizes)]
    with server_of(capacities, 100 * seed) as server:
        server.controller.adapters.directory.register({name: paths[name] for name in order})
        pages = [store.store.tier.pool.capacity for store in server.stores]
        assert check_even(server, sizes) == who_comes(order, sizes, pages)


@pytest.mark.parametrize("seed", range(3))
def test_a_shard_that_was_started_anew_takes_what_its_peers_have(seed, paths, sizes):
    """Not what was registered first."""
    with server_of(half(sizes), 1000 + 100 * seed) as server:
        adapters = server.controller.adapters
        adapters.directory.register(paths)
        before = check_even(server, sizes)
        absent = sorted(set(paths) - before)[-1]
        adapters.rollout.pin(absent, 30)
        adapters.rollout.unpin(absent)
        assert absent in {name for name, state in server.at_rest().items() if state == "ready"}
        peers = set.intersection(*server.whole())
        server.restart(seed)
        server.at_rest()
        assert peers <= server.whole()[seed] and before - peers, "some had to go for who was asked for"


@pytest.mark.parametrize("seed", range(3))
def test_one_that_is_added_while_others_load_makes_the_same_room_everywhere(seed, paths, sizes):
    with server_of(half(sizes), 2000 + 100 * seed) as server:
        adapters, (*first, late) = server.controller.adapters, paths
        adapters.directory.register({name: paths[name] for name in first})
        _, loads, _ = adapters.rollout.register(late, str(paths[late]), eager=True)
        wait_all(loads, 30, "the add")
        assert late in check_even(server, sizes)
        for name in first[:3]:
            adapters.rollout.remove(name)
        check_even(server, sizes)
        for store in server.stores:
            store.store.report.check_integrity()


def decided(sizes, capacities):
    """Two shards, each with the layers of its own stage alone, and what is decided for them."""
    pool_sizes = PoolSizes()
    residency = ResidencyTable(Placement(PLACEMENT.spec, Layout.parse("ep2-pp1")))
    for shard, capacity in enumerate(capacities):
        pool_sizes.set_capacity(shard, capacity)
    for handle, by_shard in sizes.items():
        for shard, size in enumerate(by_shard):
            pool_sizes.set_size(handle, shard, size)
            residency.opened(handle, shard)
    return residency, Prewarm(residency, pool_sizes)


def has(residency, prewarm, handle, shard, whole=True):
    """The shard reports that it has all of it, or none."""
    residency.report(shard, pb.Residency(handle=handle, layers=PLACEMENT.spec.layers * whole))
    prewarm.note(handle, shard)
    prewarm.heard(shard)


def test_an_adapter_that_a_peer_has_is_loaded_before_one_that_no_shard_has():
    """Though that was registered first, and both would fit alone."""
    residency, prewarm = decided({1: (6, 10), 2: (4, 6)}, (10, 10))
    has(residency, prewarm, 2, 0)
    prewarm.offer([1, 2])
    assert prewarm.decide(lambda handle: True) == [PrewarmLoad(2, [1])]


def test_an_adapter_that_one_of_several_shards_refused_is_loaded_there_once_it_reports():
    """The refusal comes before its peer's answer, and is not repeated before the shard reports."""
    residency, prewarm = decided({1: (4, 4)}, (10, 10))
    prewarm.offer([1])
    assert prewarm.decide(lambda handle: True) == [PrewarmLoad(1, [0, 1])]
    prewarm.answered(1, 1)
    has(residency, prewarm, 1, 0)
    prewarm.answered(1, 0)
    assert prewarm.decide(lambda handle: True) == [] and not prewarm.is_settled
    prewarm.heard(1)
    assert prewarm.decide(lambda handle: True) == [PrewarmLoad(1, [1])]


def test_an_adapter_of_a_measured_outline_is_loaded_once_all_shards_have_opened_its_files():
    """A shard that has not would refuse, and would not be asked again."""
    residency, prewarm = decided({1: (4, 4)}, (10, 10))
    residency.forget(1)
    prewarm.offer([1])
    assert prewarm.decide(lambda handle: True) == []
    residency.opened(1, 0)
    assert prewarm.decide(lambda handle: True) == []
    residency.opened(1, 1)
    assert prewarm.decide(lambda handle: True) == [PrewarmLoad(1, [0, 1])]


def test_memory_that_an_eviction_leaves_completes_an_adapter_that_other_shards_have():
    residency, prewarm = decided({1: (8, 8), 2: (4, 4)}, (10, 10))
    for handle, shard in [(1, 1), (2, 0)]:
        has(residency, prewarm, handle, shard)
    assert prewarm.decide(lambda handle: True) == [], "neither fits beside the other"
    has(residency, prewarm, 1, 1, whole=False)
    assert prewarm.decide(lambda handle: True) == [PrewarmLoad(2, [1])]


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
    store.report.use()  # it has heard of all uses
    over = store._table.entries[2].usage.last + IN_USE_SECONDS
    until(lambda: time.monotonic() > over, "neither is in use: a turn in memory is longer, the longer its load took")
    for handle in (3, 4):
        load(store, handle, tiny_adapters["all"], eager=False).result()
        use(store, handle)
    assert not is_complete(store, 1) and not is_complete(store, 2) and store.report.use().evictions == 2
    store.adapters.drop(3)
    until(lambda: is_complete(store, 1), "what was used most comes first")
    assert not store.report.layers_ready(2), "nothing was evicted for it"
    found = store.report.use()
    assert (found.evictions, found.preloads, found.preload_hits) == (2, 1, 0)
    use(store, 2)
    assert not store.report.layers_ready(1) and is_complete(store, 4), "what was preloaded and not used goes first"
    store.adapters.drop(4)
    until(lambda: is_complete(store, 1), "again")
    use(store, 1)
    assert store.report.use().preload_hits == 1 and store.report.use().preloads == 2
    load(store, 5, tiny_adapters["all"], eager=False).result()
    use(store, 5)
    until(lambda: store.report.use().evictions == 4, "one that was used takes turns as all do")
    store.report.check_integrity()


def test_an_unused_preloaded_adapter_is_evicted_before_those_of_less_value():
    spare, used = (AdapterEntry(handle, Source(Path(), "", ""), (0,), handle, Footprint(1)) for handle in (1, 2))
    spare.wants[Reason.PRELOAD] = Want(Reason.PRELOAD, Reason.PRELOAD)
    values = {spare: 2.0, used: 1.0}
    assert victims(1, values, lambda one: 1, values.__getitem__) == [spare]
    spare.wants[Reason.ACTIVE] = Want(Reason.ACTIVE, Reason.ACTIVE)
    assert victims(1, values, lambda one: 1, values.__getitem__) == [used]
