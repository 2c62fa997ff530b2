"""Devices at both ends: shards that compute on one, and engines that route and put on one, against the host's.

Without a GPU the device is this CPU and the kernels are the emulated ones: what is tested is everything
around the GPU, not the GPU. Tests marked `cuda` do the same on a real one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from client_connector.transformers import attach
from kernels_cuda.heuristics import Variant
from kernels_cuda.launch import max_rank_of
from kernels_cuda.layout import PAGE_BYTES, shape_of, unpack
from kernels_cuda.ops import NOTHING
from kernels_cuda.sizes import PAGE_TILES, TILE_BYTES
from lora_server.daemon import backends
from lora_server.daemon.backends import MemorySettings
from lora_server.demo import tiny
from lora_server.demo.engine import generate, pad
from lora_server.demo.inproc import InprocServer
from lora_server.errors import AdapterError, AdapterLoadError, ConfigError, ProtocolError
from lora_server.memory.entry import LayerState
from lora_server.memory.paged import PagedTier
from lora_server.memory.pages import PagePool
from lora_server.placement import Layout, Placement
from lora_server.shard.compute import DeviceLostError
from lora_server.transport.shm import ShmLink
from lora_server.units import Size
from lora_server.wire import slot
from lora_server.wire.slot import RequestHeader
from tests.support.gpu import emulated
from tests.support.gpu.emulated_link import EmulatedServer, emulated_link
from tests.support.rig import Client
from tests.support.stores import cpu_store, gather, load, paged_store
from tests.support.workload import NEW_TOKENS, spec_of, workload

SMALL = Variant(bulk_copy=True, warps=2)
DTYPE = torch.bfloat16


def paged_of(num_pages, layout="ep1-pp1", shard=0):
    """Make a store in the pages of a device."""
    placement = Placement(spec_of("mixtral"), Layout.parse(layout))
    return paged_store(placement, shard, DTYPE, PagePool(num_pages, "cpu"))


def stored(store, handle, first_tile, shape):
    """The block that lies in the pages, read back through the page table."""
    tiles, tier, extent = [], store.tier, store._table.entries[handle].copies.device
    for at in range(first_tile, first_tile + shape.num_tiles):
        page, tile = divmod(at, PAGE_TILES)
        address = tier.pool.memory.data_ptr() + extent.pages[page] * PAGE_BYTES
        assert int(tier._published[handle].page_table[page]) == address
        tiles.append(tier.pool.memory[extent.pages[page], tile * TILE_BYTES : (tile + 1) * TILE_BYTES])
    return unpack(torch.stack(tiles), shape, DTYPE)


@pytest.mark.parametrize("name", ["all", "down", "bf16"])
def test_pages_hold_what_the_resident_store_holds(tiny_adapters, name):
    paged = paged_of(40, "ep2-pp1", shard=1)
    resident = cpu_store(paged.tier._placement, 1, DTYPE)
    for store in (paged, resident):
        assert load(store, 3, tiny_adapters[name]).result() is None
    spec = spec_of("mixtral")
    for site in spec.sites():
        for expert in paged.tier._placement.experts(site, 1):
            (segment,), packed = gather(resident, site, (3, expert)), gather(paged, site, (3, expert))
            expected, (row, first_tile, first, num_entries) = segment.block, packed.table_S4[0].tolist()
            assert (first, num_entries) == (0, 1)
            if expected is NOTHING:
                empty = paged.tier.rows.empty(paged.tier.format.shape(site, ()))
                assert (row, first_tile, packed.max_rank) == (empty, 0, 0)
                continue
            assert packed.max_rank == max_rank_of([pair.a_RK.shape[0] for pair in expected.pairs])
            shape = shape_of(expected, spec.in_width(site), spec.out_width(site))
            got = stored(paged, 3, first_tile, shape)
            for a, b in zip(got.pairs, expected.pairs, strict=True):
                assert torch.equal(a.a_RK, b.a_RK) and torch.equal(a.b_OR, b.b_OR) and a[2:] == b[2:]
    paged.report.check_integrity()
    paged.adapters.drop(3)
    assert paged.report.use().weight_bytes == 0
    paged.report.check_integrity()
    paged.close(), resident.close()


@settings(max_examples=15, deadline=None)
@given(steps=st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=14))
def test_no_page_is_lost_or_held_twice(steps, tiny_adapters):
    """Where an adapter finds no page, another makes room."""
    paths = [tiny_adapters[name] for name in ("all", "down", "bf16")]
    paged = paged_of(2)  # an adapter takes one
    known = set()
    for add, handle in steps:
        if add:
            assert load(paged, handle, paths[handle % 3]).result() is None
            known.add(handle)
        else:
            paged.adapters.drop(handle)
            known.discard(handle)
        paged.report.check_integrity()
        held = [one for one in known if paged.report.layers_ready(one)]
        assert paged.report.use().weight_bytes == len(held) * PAGE_BYTES and len(held) <= 2
    paged.close()
    assert paged.report.use().weight_bytes == 0


def test_an_adapter_that_no_pool_holds_fails_alone(tiny_adapters, tmp_path):
    wide = tmp_path / "wide"
    tiny.make_adapter(tiny.make_model("mixtral"), wide, lora_rank=64, targets="all", seed=1)
    paged = paged_of(1)
    assert load(paged, 1, tiny_adapters["all"]).result() is None
    error = load(paged, 2, wide).result()
    assert isinstance(error, AdapterLoadError) and "--device-pool" in str(error)
    assert paged.report.state(1, 0) is LayerState.READY and paged.report.state(2, 0) is LayerState.FAILED
    paged.close()


def test_what_a_gpu_cannot_serve_is_refused_at_the_start():
    placement = Placement(spec_of("mixtral"), Layout.parse("ep1-pp1"))
    with pytest.raises(ConfigError, match="float32, expected bfloat16 or float16"):
        PagedTier(placement, 0, torch.float32, PagePool(1, "cpu"))
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="torch sees no NVIDIA GPU"):
            cuda_backend(placement, 0, DTYPE)


def emulated_backend(placement, shard, dtype):
    launch = functools.partial(emulated.launch, variant=SMALL)
    return backends.paged(placement, shard, dtype, PagePool(8, "cpu"), launch, 24)


def cuda_backend(placement, shard, dtype):
    memory = MemorySettings(device_pool=Size.parse("256MiB"), sharing=4, local_index=shard)
    return backends.cuda(placement, shard, dtype, 24, memory)


BACKENDS = [
    pytest.param(emulated_backend, marks=pytest.mark.emulator, id="emulated"),
    pytest.param(cuda_backend, marks=pytest.mark.cuda, id="cuda"),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["ep1-pp1", "ep2-pp2"])
def test_an_engine_gets_the_deltas_that_host_shards_give(backend, layout):
    """Measured against exact arithmetic, a device is as far off as the host is: both round to bf16 alike.

    Every token goes to all experts: rounding flips no choice.
    """
    load = workload("mixtral")
    ids, mask = pad(load.batch, 0)

    def logits(dtype, make):
        model = tiny.make_model("mixtral", dtype=dtype, num_experts_per_tok=load.spec.experts)
        spec = dataclasses.replace(load.spec, top_k=load.spec.experts)
        server = InprocServer(spec, load.paths, layout=layout, dtype=dtype, max_step_rows=24, make_backend=make)
        with attach(model, server) as lora, lora.adapters(load.names):
            answer = model(ids, attention_mask=mask).logits[:, -1].float()
        server.close()
        return answer

    exact = logits(torch.float32, backends.host)
    by_host, by_device = [(logits(DTYPE, make) - exact).abs().mean() for make in (backends.host, backend)]
    assert by_device <= 1.5 * by_host + 1e-3


@contextlib.contextmanager
def one_client(path, make_backend):
    """Of a server of one shard, with an adapter."""
    server = InprocServer(spec_of("mixtral"), {}, dtype=DTYPE, max_step_rows=24, make_backend=make_backend)
    (shard,) = server.shards
    assert load(shard.store, 7, path).result() is None
    yield Client(shard, 1)
    server.close()


@pytest.mark.emulator
def test_rows_of_another_dtype_are_refused(tiny_adapters, quiet):
    reason = r"got torch.float32 rows, expected torch.bfloat16; run the engine in it"
    with one_client(tiny_adapters["all"], emulated_backend) as client, pytest.raises(ProtocolError, match=reason):
        client.send(client.request())


@pytest.mark.emulator
@pytest.mark.parametrize("lost", [False, True])
def test_only_a_lost_device_ends_the_shard(lost, tiny_adapters, quiet):
    """An error of one step is that step's answer."""

    def backend(placement, shard, dtype):
        broken = iter([True])

        def launch(step, out, workspace):
            if next(broken, False):
                raise RuntimeError("no such shape")
            emulated.launch(step, out, workspace, SMALL)

        return backends.paged(placement, shard, dtype, PagePool(8, "cpu"), launch, 24, lost=lambda: lost)

    with one_client(tiny_adapters["all"], backend) as client:
        with pytest.raises(DeviceLostError if lost else ProtocolError, match="no such shape"):
            client.send(bfloat16(client))
        if not lost:
            client.send(bfloat16(client))


def bfloat16(client):
    """A request whose rows have 16 bits: the same bytes, so more rows' worth than needed."""
    memory = memoryview(client.request(dtype=1))
    header = RequestHeader.unpack_from(memory)
    rows = header.num_rows * (header.in_end - header.in_begin) * 2
    at = slot.request_offsets(header.num_segments, header.num_entries, header.flags, rows)
    header._replace(payload_bytes=at.end - slot.HEADER_BYTES).pack_into(memory)
    return memory[: at.end]


def test_a_pool_counts_its_pages():
    pool = PagePool(3, "cpu")
    extents = [pool.allocate(PAGE_BYTES + 1), pool.allocate(1)]
    assert sorted(page for extent in extents for page in extent.pages) == [0, 1, 2] and not pool.can_allocate(1)
    assert all(address % 512 == 0 for extent in extents for address in extent.addresses())
    assert pool.memory.nbytes == pool.capacity == pool.used == 3 * PAGE_BYTES
    with pytest.raises(MemoryError, match="1 pages of 2 MiB asked for, 0 of 3 free"):
        pool.allocate(1)
    pool.deallocate(extents[1])
    pool.check_integrity(extents[:1])
    with pytest.raises(AssertionError, match="1 free and 0 held"):
        pool.check_integrity([])


# -- an engine on a device, from attach to shards: routed and put by kernels

SHORT = {"mixtral": "ep3-pp2", "qwen3_moe": "ep1-pp1", "gpt_oss": "ep1-pp1", "llama": "ep3-pp2"}
SERVED = [
    pytest.param(kind, layout, marks=() if SHORT[kind] == layout else pytest.mark.long)
    for kind in tiny.KINDS
    for layout in ("ep1-pp1", "ep3-pp2")
]


@pytest.mark.emulator
@pytest.mark.parametrize(("kind", "layout"), SERVED)
def test_tokens_equal_peft(kind, layout, tmp_path):
    """Rows in the slots, prompts in several chunks, and more of them than a lane has slots."""
    load = workload(kind)
    server = EmulatedServer(tmp_path, load.spec, load.paths, mirror="no", layout=layout, max_step_rows=24, slots=2)
    with attach(load.model, server) as lora, lora.adapters(load.names):
        assert lora.client.lanes.takes(torch.device("cpu"))
        load.check(generate(load.model, load.batch, NEW_TOKENS))
    server.close()


@pytest.mark.emulator
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_the_device_routes_as_the_host_does(kind, tmp_path):
    """To the bit: the same entries in the same order, whoever sorted them, and wherever rows lie."""
    load = workload(kind)
    model = tiny.make_model(kind, dtype=torch.bfloat16)
    logits = logits_by_server(load, model, pad(load.batch, 0), tmp_path)
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])


def logits_by_server(load, model, tokens, directory, wire="exact"):
    """Of a model whose rows a host routes, and of one whose device does, with rows in slots and in device memory."""
    options = {"layout": "ep2-pp2", "dtype": torch.bfloat16, "max_step_rows": 512, "wire": wire}
    servers = [InprocServer(load.spec, load.paths, **options)]
    for mirror in ("no", "must"):
        (directory / mirror).mkdir()
        servers.append(EmulatedServer(directory / mirror, load.spec, load.paths, mirror=mirror, **options))
    (ids, mask), logits = tokens, []
    for server in servers:
        with attach(model, server) as lora, lora.adapters(load.names):
            assert lora.client.described()["wire"] == wire
            logits.append(model(ids, attention_mask=mask).logits)
        server.close()
    return logits


@pytest.mark.emulator
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_codes_go_to_the_device_as_a_host_makes_them(dtype, tmp_path):
    """To the bit, with routes of the device's, wherever rows lie; engines of two dtypes, since the wire has one."""
    load = workload("mixtral")
    model, (ids, mask) = tiny.make_model("mixtral", dtype=dtype), pad(load.batch, 0)
    logits = logits_by_server(load, model, (ids, mask), tmp_path, wire="e4m3")
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])
    assert not torch.equal(logits[0], model(ids, attention_mask=mask).logits)


@pytest.mark.emulator
def test_times_and_failures_are_told_as_on_the_host(tmp_path):
    load = workload("mixtral")
    server = EmulatedServer(tmp_path, load.spec, load.paths, mirror="no", layout="ep2-pp1")
    seen = []
    ids, mask = pad(load.batch, 0)
    with attach(load.model, server) as lora:
        lora.observe(seen.append)
        with lora.adapters(load.names):
            load.model(ids, attention_mask=mask)
        rows = int(mask.sum()) - sum(len(one.prompt) for one in load.batch if one.adapter is None)
        by_site = {}
        for times in seen:
            by_site[times.site] = by_site.get(times.site, 0) + times.entries
            assert times.pushed_ns <= times.received_ns <= times.started_ns <= times.done_ns <= times.arrived_ns
        experts = [count for site, count in by_site.items() if site.projection == "gate_up"]
        assert experts and all(0 < count <= 2 * rows for count in experts)
        with lora.adapters(["fused"]):
            for shard in server.shards:
                shard.store.adapters.drop(server.held["fused"].handle)
            with pytest.raises(AdapterError):
                load.model(ids[:1], attention_mask=mask[:1])
    server.close()


@pytest.mark.emulator
def test_links_of_both_kinds_are_given_the_hosts_rows(tmp_path):
    """One shard near and one far: nothing is routed here, and the near one's link still puts what it is given."""
    load = workload("mixtral")

    class Mixed(EmulatedServer):
        def connect(self, hello):
            near, far = self.listeners
            link = emulated_link(near.address, hello, 0, mirror="no")
            return [link, ShmLink(far.address, hello, 1)]

    server = Mixed(tmp_path, load.spec, load.paths, mirror="no", layout="ep2-pp1", max_step_rows=24)
    with attach(load.model, server) as lora, lora.adapters(load.names):
        assert not lora.client.lanes.takes(torch.device("cpu"))
        load.check(generate(load.model, load.batch, NEW_TOKENS))
    server.close()
