"""A step's segments: checked at once as one by one, and gathered at once as one by one, also from a store in motion."""

import ctypes
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_cuda.layout import pack, shape_of
from kernels_cuda.sizes import PAGE_TILES, TILE_BYTES
from lora_server.errors import AdapterError, LoraServerError, ProtocolError, UnknownAdapterError
from lora_server.memory.directory import ABSENT, EMPTY_PLACE, BlockDirectory
from lora_server.memory.entry import LayerState
from lora_server.memory.pages import PagePool
from lora_server.placement import Layout, Placement
from lora_server.shard import request
from lora_server.spec import Site
from lora_server.wire.slot import RequestHeader
from tests.support.stores import SECONDS, Gate, cpu_store, gather, load, paged_store, pinned
from tests.support.workload import spec_of

DTYPE, EXPERTS = torch.bfloat16, 8
HEADER = RequestHeader(0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1, 0, 1, ((0, 1),), 0, 0, 0)
GATE_UP = Site(0, "gate_up")


# -- what a client wrote


def verdict(segments, num_entries, few):
    """What the check says; with `few` above the number of segments it looks at one after the other."""
    header = HEADER._replace(num_segments=len(segments), num_entries=num_entries)
    try:
        request._check_segments(np.array(segments, np.int32).reshape(-1, 4), header, EXPERTS, few)
    except ProtocolError as error:
        return str(error)
    return ""


def sound(sizes, seed=0):
    rng, ends = np.random.default_rng(seed), np.cumsum([0, *sizes])
    return [[int(rng.integers(0, 2**31)), i % EXPERTS, int(ends[i]), size] for i, size in enumerate(sizes)]


WORD = st.sampled_from([-(2**31), -1, 0, 1, EXPERTS - 1, EXPERTS, 2**31 - 1])


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=60),
    changes=st.lists(st.tuples(st.integers(0, 59), st.integers(0, 3), WORD), max_size=3),
    more=st.sampled_from([0, 0, 0, 1, -1]),
)
def test_many_segments_are_refused_as_one_by_one(sizes, changes, more):
    segments = sound(sizes)
    assert verdict(segments, sum(sizes), 0) == verdict(segments, sum(sizes), 100) == ""
    for at, word, value in changes:
        segments[at % len(segments)][word] = value
    at_once, in_turn = (verdict(segments, sum(sizes) + more, few) for few in (0, 100))
    assert at_once == in_turn
    if more and not changes:
        assert f"segments hold {sum(sizes)} entries, expected {sum(sizes) + more}" in at_once


def test_the_sum_of_entries_does_not_wrap():
    most = 2**31 - 1
    segments = [[1, 0, 0, most], [1, 1, most, most], [1, 2, -2, 3]]  # -2 is what 32 bits make of 2 * most
    for few in (0, 100):
        assert f"expected it to start at {2 * most}" in verdict(segments, 1, few)


@given(handles=st.lists(st.integers(0, 4), max_size=30))
def test_handles_are_all_that_are_named(handles):
    table = np.array([(handle, 0, i, 1) for i, handle in enumerate(handles)], np.int32)
    memory = memoryview(bytearray(128) + table.tobytes())
    assert request.handles(memory, HEADER._replace(num_segments=len(handles))) == set(handles)
    assert request.handles(memory, HEADER._replace(num_segments=len(handles) + 1)) == frozenset()


# -- what a shard has of it


LAYOUTS = {"ep1-pp1": 0, "ep2-pp1": 1, "ep3-pp2": 4}
READY, HALF, BAD, DROPPED, UNKNOWN = (1, 2, 3), 4, 5, 6, 7


@pytest.fixture(scope="module", params=LAYOUTS)
def store(request, tiny_adapters, tmp_path_factory):
    """Three adapters are READY, of one only the first layer of this shard, one FAILED and one was dropped."""
    gate, (layout, shard) = Gate(), (request.param, LAYOUTS[request.param])
    placement = Placement(spec_of("mixtral"), Layout.parse(layout))
    store = paged_store(placement, shard, DTYPE, PagePool(40, "cpu"), on_layer=gate)
    bad = tmp_path_factory.mktemp("bad")
    (bad / "adapter_config.json").write_bytes((tiny_adapters["all"] / "adapter_config.json").read_bytes())
    dones = [load(store, DROPPED, tiny_adapters["bf16"])]
    dones += [load(store, h, tiny_adapters[name]) for h, name in zip(READY, ("all", "down", "bf16"), strict=True)]
    assert [done.result() for done in dones] == [None] * 4
    assert isinstance(load(store, BAD, bad).result(), AdapterError)
    store.adapters.drop(DROPPED)
    gate.arrived.clear()
    gate.shut()
    load(store, HALF, tiny_adapters["all"])
    assert gate.arrived.wait(SECONDS)
    yield store
    gate.open()
    store.close()
    assert store.report.use().weight_bytes == 0


def one_by_one(store, site, segments):
    """The obvious loop: (table, most ranks), or what the first segment that cannot be served raises."""
    rows, most = [], 0
    for handle, expert, first, num_entries in segments:
        state = store.report.state(handle, site.layer)
        if state is LayerState.FAILED:
            raise store.report.error(handle)
        if state is not LayerState.READY:
            raise UnknownAdapterError(
                f"shard {store._shard} step 5: handle {handle} is {state.value} here; was it removed?"
            )
        if expert not in store.tier._placement.experts(site, store._shard):
            raise ProtocolError(f"{site} expert {expert}: not on shard {store._shard}; placements differ, join again")
        placed = store._table.entries[handle].footprint.manifest.blocks(site.layer).get(site, {}).get(expert)
        row, tile = store.tier.rows.empty(store.tier.format.shape(site, ())), 0
        if placed is not None:
            row, tile = store.tier._published[handle].rows[placed.shape], placed.begin // TILE_BYTES
            most = max(most, placed.shape.groups * 16)
        rows.append([row, tile, first, num_entries])
    return rows, most


def outcome(function):
    try:
        return function()
    except LoraServerError as error:
        return type(error), str(error)


@st.composite
def steps(draw):
    """(site, segments): mostly of what is there, in runs of a handle as clients send them and otherwise."""
    spec = spec_of("mixtral")
    site = draw(st.sampled_from(list(spec.sites())))
    handle = st.sampled_from([*READY * 6, HALF, BAD, DROPPED, UNKNOWN, 2**31 - 1])
    experts = spec.experts_at(site)
    expert = st.integers(0, experts - 1) if draw(st.booleans()) else st.integers(experts // 2, experts - 1)
    named = draw(st.lists(st.tuples(handle, expert, st.integers(1, 9)), max_size=70))
    if draw(st.booleans()):
        named = sorted(named)
    ends = np.cumsum([0, *(size for _, _, size in named)])
    return site, [(h, e, int(first), size) for (h, e, size), first in zip(named, ends, strict=False)]


@settings(max_examples=100, deadline=None)
@given(step=steps())
def test_the_gathered_table_is_that_of_the_obvious_loop(step, store):
    site, segments = step

    def at_once():
        table_S4, max_rank = store.gather(site, np.array(segments, np.int32).reshape(-1, 4), "step 5")
        assert table_S4.dtype == np.int32 and table_S4.flags.c_contiguous
        return table_S4.tolist(), max_rank

    assert outcome(at_once) == outcome(lambda: one_by_one(store, site, segments))


@settings(max_examples=100, deadline=None)
@given(steps=st.lists(st.tuples(st.sampled_from(["add", "put", "drop"]), st.integers(0, 3)), max_size=40))
def test_a_directory_says_what_was_put_last(steps):
    spec, held, number = spec_of("mixtral"), {}, 0
    directory = BlockDirectory(spec)
    for what, key in steps:
        if what == "add" and key not in held:
            held[key] = directory.allocate(key), {}
        elif what == "put" and key in held:
            number += 1
            site, (place, said) = Site(number % 4, "down"), held[key]
            entries = directory.absent(site)
            entries[1:3] = number, 7
            said[site] = number
            directory.put(place, {site: entries})
        elif what == "drop" and key in held:
            directory.hide(key)
            directory.deallocate(held.pop(key)[0])
    places = [place for place, _ in held.values()]
    assert len({*places, EMPTY_PLACE}) == len(places) + 1
    unknown = [handle for handle in (0, 1, 2, 3, 4, 1000, 2**31 - 1) if handle not in held]
    for site in spec.sites(["down"]):
        asked = np.array([*held, *unknown], np.int32)
        inside, outside = (directory.gather(site, asked, np.full_like(asked, expert)).tolist() for expert in (2, 3))
        said_there = [said.get(site) for _, said in held.values()] + [None] * len(unknown)
        assert inside == [[ABSENT] * 2 if number is None else [number, 7] for number in said_there]
        assert outside == [[ABSENT] * 2] * len(asked)


# -- while adapters come and go


def tiles_at(store, row, first_tile, count):
    """What a kernel would read, by addresses alone."""
    pages = ctypes.cast(int(store.tier.rows.table._rows[row]["pages"]), ctypes.POINTER(ctypes.c_int64))
    found = b""
    for at in range(first_tile, first_tile + count):
        page, tile = divmod(at, PAGE_TILES)
        found += ctypes.string_at(pages[page] + tile * TILE_BYTES, TILE_BYTES)
    return found


def packed_pages(site, resident):
    """Bytes of each expert's block as they must lie in the pages."""
    spec, blocks = spec_of("mixtral"), [segment.block for segment in resident]
    shapes = [shape_of(block, spec.in_width(site), spec.out_width(site)) for block in blocks]
    return [pack(block, shape, DTYPE).numpy().tobytes() for block, shape in zip(blocks, shapes, strict=True)]


def coming_and_going(store, paths, stop):
    while not stop.is_set():
        for path in paths:
            assert load(store, 1, path).result() is None
            store.adapters.drop(1)


@pytest.mark.parametrize("kind", ["paged", "resident"])
def test_a_step_has_all_of_an_adapter_or_none_of_it_while_it_is_dropped_and_loaded(kind, tiny_adapters):
    """Two adapters take turns under one handle: never a mixture, never pages of the past, never a silent zero."""
    placement, names = Placement(spec_of("mixtral"), Layout.parse("ep1-pp1")), ("all", "bf16")
    resident = cpu_store(placement, 0, DTYPE)
    store = paged_store(placement, 0, DTYPE, PagePool(2, "cpu")) if kind == "paged" else resident
    experts, expected = range(EXPERTS), []
    segments = np.array([(1, expert, i, 1) for i, expert in enumerate(experts)], np.int32)
    for handle, name in enumerate(names, start=10):
        assert load(resident, handle, tiny_adapters[name]).result() is None
        expected.append(packed_pages(GATE_UP, gather(resident, GATE_UP, *((handle, e) for e in experts))))
    counts = [len(block) // TILE_BYTES for block in expected[0]]
    assert expected[0] != expected[1] and all(counts)
    stop, served, refused, rounds = threading.Event(), set(), 0, 0
    other = threading.Thread(target=coming_and_going, args=(store, [tiny_adapters[name] for name in names], stop))
    other.start()
    until = time.monotonic() + SECONDS
    while (len(served) < 2 or not refused or rounds < 200) and time.monotonic() < until:
        rounds += 1
        with pinned(store, [1], GATE_UP.layer) as there:
            try:
                found = store.gather(GATE_UP, segments, "a test") if there else None
            except UnknownAdapterError:
                refused += 1
                continue
            if found is None:
                refused += 1
                continue
            if kind == "paged":
                got = [tiles_at(store, *at, n) for at, n in zip(found.table_S4[:, :2].tolist(), counts, strict=True)]
            else:
                got = packed_pages(GATE_UP, found)
        served.add(expected.index(got))
    stop.set()
    other.join(SECONDS)
    for each in {store, resident}:
        each.close()
    assert served == {0, 1} and refused
