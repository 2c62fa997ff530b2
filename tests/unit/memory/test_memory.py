"""More adapters than memory: what is needed comes in, others make room, every byte is counted."""

from __future__ import annotations

import functools
import random
import threading
import time

import pytest
import torch

from lora_server.daemon.backends import Memory
from lora_server.demo import tiny
from lora_server.errors import AdapterLoadError, ConfigError
from lora_server.memory.entry import HALF_LIFE, Demand, Entry, Source, State
from lora_server.memory.eviction import IN_USE_SECONDS, POLICIES, victims
from lora_server.memory.mapped import PAGE_BYTES, MappedPool
from lora_server.memory.on_cpu import CpuTier
from lora_server.memory.pages import PagePool
from lora_server.memory.store import WeightStore
from lora_server.placement import Layout, Placement
from lora_server.spec import Site
from lora_server.units import Size
from tests.support.serving import until
from tests.support.stores import SECONDS, Done, Gate, cpu_store, gather, load, paged_store, source_of
from tests.support.workload import spec_of

QKV, DTYPE = Site(0, "qkv"), torch.bfloat16
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
    store = cpu_store(Placement(spec_of("mixtral"), Layout.parse("ep1-pp1")), 0, DTYPE)
    for handle, path in adapters.items():
        assert load(store, handle, path).result() is None
    found = {handle: store._entries[handle].size for handle in adapters}
    store.close()
    return found


def make(kind, capacity, host_capacity=0, **options):
    placement = Placement(spec_of("mixtral"), Layout.parse("ep1-pp1"))
    if kind == "paged":
        pages = capacity // (2 << 20)
        host_pool = PagePool(host_capacity // (2 << 20), "cpu") if host_capacity else None
        return paged_store(placement, 0, DTYPE, PagePool(pages, "cpu"), host_pool=host_pool, **options)
    return cpu_store(
        placement, 0, DTYPE, capacity, host_pool=MappedPool(host_capacity) if host_capacity else None, **options
    )


def pinned_by(store, handle, layer=0, seconds=SECONDS, owner="a step"):
    """As a loop does it: ask until it is there."""
    deadline = time.monotonic() + seconds
    while (pins := store.pin([handle], layer, owner, deadline)) is None:
        assert time.monotonic() < deadline, f"handle {handle} did not come"
        time.sleep(0.0005)
    return pins


def later(seconds):
    return time.monotonic() + seconds


def is_past(moment):
    return time.monotonic() > moment


def idle(store):
    """The thread has nothing to do."""
    turns = store._turns
    until(lambda: not (turns._wanted or turns._unseen or turns._unasked or store._busy), "the loader to be idle")


@pytest.mark.parametrize("kind", ["cpu", "cpu and host", "paged"])
def test_twice_the_memory_is_served_from_half_of_it(kind, adapters, sizes):
    """Whoever asks gets its own weights, to the bit, however often others had to make room."""
    exact = make("cpu", 1 << 30)
    for handle, path in adapters.items():
        assert load(exact, handle, path).result() is None
    capacity = 6 << 20 if kind == "paged" else max(max(sizes.values()), sum(sizes.values()) // 10)
    store = make(kind, capacity, sum(sizes.values()) // 4 if kind == "cpu and host" else 0)
    for handle, path in adapters.items():
        assert load(store, handle, path, eager=False).result() is None
    dice = random.Random(1)
    for _ in range(120):
        handle, layer = dice.randint(1, 20), dice.randrange(4)
        pins = pinned_by(store, handle, layer)
        if kind != "paged":
            site = Site(layer, dice.choice(["qkv", "down"]))
            (got,), (expected,) = (gather(one, site, (handle, 0)) for one in (store, exact))
            for mine, theirs in zip(got.block.pairs, expected.block.pairs, strict=True):
                assert torch.equal(mine.a_RK, theirs.a_RK) and torch.equal(mine.b_OR, theirs.b_OR)
        store.unpin(pins)
        assert store.use().weight_bytes <= capacity
    idle(store)
    store.check_integrity()
    assert store.use().evictions > 40
    for one in (store, exact):
        one.close()


@pytest.mark.parametrize("kind", ["cpu", "cpu and host", "paged"])
@pytest.mark.parametrize("seed", range(4))
def test_bytes_are_exact_whatever_comes_and_goes(kind, seed, adapters, sizes):
    """Register, load, prefetch, pin, unpin and drop at random: nothing is lost, and nothing hangs."""
    dice, most = random.Random(seed), max(sizes.values())
    capacity = 6 << 20 if kind == "paged" else 3 * most
    store = make(kind, capacity, 2 * most if kind == "cpu and host" else 0, policy=dice.choice(list(POLICIES.values())))
    known, pins, dones, next_handle = {}, [], [], 100
    for _ in range(900):
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
            store.drop(handle)
        if len(pins) > 2 or (pins and action > 0.8):
            store.unpin(pins.pop(dice.randrange(len(pins))))
        assert 0 <= store.use().weight_bytes <= capacity
    while pins:
        store.unpin(pins.pop())
    for owner in range(4):
        store.forget(owner)
    for done in dones:
        error = done.result()
        assert error is None or "dropped while it loaded" in str(error)
    until(lambda: not store._turns._wanted and store._busy is None, "the loader to be idle")
    store.check_integrity()
    for handle in known:  # whatever happened: each of them can be had
        store.unpin(pinned_by(store, handle))
    store.close()
    store.check_integrity()
    assert store.use().weight_bytes == store.use().host_bytes == 0


def test_who_is_needed_first_comes_first_and_one_that_reads_stays(adapters, sizes):
    gate = Gate()
    store = make("cpu", sizes[4] + sizes[8], on_layer=gate)
    store.load(4, source_of(adapters[4]), lambda error: None)
    pins = pinned_by(store, 4)
    for handle in (8, 12, 16):
        assert load(store, handle, adapters[8], eager=False).result() is None
    now = time.monotonic()
    for handle, seconds in ((8, 30), (12, 20), (16, 10)):
        store.prefetch([handle], f"client {handle}", now + seconds)
    until(lambda: store.layers_ready(16) == 4, "the earliest")
    assert store.layers_ready(4) == 4, "a step reads it"
    assert store.layers_ready(8) == store.layers_ready(12) == 0, "they are needed later than 16"
    store.forget("client 16")
    until(lambda: store.layers_ready(12) == 4, "the second")
    store.unpin(pins)
    until(lambda: store.layers_ready(8) == 4 and store.layers_ready(4) == 0, "the last, in the place of the pinned one")
    store.close()


def test_what_is_prefetched_goes_after_who_waits_and_is_fulfilled_by_its_clients_step(adapters, sizes):
    gate = Gate()
    store = make("cpu", 1 << 28, on_layer=gate)
    gate.shut()
    load(store, 4, adapters[4])
    assert gate.arrived.wait(SECONDS)
    looked_at = {handle: load(store, handle, adapters[8], eager=False) for handle in (8, 12, 16)}
    assert [one.calls for one in looked_at.values()] == [[], [], []]
    for handle, seconds in ((8, 30.2), (12, 30.1), (16, 30.3)):
        store.prefetch([handle], "a client", later(seconds))
    assert store.pin([16], 0, "a step", later(30)) is None
    store.forget("a client", {12, 16})
    gate.open()
    until(lambda: store.layers_ready(12) == 4, "who waits, and what is prefetched")
    until(lambda: looked_at[8].calls, "it is known how much the last takes")
    store.bring(8, lambda error: None)
    until(lambda: store.layers_ready(8) == store.layers_ready(12) == 4, "all of them")
    order = list(dict.fromkeys(handle for handle, _ in gate.loaded))
    assert order.index(16) < order.index(12) < order.index(8), order
    store.unpin(pinned_by(store, 12, owner="a client"))
    assert [list(store._entries[handle].demands) for handle in (8, 12)] == [[], []]
    store.close()


def test_active_ones_stay_and_come_in_and_others_wait_for_them(adapters, sizes):
    """A prefetch does not move them, an add is told that there is no room, and comes when fewer are active."""
    store = make("cpu", sizes[4] + sizes[8])
    store.set_active([4, 8], [])
    for handle in (4, 8):
        assert load(store, handle, adapters[handle], eager=False).result() is None
    until(lambda: store.layers_ready(4) == store.layers_ready(8) == 4, "whom clients hold comes in unasked")
    assert load(store, 12, adapters[8]).result() is None, "known, though there is no room"
    store.prefetch([12], "somebody", time.monotonic() + 0.3)
    until(lambda: store._entries[12].deadline() == float("inf"), "the prefetch is over")
    assert store.layers_ready(12) == 0 and store.use().evictions == 0
    store.set_active([], [4])
    until(lambda: store.layers_ready(12) == 4, "the add")
    assert store.layers_ready(8) == 4 and store.layers_ready(4) == 0
    store.set_active([4], [], anew=True)
    until(lambda: store.layers_ready(4) == 4, "an active one, in the place of whoever is not")
    store.check_integrity()
    store.close()


def test_a_step_at_a_late_layer_gets_that_layer_first(adapters):
    gate = Gate()
    store = make("cpu", 1 << 28, on_layer=gate)
    gate.shut()
    assert load(store, 4, adapters[4]).calls == []
    assert gate.arrived.wait(SECONDS)
    assert load(store, 8, adapters[8], eager=False).calls == []
    assert store.pin([8], 2, "a step", time.monotonic() + SECONDS) is None
    gate.open()
    store.unpin(pinned_by(store, 8, 2))
    until(lambda: store.layers_ready(8) == 4, "the rest")
    store.close()


def test_who_is_kept_never_makes_room(adapters, sizes):
    """Brought in though others have to go; all that are kept fit together, and steps fit beside them."""
    store = make("cpu", 2 * sizes[4])
    for handle in (1, 2, 3):
        assert load(store, handle, adapters[4]).result() is None
        over = store._entries[handle].usage.last + IN_USE_SECONDS
        until(functools.partial(is_past, over), "its turn is over")
    assert store.layers_ready(1) == 0, "the last took its place"
    store.keep(1, kept := Done())
    assert kept.result() is None
    for handle in (2, 3, 2, 3):
        store.unpin(pinned_by(store, handle))
        assert store.layers_ready(1) == 4
    with pytest.raises(AdapterLoadError, match=f"of which {sizes[4]} are pinned"):
        store.pin([2, 3], 0, "a step", later(SECONDS))
    store.keep(2, second := Done())
    store.keep(3, refused := Done())
    store.keep(99, unknown := Done())
    assert second.result() is None and "pinned already" in str(refused.result())
    assert "unknown here" in str(unknown.result())
    assert store.state(3, 0) is State.DISK, "a refusal is no failure"
    store.unkeep(1)
    store.unpin(pinned_by(store, 3))
    assert store.layers_ready(1) == 0 and store.layers_ready(2) == 4
    store.drop(2)
    store.keep(3, again := Done())
    store.keep(1, beside := Done())
    assert again.result() is None and beside.result() is None, "what is gone takes nothing"
    store.close()
    store.check_integrity()


def test_how_much_of_the_host_a_gpus_shard_pins():
    """Unless told: as much as its device pool, and all shards of a node together a quarter at most."""
    unless_told = Memory(sharing=8)
    assert unless_told.pinned_bytes(2048 << 30, 60 << 30) == 60 << 30
    assert unless_told.pinned_bytes(512 << 30, 60 << 30) == 16 << 30
    assert Memory(sharing=8, host_pool=Size.parse("0")).pinned_bytes(2048 << 30, 60 << 30) == 0
    assert Memory(sharing=8, host_pool=Size.parse("90GiB")).pinned_bytes(2048 << 30, 60 << 30) == 90 << 30
    with pytest.raises(ConfigError, match="--host-pool"):
        Memory(sharing=8, host_pool=Size.parse("90GiB")).pinned_bytes(64 << 30, 60 << 30)


def test_an_adapter_larger_than_the_pool_is_refused_by_name_and_size(adapters, sizes):
    store = make("cpu", PAGE_BYTES)
    error = load(store, 3, adapters[3]).result()
    assert isinstance(error, AdapterLoadError) and str(sizes[3]) in str(error) and "--device-pool" in str(error)
    store.check_integrity()
    store.close()


def test_adapters_of_one_step_that_do_not_fit_together_are_refused_at_once(adapters, sizes):
    store = make("cpu", sizes[4] + sizes[8] - PAGE_BYTES)
    for handle in (4, 8):
        assert load(store, handle, adapters[handle], eager=False).result() is None
    with pytest.raises(AdapterLoadError, match="the adapters of one step take"):
        store.pin([4, 8], 0, "a step", time.monotonic() + SECONDS)
    store.close()


def test_what_the_host_pool_holds_is_not_read_from_files_again(adapters, tmp_path, sizes):
    """Packed once, when it first came in."""
    paths = {}
    for handle in (4, 8):
        paths[handle] = tmp_path / str(handle)
        paths[handle].mkdir()
        for file in adapters[handle].iterdir():
            (paths[handle] / file.name).write_bytes(file.read_bytes())
    store = make("cpu", max(sizes[4], sizes[8]), sizes[4] + sizes[8])
    for handle in (4, 8):
        assert load(store, handle, paths[handle], eager=False).result() is None
        store.unpin(pinned_by(store, handle))
        until(lambda handle=handle: store.layers_ready(handle) == 4, "all of it")
    assert store.state(4, 0) is State.HOST and store.state(8, 0) is State.READY
    for path in paths.values():
        (path / "adapter_model.safetensors").unlink()
    for handle in (4, 8, 4):
        store.unpin(pinned_by(store, handle))
        until(lambda handle=handle: store.layers_ready(handle) == 4, "all of it")
    store.close()


def test_a_file_that_is_away_for_a_moment_fails_steps_for_a_moment(adapters, tmp_path, sizes, monkeypatch):
    monkeypatch.setattr("lora_server.memory.entry.RETRY_SECONDS", 0.0)
    path = tmp_path / "moving"
    path.mkdir()
    for file in adapters[4].iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    store = make("cpu", 1 << 28)
    done = load(store, 4, path, eager=False)
    assert done.result() is None and store.state(4, 0) is State.DISK
    store.bring(4, brought := Done())
    assert brought.result() is None and store.layers_ready(4) == 4
    store.close()
    store = make("cpu", 1 << 28)
    given = source_of(path)
    path.rename(tmp_path / "away")
    failed = threading.Event()
    store.load(4, given, lambda error: failed.set())
    assert failed.wait(SECONDS) and store.state(4, 0) is State.FAILED
    (tmp_path / "away").rename(path)
    store.unpin(pinned_by(store, 4))
    store.close()


def test_a_step_waits_for_nothing_that_was_only_prefetched(adapters, sizes):
    """Steps need theirs now, however long their clients would wait."""
    store = make("cpu", max(sizes[4], sizes[8]))
    for handle in (4, 8):
        assert load(store, handle, adapters[handle], eager=False).result() is None
    store.prefetch([4], "prefetch", later(2 * SECONDS))
    until(lambda: store.layers_ready(4) == 4, "what was prefetched")
    until(lambda: store.pin([8], 0, "a step", later(3 * SECONDS)), "what a step needs", SECONDS)
    store.close()


def test_what_a_step_has_used_in_part_comes_before_what_was_prefetched(adapters):
    """Its next step is about to come."""
    gate = Gate()
    store = make("cpu", 1 << 28, on_layer=gate)
    gate.shut()
    assert load(store, 12, adapters[12]).calls == []
    assert gate.arrived.wait(SECONDS)
    for handle in (4, 8):
        load(store, handle, adapters[handle], eager=False)
    store.prefetch([8], "prefetch", later(SECONDS))
    assert store.pin([4], 0, "a step", later(2 * SECONDS)) is None
    gate.then = lambda handle, layers: store.pin([4], 0, "a step", later(SECONDS)) if handle == 4 else None
    gate.open()
    until(lambda: store.layers_ready(8) == 4, "both")
    order = [handle for handle, layers in gate.loaded if handle in (4, 8) and layers]
    assert order == [4] * 4 + [8] * 4
    store.close()


def test_loading_gives_way_to_steps_between_two_blocks(adapters, monkeypatch):
    """They share one interpreter; without patience a layer in small blocks would be in the way all the time."""
    monkeypatch.setattr("lora_server.memory.loading.PATIENCE_SECONDS", SECONDS)
    store, waits = make("cpu", 1 << 28), threading.Event()
    assert load(store, 4, adapters[4]).result() is None
    pins, patient = pinned_by(store, 4), store._loader.give_way
    store._loader.give_way = lambda seconds: (waits.set(), patient(seconds))
    done = load(store, 8, adapters[8])
    assert waits.wait(SECONDS) and store.layers_ready(8) == 0
    store.unpin(pins)
    assert done.result() is None
    store.close()


def entries(*described):
    """(bytes, last use, rate, load seconds, deadline) of each."""
    found = []
    for order, (nbytes, last, rate, seconds, deadline) in enumerate(described):
        entry = Entry(order, Source(None, "", ""), (0,), order, nbytes=nbytes)
        entry.usage.last, entry.usage.rate, entry.usage.load_seconds = last, rate, seconds
        if deadline is not None:
            entry.demands["somebody"] = Demand(deadline, deadline)
        found.append(entry)
    return found


def test_policies_choose_whom_they_value_least_and_no_more_than_needed():
    old, small_hot, wanted, big = entries(
        (10, 1, 5, 1, None), (5, 3, 9, 1, None), (50, 0, 0, 0, 99), (100, 2, 9, 1, None)
    )
    everyone, size = [old, small_hot, wanted, big], lambda entry: entry.nbytes
    assert victims(10, everyone, size, POLICIES["lru"]) == [old]
    assert victims(60, everyone, size, POLICIES["lru"]) == [big], "the first would not have been needed"
    assert victims(60, everyone, size, POLICIES["value"]) == [big]
    assert victims(112, everyone, size, POLICIES["lru"]) == [old, big, small_hot]
    assert victims(120, everyone, size, POLICIES["lru"]) == [big, wanted], "whom somebody demands goes last"
    assert victims(166, everyone, size, POLICIES["lru"]) is None


def test_uses_of_long_ago_are_worth_less():
    """At whatever time one asks; and to come back is no use."""
    once_hot, in_use = entries((10, 0, 0, 1, None), (10, 0, 0, 1, None))
    for _ in range(1000):
        once_hot.usage.count(1e6)
    for second in range(10):
        in_use.usage.count(1e6 + 20 * HALF_LIFE + second)
    assert victims(10, [once_hot, in_use], lambda entry: entry.nbytes, POLICIES["value"]) == [once_hot]
    once_hot.arrived(1e6 + 20 * HALF_LIFE + 20)
    assert victims(10, [once_hot, in_use], lambda entry: entry.nbytes, POLICIES["value"]) == [once_hot]


def test_copies_are_as_slow_as_the_link(adapters, sizes):
    """So that benches have a link; 1 ms and more per layer."""
    store = WeightStore(
        Placement(spec_of("mixtral"), Layout.parse("ep1-pp1")),
        0,
        CpuTier(Placement(spec_of("mixtral"), Layout.parse("ep1-pp1")), 0, DTYPE, MappedPool(1 << 28)),
        link_gbps=sizes[3] * 8e-9 / 0.2,
    )
    began = time.monotonic()
    assert load(store, 3, adapters[3]).result() is None
    assert time.monotonic() - began > 0.15
    store.close()
