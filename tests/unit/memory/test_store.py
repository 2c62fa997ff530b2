"""The weight store on real adapter files: READY per layer, drops, failures, bytes, and loads after an eviction."""

import json
import os
import shutil
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

from lora_server.adapters import WEIGHTS, open_adapter
from lora_server.demo import tiny
from lora_server.errors import AdapterError, AdapterLoadError, LoraServerError, ProtocolError, UnknownAdapterError
from lora_server.memory.entry import LayerState, Source
from lora_server.placement import Layout
from lora_server.spec import Site
from tests.support.serving import until
from tests.support.stores import SECONDS, Done, bytes_of, flip_last, gather, load, reads, source_of
from tests.support.workload import spec_of


@pytest.fixture
def store(make_store, gate):
    return make_store(on_layer=gate)


def pairs(store, handle, site, expert):
    (segment,) = gather(store, site, (handle, expert))
    return segment.block.pairs


def states(store, handle):
    return [store.report.state(handle, layer).value for layer in range(4)]


def blocked(store, gate, path):
    """The loader stands after layer 0 of handle 1, so that what is queued next is known."""
    gate.shut()
    done = load(store, 1, path)
    assert gate.arrived.wait(SECONDS)
    return done


def test_layers_become_ready_one_by_one_and_are_read_once_for_all_who_ask(store, gate, tiny_adapters):
    assert states(store, 1) == ["unknown"] * 4
    first = blocked(store, gate, tiny_adapters["all"])
    assert states(store, 1) == ["ready", "loading", "loading", "loading"]
    assert len(pairs(store, 1, Site(0, "gate_up"), 3)) == 1
    before = store.report.use().weight_bytes
    assert before > 0, "memory is taken for all of it at once"
    second = load(store, 1, tiny_adapters["all"])
    assert not first.calls and not second.calls
    gate.open()
    assert first.result() is None and second.result() is None and states(store, 1) == ["ready"] * 4
    assert load(store, 1, tiny_adapters["all"]).result() is None
    assert gate.loaded == [(1, left) for left in (3, 2, 1, 0)]
    assert store.report.use().weight_bytes == before and store.report.use().loads == 1
    store.report.check_integrity()


def test_the_first_step_of_an_adapter_unpacks_experts_alone(store, tiny_adapters):
    """The loader has unpacked dense sites: a pass has a step at each, and would take longer for the first time."""
    assert load(store, 1, tiny_adapters["all"]).result() is None
    unpack, unpacked = store.tier.format.unpack, []
    store.tier.format.unpack = lambda *block: (unpacked.append(block), unpack(*block))[1]
    for _ in range(2):
        assert pairs(store, 1, Site(0, "qkv"), 0) and pairs(store, 1, Site(0, "down"), 0)
    assert len(unpacked) == 1


@pytest.mark.parametrize("when", ["while it waits", "while it is read", "between two layers"])
def test_a_drop_stops_a_load_and_says_so(when, store, gate, tiny_adapters):
    """`done` is called once whatever happens, and the files are closed."""
    other = blocked(store, gate, tiny_adapters["all"])
    descriptors = psutil.Process().num_fds()
    handle = 1 if when == "while it is read" else 2
    done = other if handle == 1 else load(store, 2, tiny_adapters["down"])
    if when == "between two layers":
        store.prefetch([2], "a client", time.monotonic() + SECONDS)
        gate.then = lambda handle, left: store.adapters.drop(2) if (handle, left) == (2, 3) else None
    else:
        store.adapters.drop(handle)
        assert states(store, handle) == ["unknown"] * 4
    gate.open()
    error = done.result()
    assert isinstance(error, AdapterLoadError) and f"handle {handle}" in str(error)
    assert states(store, handle) == ["unknown"] * 4
    assert load(store, 3, tiny_adapters["down"]).result() is None, "the loader goes on"
    if handle != 1:
        assert other.result() is None
    until(lambda: psutil.Process().num_fds() < descriptors, "the adapter's files to be closed")
    for one in (1, 2, 3):
        store.adapters.drop(one)
    assert store.report.use().weight_bytes == 0
    with pytest.raises(UnknownAdapterError, match=f"handle {handle}"):
        gather(store, Site(0, "down"), (handle, 0))


def test_a_dropped_handle_can_be_loaded_again(store, gate, tiny_adapters):
    first = blocked(store, gate, tiny_adapters["all"])
    store.adapters.drop(1)
    second = load(store, 1, tiny_adapters["down"])
    gate.open()
    assert isinstance(first.result(), AdapterLoadError) and second.result() is None
    assert states(store, 1) == ["ready"] * 4
    assert not pairs(store, 1, Site(0, "gate_up"), 0) and pairs(store, 1, Site(0, "down"), 0)


DAMAGES = {
    "missing": Path.unlink,
    "truncated": lambda file: os.truncate(file, file.stat().st_size // 2),
    "not safetensors": lambda file: file.write_bytes(b"\xff" * 4096),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_bad_file_fails_its_own_adapter_only(damage, store, tiny_adapters, tmp_path):
    directory = shutil.copytree(tiny_adapters["all"], tmp_path / "bad")
    DAMAGES[damage](directory / WEIGHTS)
    bad, good = load(store, 1, directory), load(store, 2, tiny_adapters["down"])
    error = bad.result()
    assert isinstance(error, AdapterError) and str(directory) in str(error)
    assert states(store, 1) == ["failed"] * 4 and store.report.error(1) is error
    assert load(store, 1, directory).result() is error
    assert good.result() is None and states(store, 2) == ["ready"] * 4
    store.adapters.drop(1)
    assert states(store, 1) == ["unknown"] * 4 and isinstance(store.report.error(1), LoraServerError)
    assert load(store, 1, tiny_adapters["down"]).result() is None, "mended files load"


def test_a_file_cut_short_while_it_loads_fails_the_layers_that_are_left(store, gate, tiny_adapters, tmp_path):
    directory = shutil.copytree(tiny_adapters["all"], tmp_path / "cut")
    done = blocked(store, gate, directory)
    os.truncate(directory / "adapter_model.safetensors", 20_000)
    gate.open()
    assert "end of the file" in str(done.result())
    assert states(store, 1)[0] == "ready" and states(store, 1)[3] == "failed"


@pytest.mark.parametrize("how", ["overwritten", "replaced", "a link", "another directory"])
def test_files_that_are_changed_while_they_load_mix_no_two_versions(how, store, gate, tmp_path):
    """Open files are read on where others come in their place; files written to fail the layers that are left."""
    model, one, other = tiny.make_model("mixtral"), tmp_path / "one", tmp_path / "other"
    for seed, path in enumerate((one, other)):
        tiny.make_adapter(model, path, lora_rank=4, seed=seed, targets="all")
    with open_adapter(one, spec_of("mixtral")) as adapter:
        right = [adapter.read(Site(layer, "qkv"), 0) for layer in range(4)]
    done, name = blocked(store, gate, one), "adapter_model.safetensors"
    if how == "overwritten":
        (one / name).write_bytes((other / name).read_bytes())
    elif how == "another directory":
        one.rename(tmp_path / "old")
        other.rename(one)
    else:
        new = tmp_path / "new"
        new.symlink_to(other / name) if how == "a link" else shutil.copyfile(other / name, new)
        new.replace(one / name)
    gate.open()
    error, ready = done.result(), [state == "ready" for state in states(store, 1)]
    assert ready == ([True, False, False, False] if how == "overwritten" else [True] * 4)
    assert (isinstance(error, AdapterError) and "changed while" in str(error)) == (how == "overwritten")
    for layer in [layer for layer in range(4) if ready[layer]]:
        for pair, (_, a, b) in zip(pairs(store, 1, Site(layer, "qkv"), 0), right[layer], strict=True):
            assert torch.equal(pair.a_RK, a.float()) and torch.equal(pair.b_OR, b.float())


def owned(stores, site, expert):
    """The weights at every shard that does not refuse to know them."""
    for store in stores:
        try:
            yield pairs(store, 1, site, expert)
        except ProtocolError as error:
            assert "placements differ" in str(error)


@pytest.mark.parametrize("layout", ["ep1-pp1", "ep4-pp1", "ep2-pp2", "ep3-pp2", "ep1-pp4", "ep9-pp5"])
def test_every_tensor_has_one_owner_and_every_byte_is_counted(layout, make_store, tiny_adapters):
    shards = range(Layout.parse(layout).num_shards)
    for dtype, names in {torch.float32: ["all", "down", "shared-outer"], torch.bfloat16: ["bf16"]}.items():
        stores = [make_store(layout=layout, shard=shard, dtype=dtype) for shard in shards]
        for name in names:
            assert all(done.result() is None for done in [load(store, 1, tiny_adapters[name]) for store in stores])
            check_owners(stores, tiny_adapters[name], dtype)
            for store in stores:
                store.adapters.drop(1)
        assert all(store.report.use().weight_bytes == 0 for store in stores)


def check_owners(stores, path, dtype):
    spec = spec_of("mixtral")
    with open_adapter(path, spec) as adapter:
        weights = [store._table.entries[1].footprint.nbytes for store in stores]
        parts = sum(len(adapter.parts(site, expert)) for site in adapter.sites() for expert in adapter.experts(site))
        assert adapter.nbytes <= sum(weights) <= adapter.nbytes + 64 * 2 * parts, "each matrix is aligned"
        for store, nbytes in zip(stores, weights, strict=True):
            assert store.report.use().weight_bytes == store.tier.pool.size_of(nbytes)
        for site in spec.sites():
            for expert in range(spec.experts_at(site)):
                (held,) = owned(stores, site, expert)
                for pair, (of_file, a, b) in zip(held, adapter.read(site, expert), strict=True):
                    assert torch.equal(pair.a_RK, a.to(dtype)) and torch.equal(pair.b_OR, b.to(dtype))
                    assert (pair.scale, pair.out_begin) == (of_file.scale, of_file.out_begin)
    foreign = [(store, layer) for store in stores for layer in range(4) if layer not in store._table.layers]
    there = [store.report.state(1, layer) is LayerState.READY for store, layer in foreign]
    assert all(there), "there is nothing to wait for"


def test_close_stops_a_load_and_frees_everything(store, gate, tiny_adapters):
    done = blocked(store, gate, tiny_adapters["all"])
    waiting = load(store, 2, tiny_adapters["down"])
    closer = threading.Thread(target=store.close)
    closer.start()
    until(store._loader.closing.is_set, "the end to begin")
    gate.open()
    closer.join(SECONDS)
    assert not closer.is_alive() and store.report.use().weight_bytes == 0
    assert isinstance(done.result(), AdapterLoadError) and isinstance(waiting.result(), AdapterLoadError)
    assert states(store, 1) == states(store, 2) == ["unknown"] * 4
    assert not store._loader._thread.is_alive()


def test_what_takes_a_known_size_is_not_looked_at_before_it_comes_in(make_store, tiny_adapters, tmp_path):
    """As a shard that was restarted is told: of 5,000 adapters it opens those that it has room for."""
    size, source = bytes_of(tiny_adapters["all"]), source_of(tiny_adapters["all"])
    nowhere, store = Source(tmp_path / "gone", source.version, source.stamp), make_store(size)
    for handle, one in ((1, source), (2, nowhere), (3, source)):
        done = Done(store)
        store.adapters.load(handle, one, done, False, size)
        assert done.calls == [None], "at once"
    brought = [Done(store), Done(store), Done(store)]
    for handle, done in enumerate(brought, start=1):
        store.adapters.prewarm(handle, done)
    assert brought[1].calls == brought[2].calls == [None], "nothing is evicted"
    assert brought[0].result() is None and states(store, 1) == ["ready"] * 4
    assert states(store, 2) == states(store, 3) == ["on disk"] * 4
    changes = {(one.handle, one.nbytes, one.measured) for one in store.report.take_changes()}
    assert changes == {(handle, size, True) for handle in (1, 2, 3)}
    store.report.check_integrity()
    asked = Done(store)
    store.adapters.load(2, nowhere, asked, True)
    assert "no file" in str(asked.result()).lower() or "none at this path" in str(asked.result())


def test_a_size_that_is_wrong_is_found_out(store, tiny_adapters):
    done, source = Done(store), source_of(tiny_adapters["all"])
    store.adapters.load(1, source, done, True, 1)
    assert "said to take less" in str(done.result())
    until(lambda: load(store, 1, tiny_adapters["all"]).result() is None, "the next time it is known")
    assert states(store, 1) == ["ready"] * 4
    store.report.check_integrity()


QKV = Site(0, "qkv")


@pytest.fixture
def adapters(tmp_path):
    """Two of one outline, and one of another."""
    model = tiny.make_model("mixtral")
    for name, rank in (("one", 4), ("other", 4), ("third", 2)):
        tiny.make_adapter(model, tmp_path / name, lora_rank=rank, seed=rank, targets="all")
    return tmp_path


@pytest.fixture
def make(adapters, make_store):
    """Make a store with room for one adapter of three; all of them were looked at."""

    def make_one(**options):
        capacity = round((adapters / "one" / "adapter_model.safetensors").stat().st_size * 1.4)
        made = make_store(capacity, **options)
        for handle, name in enumerate(("one", "other", "third"), start=1):
            assert load(made, handle, adapters / name, eager=False).result() is None
        return made

    return make_one


@pytest.fixture
def cold(make):
    return make()


def bring(store, handle):
    """As a loop does it; whether its first layer came, or failed."""
    reads(store, handle)
    until(lambda: not store.missing([handle], 0), f"handle {handle}")
    store.forget("a step")
    return store.report.state(handle, 0)


def come_back(store):
    """Evict the first adapter by loading the second, and load it again."""
    assert bring(store, 2) is LayerState.READY
    until(lambda: store.report.state(1, 0) is LayerState.DISK, "eviction")
    return bring(store, 1)


def test_a_cold_load_reads_no_header(cold, adapters):
    """What was learnt when they were read first still stands for them."""
    with open_adapter(adapters / "one", spec_of("mixtral")) as adapter:
        right = adapter.read(QKV, 0)
    before = cold._table.entries[1].footprint.files
    assert come_back(cold) is LayerState.READY
    assert cold._table.entries[1].footprint.files is before
    (segment,) = gather(cold, QKV, (1, 0))
    for pair, (part, a, b) in zip(segment.block.pairs, right, strict=True):
        assert (pair.scale, pair.out_begin) == (part.scale, part.out_begin)
        assert torch.equal(pair.a_RK, a.float()) and torch.equal(pair.b_OR, b.float())


@pytest.mark.parametrize("change", ["weights", "weights of the same time", "config", "another directory"])
def test_changed_content_is_refused(change, cold, adapters):
    one = adapters / "one"
    config = one / "adapter_config.json"
    if change.startswith("weights"):
        flip_last(one / WEIGHTS, keeps_time=change != "weights")
    elif change == "config":
        config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": 1234}))
    else:
        shutil.rmtree(one)
        (adapters / "third").rename(one)
    assert come_back(cold) is LayerState.FAILED
    assert isinstance(cold.report.error(1), AdapterLoadError) and "content changed" in str(cold.report.error(1))


def test_touched_files_of_the_same_content_are_checked_again_and_loaded(cold, adapters):
    os.utime(adapters / "one" / "adapter_model.safetensors")
    before = cold._table.entries[1].footprint.files
    assert come_back(cold) is LayerState.READY
    assert cold._table.entries[1].footprint.files != before


def test_adapters_of_one_outline_share_a_cached_manifest_and_the_cache_is_bounded(make, adapters):
    kept = make()._loader._layers.manifests
    limit = kept.nbytes
    assert len(kept._kept) == 2 and 0 < limit < 20_000
    store = make(kept_bytes=limit)
    kept = store._loader._layers.manifests
    tiny.make_adapter(tiny.make_model("mixtral"), adapters / "fourth", lora_rank=3, seed=3, targets="all")
    assert load(store, 4, adapters / "fourth", eager=False).result() is None
    assert kept.get(store._table.entries[1].footprint.files.outline) is None
    assert 0 < kept.nbytes <= limit
    assert come_back(store) is LayerState.READY
