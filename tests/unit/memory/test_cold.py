"""An adapter that comes back: its files are opened, not parsed again, unless they were touched."""

import json
import os
import shutil

import pytest
import torch

from lora_server.adapters import open_adapter
from lora_server.demo import tiny
from lora_server.errors import AdapterLoadError
from lora_server.memory.entry import State
from lora_server.spec import Site
from tests.support.serving import until
from tests.support.stores import gather, load, reads
from tests.support.workload import spec_of

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
def store(make):
    return make()


def bring(store, handle):
    """As a loop does it; whether its first layer came, or failed."""
    reads(store, handle)
    until(lambda: store.missing([handle], 0) is None, f"handle {handle}")
    store.forget("a step")
    return store.state(handle, 0)


def come_back(store):
    """Evict the first adapter by loading the second, and load it again."""
    assert bring(store, 2) is State.READY
    until(lambda: store.state(1, 0) is State.DISK, "eviction")
    return bring(store, 1)


def test_a_cold_load_reads_no_header(store, adapters):
    """It is damaged where no stamp can see it, and the load does not notice."""
    file, config = adapters / "one" / "adapter_model.safetensors", adapters / "one" / "adapter_config.json"
    right = expected(adapters / "one")
    for touched in (file, config):
        status = touched.stat()
        with touched.open("r+b") as stream:
            stream.write(b"\xff" * 20)
        os.utime(touched, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert come_back(store) is State.READY
    (segment,) = gather(store, QKV, (1, 0))
    for pair, (part, a, b) in zip(segment.block.pairs, right, strict=True):
        assert (pair.scale, pair.out_begin) == (part.scale, part.out_begin)
        assert torch.equal(pair.a_RK, a.float()) and torch.equal(pair.b_OR, b.float())


def expected(path):
    with open_adapter(path, spec_of("mixtral")) as adapter:
        return adapter.read(QKV, 0)


@pytest.mark.parametrize("change", ["weights", "config", "another directory"])
def test_changed_content_is_refused(change, store, adapters):
    one = adapters / "one"
    if change == "weights":
        file = one / "adapter_model.safetensors"
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    elif change == "config":
        config = one / "adapter_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": 1234}))
    else:
        shutil.rmtree(one)
        (adapters / "third").rename(one)
    assert come_back(store) is State.FAILED
    assert isinstance(store.error(1), AdapterLoadError) and "content changed" in str(store.error(1))


def test_touched_files_of_the_same_content_are_checked_again_and_loaded(store, adapters):
    os.utime(adapters / "one" / "adapter_model.safetensors")
    before = store._entries[1].files
    assert come_back(store) is State.READY
    assert store._entries[1].files != before


def test_adapters_of_one_outline_share_a_cached_manifest_and_the_cache_is_bounded(make, adapters):
    kept = make()._loader.manifests
    assert len(kept._kept) == 2
    limit = kept.nbytes
    assert 0 < limit < 20_000
    store = make(kept_bytes=limit)
    kept = store._loader.manifests
    tiny.make_adapter(tiny.make_model("mixtral"), adapters / "fourth", lora_rank=3, seed=3, targets="all")
    assert load(store, 4, adapters / "fourth", eager=False).result() is None
    assert kept.get(store._entries[1].files.outline) is None
    assert 0 < kept.nbytes <= limit
    assert come_back(store) is State.READY
