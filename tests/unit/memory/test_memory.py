"""More adapters than memory: what is needed is loaded, others are evicted, every byte is counted."""

import functools
import random
import shutil
import threading
import time

import pytest
import torch

from lora_server.adapters import open_adapter
from lora_server.daemon.backends import MemorySettings
from lora_server.demo import tiny
from lora_server.errors import AdapterLoadError, ConfigError
from lora_server.memory.entry import HALF_LIFE, AdapterEntry, Footprint, LayerState, Reason, Source, Want
from lora_server.memory.eviction import IN_USE_SECONDS, POLICIES, victims
from lora_server.memory.mapped import PAGE_BYTES, MappedPool
from lora_server.memory.pins import Pins
from lora_server.spec import Site
from lora_server.timings import Timings
from lora_server.units import Size
from tests.support.serving import until
from tests.support.stores import SECONDS, Done, bytes_of, gather, is_complete, load
from tests.support.workload import spec_of

DTYPE = torch.bfloat16
TARGETS = ("attention", "attention", "down", "all")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Twenty of mixed ranks and sites, by handle."""
    model, root = tiny.make_model("mixtral"), tmp_path_factory.mktemp("adapters")
    for handle in range(1, 21):
        kind = TARGETS[handle % len(TARGETS)]
        tiny.make_adapter(model, root / str(handle), lora_rank=1 + handle % 7, seed=handle, targets=kind)
    return {handle: root / str(handle) for handle in range(1, 21)}


@pytest.fixture(scope="module")
def sizes(adapters):
    """Bytes of each in a pool of the operating system's pages."""
    return {handle: bytes_of(path, DTYPE) for handle, path in adapters.items()}


@pytest.fixture
def make(make_store):
    return functools.partial(make_store, dtype=DTYPE)


@pytest.fixture
def make_kind(make, sizes):
    """A store of a kind whose pools have room for some of all adapters' bytes, and what its weights may take."""

    def make_one(kind, capacity, host_capacity, **options):
        if kind == "paged":
            return make(pages=3, **options), 6 << 20
        host_pool = MappedPool(host_capacity) if kind == "cpu and host" else None
        return make(capacity, host_pool=host_pool, **options), capacity

    return make_one


def pinned_by(store, handle, layer=0, owner="a step"):
    """As a loop does it: ask until it is there."""
    deadline = time.monotonic() + SECONDS
    while (pins := store.pin([handle], layer, owner, deadline)) is None:
        assert time.monotonic() < deadline, f"handle {handle} did not come"
        time.sleep(0.0005)
    return pins


def read(store, handle, layer=0):
    store.unpin(pinned_by(store, handle, layer))


def complete(store, *handles):
    until(lambda: all(is_complete(store, handle) for handle in handles), f"all of {handles}")


def know(store, adapters, *handles):
    for handle in handles:
        assert load(store, handle, adapters[handle], eager=False).result() is None


def later(seconds):
    return time.monotonic() + seconds


def idle(store):
    """The thread has nothing to do."""
    until(lambda: store._loader.is_idle() and not any(store._queue._queued.values()), "the loader to be idle")


KINDS = pytest.mark.parametrize("kind", ["cpu", "cpu and host", "paged"])


@KINDS
def test_twice_the_memory_is_served_from_half_of_it(kind, adapters, sizes, make, make_kind):
    """Each step gets its own adapter's weights, to the bit, however often others were evicted."""
    total = sum(sizes.values())
    store, capacity = make_kind(kind, max(max(sizes.values()), total // 10), total // 4)
    know(store, adapters, *adapters)
    dice = random.Random(1)
    for _ in range(40):
        handle, layer = dice.randint(1, 20), dice.randrange(4)
        pins = pinned_by(store, handle, layer)
        if kind != "paged":
            site = Site(layer, dice.choice(["qkv", "down"]))
            (got,) = gather(store, site, (handle, 0))
            with open_adapter(adapters[handle], spec_of("mixtral")) as adapter:
                exact = adapter.read(site, 0) if site in adapter.sites() else []
            for mine, (_, a, b) in zip(got.block.pairs, exact, strict=True):
                assert torch.equal(mine.a_RK, a.to(DTYPE)) and torch.equal(mine.b_OR, b.to(DTYPE))
        store.unpin(pins)
        assert store.report.use().weight_bytes <= capacity
    idle(store)
    store.report.check_integrity()
    assert store.report.use().evictions > 12


@KINDS
@pytest.mark.parametrize("seed", range(3))
def test_bytes_are_exact_whatever_comes_and_goes(kind, seed, adapters, sizes, make_kind):
    """Register, load, prefetch, pin, unpin and drop at random: nothing is lost, and nothing hangs."""
    dice, most = random.Random(seed), max(sizes.values())
    store, capacity = make_kind(kind, 3 * most, 2 * most, policy=dice.choice(list(POLICIES.values())))
    known, pins, dones, next_handle = {}, [], [], 100
    for _ in range(300):
        action = dice.random()
        if action < 0.25 or not known:
            next_handle += 1
            known[next_handle] = adapters[dice.randint(1, 20)]
            dones.append(load(store, next_handle, known[next_handle], eager=dice.random() < 0.3))
        elif action < 0.5:
            got = store.pin(dice.sample(list(known), 1), dice.randrange(4), dice.randrange(4), later(SECONDS))
            pins += [got] if got else []
        elif action < 0.6:
            store.prefetch(dice.sample(list(known), min(3, len(known))), dice.randrange(4), later(0.2))
        elif action < 0.8 and known:
            handle = dice.choice(list(known))
            del known[handle]
            store.adapters.drop(handle)
        if len(pins) > 2 or (pins and action > 0.8):
            store.unpin(pins.pop(dice.randrange(len(pins))))
        assert 0 <= store.report.use().weight_bytes <= capacity
    while pins:
        store.unpin(pins.pop())
    for owner in range(4):
        store.forget(owner)
    for done in dones:
        error = done.result()
        assert error is None or "dropped while it loaded" in str(error)
    until(lambda: store._loader.is_idle() and not store._queue.has_demand, "the loader to be idle")
    store.report.check_integrity()
    for handle in known:  # whatever happened: each of them can be had
        read(store, handle)
    store.close()
    store.report.check_integrity()
    assert store.report.use().weight_bytes == store.report.use().host_bytes == 0


def test_the_adapter_that_is_needed_first_comes_first_and_one_that_a_step_reads_stays(adapters, sizes, make):
    store = make(sizes[4] + sizes[8])
    load(store, 4, adapters[4])
    pins = pinned_by(store, 4)
    for handle in (8, 12, 16):
        assert load(store, handle, adapters[8], eager=False).result() is None
    now = time.monotonic()
    for handle, seconds in ((8, 3000), (12, 2000), (16, 1000)):
        store.prefetch([handle], f"client {handle}", now + seconds)
    complete(store, 16)
    assert is_complete(store, 4), "a step reads it"
    assert store.report.layers_ready(8) == store.report.layers_ready(12) == 0, "they are needed later than 16"
    store.forget("client 16")
    complete(store, 12)
    store.unpin(pins)
    complete(store, 8)
    until(lambda: store.report.layers_ready(4) == 0, "the pinned one to make place for the last")


ORDERS = {  # what is asked for while the loader is busy: by whom, which handles, seconds until they are needed
    "by deadline": ([("a client", [8], 3000), ("another", [12], 2000), ("a third", [16], 1000)], [16, 12, 8]),
    "as one client says": ([("a client", [16, 99, 12], 3000), ("another", [16], 1000)], [16, 12, 8]),
    "steps first": ([("a client", [8], 2000), ("a client", [12], 1000), ("a step", [16], 3000)], [16, 12, 8]),
    "steps beside others": ([("a client", [8], 1000), ("a step", [12], 3000), ("another", [16], 2000)], [12, 8, 16]),
}


@pytest.mark.parametrize("case", ORDERS)
def test_adapters_are_loaded_in_the_order_in_which_they_are_needed(case, adapters, gate, make):
    """All layers of each, also for a step, since the next one is about to come; what is not asked for comes last."""
    store, (asked, expected) = make(1 << 28, on_layer=gate), ORDERS[case]
    step = [handle for owner, handles, _ in asked for handle in handles if owner == "a step"]
    gate.shut()
    load(store, 4, adapters[4])
    assert gate.arrived.wait(SECONDS)
    looked_at = [load(store, handle, adapters[8], eager=False) for handle in (8, 12, 16)]
    for owner, handles, seconds in asked:
        if owner == "a step":
            assert store.pin(handles, 0, owner, later(seconds)) is None
        else:
            store.prefetch(handles, owner, later(seconds))
    gate.then = lambda handle, _: store.pin(step, 0, "a step", later(3000)) if [handle] == step else None
    gate.open()
    complete(store, *set(expected) - {8})
    assert [one.result() for one in looked_at] == [None] * 3
    store.adapters.prewarm(8, Done(store))
    complete(store, 4, 8)
    until(lambda: (8, 0) in gate.loaded, "the last layer was reported, which comes after it is there")
    found = [handle for handle, left in gate.loaded if handle != 4 and left is not None]
    assert found == [handle for handle in expected for _ in range(4)]


def test_a_prefetch_is_fulfilled_by_its_clients_step_and_ends_when_it_is_withdrawn(adapters, make):
    store = make(1 << 28)
    know(store, adapters, 8, 12)
    store.prefetch([8, 12], "a client", later(3000))
    store.forget("a client", {12})
    complete(store, 12)
    assert store._table.entries[8].wants == {}
    store.unpin(pinned_by(store, 12, owner="a client"))
    assert store._table.entries[12].wants == {}


def test_active_adapters_stay_and_come_in_and_others_wait_for_them(adapters, sizes, make):
    """A prefetch does not move them, an add is told that there is no room, and comes when fewer are active."""
    store = make(sizes[4] + sizes[8])
    store.adapters.set_active([4, 8], [])
    know(store, adapters, 4, 8)
    complete(store, 4, 8)  # unasked, since clients hold them
    assert load(store, 12, adapters[8]).result() is None, "known, though there is no room"
    store.prefetch([12], "somebody", time.monotonic() + 0.3)
    until(lambda: store._table.entries[12].deadline() == float("inf"), "the prefetch is over")
    assert store.report.layers_ready(12) == 0 and store.report.use().evictions == 0
    store.adapters.set_active([], [4])
    complete(store, 12)
    assert is_complete(store, 8) and store.report.layers_ready(4) == 0
    store.adapters.set_active([4], [], anew=True)
    complete(store, 4)  # in the place of one that is not active
    store.report.check_integrity()


def test_a_pinned_adapter_is_never_evicted(adapters, sizes, make):
    """Brought in though others have to go; all that are pinned fit together, and steps fit beside them."""
    store = make(2 * sizes[4])
    for handle in (1, 2, 3):
        assert load(store, handle, adapters[4]).result() is None
        over = store._table.entries[handle].usage.last + IN_USE_SECONDS
        until(lambda over=over: time.monotonic() > over, "its turn to be over")
    assert store.report.layers_ready(1) == 0, "the last took its place"
    store.adapters.keep_resident(1, kept := Done(store))
    assert kept.result() is None
    for handle in (2, 3, 2, 3):
        read(store, handle)
        assert is_complete(store, 1)
    with pytest.raises(AdapterLoadError, match=f"of which {sizes[4]} are pinned"):
        store.pin([2, 3], 0, "a step", later(SECONDS))
    store.adapters.keep_resident(2, second := Done(store))
    store.adapters.keep_resident(3, refused := Done(store))
    store.adapters.keep_resident(99, unknown := Done(store))
    assert second.result() is None and "pinned already" in str(refused.result())
    assert "unknown here" in str(unknown.result())
    assert store.report.state(3, 0) is LayerState.DISK, "a refusal is no failure"
    store.adapters.allow_eviction(1)
    read(store, 3)
    assert store.report.layers_ready(1) == 0 and is_complete(store, 2)
    store.adapters.drop(2)
    store.adapters.keep_resident(3, again := Done(store))
    store.adapters.keep_resident(1, beside := Done(store))
    assert again.result() is None and beside.result() is None, "what is gone takes nothing"
    store.close()
    store.report.check_integrity()


def test_one_that_was_prewarmed_is_evicted_and_its_caller_told_without_the_lock(adapters, sizes, make):
    """As a shard's reports need it: they wait for the lock with a lock of their own, which `done` takes, too."""
    store = make(max(sizes[4], sizes[8]))
    know(store, adapters, 4, 8)
    with store._lock:  # so that it is not loaded yet when another is in demand
        store.adapters.prewarm(4, told := Done(store))
        store._queue.demand(store._table.among([8]), None, "a step", later(SECONDS))
        store._lock.notify()
    complete(store, 8)
    assert told.result() is None and store.report.layers_ready(4) == 0


def test_how_much_of_the_host_a_gpus_shard_pins():
    """Unless told: as much as its device pool, and all shards of a node together a quarter at most."""
    unless_told = MemorySettings(sharing=8)
    assert unless_told.pinned_bytes(2048 << 30, 60 << 30) == 60 << 30
    assert unless_told.pinned_bytes(512 << 30, 60 << 30) == 16 << 30
    assert MemorySettings(sharing=8, host_pool=Size.parse("0")).pinned_bytes(2048 << 30, 60 << 30) == 0
    assert MemorySettings(sharing=8, host_pool=Size.parse("90GiB")).pinned_bytes(2048 << 30, 60 << 30) == 90 << 30
    with pytest.raises(ConfigError, match="--host-pool"):
        MemorySettings(sharing=8, host_pool=Size.parse("90GiB")).pinned_bytes(64 << 30, 60 << 30)


def test_what_does_not_fit_the_pool_is_refused_at_once_and_says_why(adapters, sizes, make):
    store = make(PAGE_BYTES)
    error = load(store, 3, adapters[3]).result()
    assert isinstance(error, AdapterLoadError) and str(sizes[3]) in str(error) and "--device-pool" in str(error)
    store.report.check_integrity()
    store = make(sizes[4] + sizes[8] - PAGE_BYTES)
    know(store, adapters, 4, 8)
    with pytest.raises(AdapterLoadError, match="the adapters of one step take"):
        store.pin([4, 8], 0, "a step", later(SECONDS))


def test_what_the_host_pool_holds_is_not_read_from_files_again(adapters, tmp_path, sizes, make):
    """Packed once, when it first came in."""
    paths = {handle: shutil.copytree(adapters[handle], tmp_path / str(handle)) for handle in (4, 8)}
    store = make(max(sizes[4], sizes[8]), host_pool=MappedPool(sizes[4] + sizes[8]))

    def bring(handle):
        read(store, handle)
        complete(store, handle)

    for handle in paths:
        know(store, paths, handle)
        bring(handle)
    assert store.report.state(4, 0) is LayerState.HOST and store.report.state(8, 0) is LayerState.READY
    for path in paths.values():
        (path / "adapter_model.safetensors").unlink()
    for handle in (4, 8, 4):
        bring(handle)


def test_a_step_waits_for_nothing_that_was_only_prefetched(adapters, sizes, make):
    """Steps need theirs now, however long their clients would wait."""
    store = make(max(sizes[4], sizes[8]))
    know(store, adapters, 4, 8)
    store.prefetch([4], "prefetch", later(2 * SECONDS))
    complete(store, 4)
    until(lambda: store.pin([8], 0, "a step", later(3 * SECONDS)), "what a step needs", SECONDS)


def test_loading_gives_way_to_steps_between_two_blocks(adapters, make):
    """They share one interpreter; without patience a layer in small blocks would be in the way all the time."""
    store, waits = make(1 << 28, timings=Timings(block_patience=SECONDS)), threading.Event()
    assert load(store, 4, adapters[4]).result() is None
    pins, patient = pinned_by(store, 4), store._loader._layers.yield_to_steps
    store._loader._layers.yield_to_steps = lambda seconds: (waits.set(), patient(seconds))
    done = load(store, 8, adapters[8])
    assert waits.wait(SECONDS) and store.report.layers_ready(8) == 0
    store.unpin(pins)
    assert done.result() is None


def entries(*described):
    """(bytes, last use, rate, load seconds, deadline) of each."""
    found = []
    for order, (nbytes, last, rate, seconds, deadline) in enumerate(described):
        entry = AdapterEntry(order, Source(None, "", ""), (0,), order, Footprint(nbytes))
        entry.usage.last, entry.usage.rate, entry.usage.load_seconds = last, rate, seconds
        if deadline is not None:
            entry.wants["a client"] = Want(Reason.PREFETCH, "a client", deadline, deadline)
        found.append(entry)
    return found


def test_policies_evict_what_they_value_least_and_no_more_than_needed():
    everyone = entries((10, 1, 5, 1, None), (5, 3, 9, 1, None), (50, 0, 0, 0, 99), (100, 2, 9, 1, None))
    old, small_hot, wanted, big = everyone

    def least(nbytes, policy="lru"):
        return victims(nbytes, everyone, lambda entry: entry.footprint.nbytes, POLICIES[policy])

    assert least(10) == [old]
    assert least(60) == least(60, "value") == [big], "the first would not have been needed"
    assert least(112) == [old, big, small_hot]
    assert least(120) == [big, wanted], "what a client demands goes last"
    assert least(166) is None


def test_uses_of_long_ago_are_worth_less():
    """Whenever the policy is asked; and a reload is no use."""
    once_hot, in_use = entries((10, 0, 0, 1, None), (10, 0, 0, 1, None))
    for _ in range(1000):
        once_hot.usage.count(1e6)
    for second in range(10):
        in_use.usage.count(1e6 + 20 * HALF_LIFE + second)
    assert victims(10, [once_hot, in_use], lambda entry: entry.footprint.nbytes, POLICIES["value"]) == [once_hot]
    once_hot.note_layer(1e6 + 20 * HALF_LIFE + 20)
    assert victims(10, [once_hot, in_use], lambda entry: entry.footprint.nbytes, POLICIES["value"]) == [once_hot]


def test_steps_of_one_batch_are_counted_together(adapters, make):
    """The lock is held while uses are counted, and thousands of steps come between two counts."""
    pins = Pins()
    for second in range(1000):
        pins.remove(pins.add([4, 8], float(second)))
    pins.remove(pins.add([8], 7.0))
    assert pins.take_uses() == [({4, 8}, 999.0, 1000), ({8}, 7.0, 1)] and pins.take_uses() == []
    store = make(1 << 28)
    assert load(store, 4, adapters[4]).result() is None
    usage, before = store._table.entries[4].usage, time.monotonic()
    for _ in range(1000):
        read(store, 4)
    store.report.use()
    assert usage.rate == pytest.approx(1000, rel=0.1) and before < usage.last < time.monotonic()


def test_copies_are_as_slow_as_the_link(adapters, sizes, make):
    """So that benches have a link; 1 ms and more per layer."""
    store, began = make(1 << 28, link_gbps=sizes[3] * 8e-9 / 0.2), time.monotonic()
    assert load(store, 3, adapters[3]).result() is None
    assert time.monotonic() - began > 0.15
