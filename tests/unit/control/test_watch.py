"""A watched directory: messages, pins, partial copies, a lost directory; test_watch_any_order has all other orders."""

import os
import shutil

import pytest
from structlog.testing import capture_logs

from lora_server.adapters import validate_adapter
from lora_server.control.adapters.records import FIRST_HANDLE
from lora_server.control.reports.listing import page
from lora_server.control.reports.status import status
from lora_server.errors import AdapterLoadError, UnknownAdapterError
from lora_server.registry.versions import Ledger
from tests.support.followed import SETTLE, Followed, make_contents
from tests.support.serving import until
from tests.support.workload import spec_of


@pytest.fixture(scope="module")
def contents(tmp_path_factory, tiny_adapters):
    return make_contents(tmp_path_factory.mktemp("contents"), {"v1": tiny_adapters["all"], "v2": tiny_adapters["down"]})


@pytest.fixture
def followed(tmp_path, contents):
    one = Followed(tmp_path, contents)
    yield one
    one.close()


def test_a_pin_belongs_to_the_name_and_survives_an_update_and_a_restart(followed):
    def pinned():
        kept = {load.handle: load.pinned for load in followed.shard.memory.loads.values()}
        assert kept == {one.record.handle: one.record.pinned for one in followed.adapters.listings.all()}
        return {one.record.name: one.record.pinned for one in followed.adapters.listings.all()}

    followed.settle(law="v1", code="v1")
    until(lambda: {one.state for one in followed.adapters.listings.all()} == {"ready"}, "no load is under way any more")
    followed.shard.failure = "it takes 5 bytes"
    with pytest.raises(AdapterLoadError, match="'law' was not pinned: it takes 5 bytes"):
        followed.adapters.rollout.pin("law", 10)
    followed.shard.failure = ""
    assert pinned() == {"law": False, "code": False} and followed.adapters.listings.get("law").error == ""
    followed.adapters.rollout.pin("law", 10)
    followed.settle(law="v2")
    until(lambda: followed.shard.memory.loads.keys() == {FIRST_HANDLE, FIRST_HANDLE + 2}, "the old one is dropped")
    assert followed.served() == {"law": "v2", "code": "v1"} and pinned() == {"law": True, "code": False}
    followed.restart()
    assert pinned() == {"law": True, "code": False}
    followed.adapters.rollout.unpin("law")
    assert pinned() == {"law": False, "code": False}
    with pytest.raises(UnknownAdapterError):
        followed.adapters.rollout.pin("nobody", 10)


@pytest.mark.parametrize("first", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_slow_copy_is_added_when_it_is_complete(followed, first):
    """A look after every chunk, each after a pause just too short to settle."""
    source, target = followed.contents["v1"], followed.directory / "law"
    target.mkdir()
    for file in sorted(source.glob("adapter_*"), key=lambda path: path.name != first):
        data = file.read_bytes()
        for end in range(0, len(data) + 1, max(1, len(data) // 7)):
            (target / f"{file.name}.part").write_bytes(data[:end])
            followed.look()
            followed.now += SETTLE - 0.1
        (target / f"{file.name}.part").write_bytes(data)
        (target / f"{file.name}.part").rename(target / file.name)
        followed.look()
        assert followed.adapters.listings.all() == [] and followed.refused() == {}
    followed.settle()
    assert followed.served() == {"law": "v1"}


def test_files_that_change_while_they_are_read_are_skipped(followed):
    followed.put("law", "v1")
    followed.put("bad", "dora")
    for name in ("law", "bad"):
        followed.adapters.directory.take(name, followed.directory / name, "another stamp")
    assert followed.served() == {} and followed.refused() == {}


@pytest.mark.parametrize("name", [".law", "law.tmp", "law.partial", "law~", "lost+found"])
def test_hidden_and_temporary_names_are_skipped(followed, name):
    followed.put(name, "v1")
    followed.settle()
    assert followed.adapters.listings.all() == [] and followed.refused() == {}
    (followed.directory / name).rename(followed.directory / "law")
    followed.settle()
    assert followed.served() == {"law": "v1"}


def test_a_name_that_is_not_utf_8_is_skipped_and_logged_once(followed):
    followed.settle(law="v1")
    followed.put(os.fsdecode(b"caf\xe9"), "v1")
    target = followed.directory.with_name(os.fsdecode(b"target-\xff"))
    shutil.copytree(followed.contents["v1"], target)
    (followed.directory / "link").symlink_to(target)
    with capture_logs() as lines:
        followed.settle()
        followed.settle()
    skipped = [line["name"] for line in lines if "not UTF-8; rename it" in line["event"]]
    assert skipped == ["caf\\xe9"] and followed.served() == {"law": "v1"}
    ((name, reason),) = followed.refused().items()
    assert name == "link" and "target-\\xff, expected a path of UTF-8" in reason
    everything = page(followed.adapters.listings, "")
    assert [one.name for one in everything.adapters] == ["law"] and status(followed.controller).SerializeToString()


def refusal_beside(followed, words):
    """What served before serves on, and says why the directory's content does not."""
    (listing,) = [one for one in followed.adapters.listings.all() if one.record.name == "law"]
    assert (listing.state, followed.kinds[listing.record.version]) == ("ready", "v1")
    assert words in listing.warnings[-1] and "serves on" in listing.warnings[-1]
    assert followed.refused()["law"] == listing.warnings[-1]
    return listing.record.handle


def test_a_refused_update_leaves_the_earlier_version_serving(followed):
    followed.settle(law="v1")
    until(lambda: followed.adapters.listings.get("law").state == "ready", "the shard has it")
    for kind, words in (("dora", "DoRA"), ("half", "no such file")):
        followed.settle(law=kind)
        handle = refusal_beside(followed, words)
    followed.shard.failure = "no room"
    followed.settle(law="v2")
    assert refusal_beside(followed, "no room") == handle, "a shard that cannot load it refuses it too"
    followed.delete("law")
    (followed.directory / "law").symlink_to("nowhere")
    followed.settle()
    assert refusal_beside(followed, "none at this path") == handle
    followed.shard.failure = ""
    followed.settle(law="v2")
    assert followed.served() == {"law": "v2"} and followed.refused() == {}


def test_adapters_added_or_removed_by_name_are_not_the_watchers(followed):
    """Until their files change; see test_watch_any_order for all the rest."""
    followed.adapters.rollout.register("mine", str(followed.contents["v1"]))
    for name in ("mine", "law"):
        followed.put(name, "v2")
    followed.settle()
    assert followed.served() == {"mine": "v1", "law": "v2"} and "by hand" in followed.refused()["mine"]
    followed.adapters.rollout.remove("law")
    followed.restart()
    followed.settle()
    with pytest.raises(UnknownAdapterError, match=r"was removed; .* when it changes"):
        followed.adapters.rollout.remove("law")
    followed.adapters.rollout.register("law", str(followed.directory / "law"))
    followed.settle()
    followed.settle(law="v1")
    assert followed.served() == {"mine": "v1", "law": "v1"}, "what was added from the directory is followed"


@pytest.mark.parametrize("how", ["gone", "unmounted"])
def test_a_lost_directory_removes_no_adapter(followed, how):
    followed.settle(law="v1")
    away = followed.directory.rename(followed.directory.parent / "away")
    if how == "unmounted":
        followed.directory.mkdir()
    with capture_logs() as lines:
        for _ in range(3):
            followed.settle()
        assert followed.served() == {"law": "v1"}
        if how == "unmounted":
            followed.directory.rmdir()
        away.rename(followed.directory)
        followed.settle()
    said = [line["event"] for line in lines]
    assert said == ["the followed directory is lost", "the followed directory is back"]
    followed.delete("law")
    followed.settle()
    assert followed.served() == {}, "the same directory, and empty: all were removed"


@pytest.mark.parametrize("require_all", [False, True])
def test_only_a_refusal_at_the_start_keeps_a_server_unready(tmp_path, contents, require_all):
    followed = Followed(tmp_path, contents, require_all_adapters=require_all)
    assert followed.controller.not_ready() == "registering adapters"
    followed.settle(bad="dora")
    assert ("'bad' was refused" in followed.controller.not_ready()) == require_all
    followed.restart()
    assert ("'bad' was refused" in followed.controller.not_ready()) == require_all
    followed.settle(bad="v1", later="dora")
    assert list(followed.refused()) == ["later"] and followed.controller.not_ready() == ""
    followed.close()


def test_the_next_server_reads_only_touched_files(tmp_path, contents, database, monkeypatch):
    """A whole restart, whose shards know nothing: by the stamps of the files. Pins are the ledger's."""
    read, looks, pinned_places = [], [], Ledger.pinned_places

    def note(path, spec):
        read.append(path.name)
        return validate_adapter(path, spec)

    monkeypatch.setattr("lora_server.control.adapters.directory.validate_adapter", note)
    monkeypatch.setattr(Ledger, "pinned_places", lambda ledger: looks.append(1) or pinned_places(ledger))
    followed = Followed(tmp_path, contents, ledger=Ledger(database, spec_of("mixtral").to_json()))
    for name in ("law", "code", "art", "bad"):
        followed.put(name, "dora" if name == "bad" else "v1")
    followed.settle()
    followed.adapters.rollout.pin("law", 60.0)
    followed.settle(art="v2")
    assert sorted(read) == ["art", "art", "bad", "code", "law"]
    followed.shard.close()
    followed.shard = None
    read.clear()
    looks.clear()
    followed.touch("code")
    followed.start()
    followed.settle()
    assert len(looks) == 2, "one for all adapters, and one for the record that is kept"
    assert sorted(read) == ["bad", "code"] and "DoRA" in followed.refused()["bad"]
    assert followed.served() == {"law": "v1", "code": "v1", "art": "v2"} and followed.first_done == 2
    assert [one.record.name for one in followed.adapters.listings.all() if one.record.pinned] == ["law"]
    followed.settle(law="v2")
    assert followed.served()["law"] == "v2" and followed.adapters.listings.get("law").record.pinned
    followed.close()
