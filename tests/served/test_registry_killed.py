"""A controller that is killed at each stage of an update: one version serves, whole, the one that was kept."""

import itertools

import pytest

from lora_server.errors import AdapterError, AdapterLoadError, LoraServerError
from tests.support.killed_controller import STAGES
from tests.support.restarts import SECONDS, Killed, Server, dies


@pytest.fixture
def server(tmp_path):
    one = Server(tmp_path)
    yield one
    one.close()


def said(server):
    """Beside an adapter, that its files do not."""
    (one,) = server.adapters.listings()
    return [why for why in one.warnings if why not in one.record.warnings]


@pytest.mark.parametrize(("method", "after", "new"), STAGES, ids=lambda value: str(value))
def test_a_controller_that_is_killed_in_an_update(server, monkeypatch, method, after, new):
    first = server.adapters.add("law", str(server.paths["fused"]), SECONDS)
    server.adapters.pin("law", SECONDS)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        dies(server, patch, server.adapters, method, after)
        server.adapters.update("law", str(server.paths["qv"]), SECONDS)
    server.kill()
    (record,) = [one.record for one in server.adapters.listings()]
    assert (record.version != first.version, record.pinned) == (new, True)
    assert set(server.shard.memory.loads) == {record.handle}, "and nothing is left of the other"
    assert [("did not end" in why, first.version[:12] in why) for why in said(server)] == [(True, True)] * (not new)
    updated = server.adapters.update("law", str(server.paths["attention"]), SECONDS)
    assert server.served() == {"law": updated.version} and updated.handle > record.handle
    assert not said(server)


def test_a_directorys_adapter_serves_on_when_its_update_by_hand_is_killed(server, monkeypatch):
    server.adapters.register_directory({"law": server.paths["fused"]})
    server.controller.arrivals.announce()
    before = server.served()
    with monkeypatch.context() as patch, pytest.raises(Killed):
        dies(server, patch, server.adapters, "_keep_replaced", False)
        server.adapters.update("law", str(server.paths["qv"]), SECONDS)
    server.kill()
    assert server.served() == before and server.adapters.registered.is_set()


def test_an_update_that_a_shard_cannot_load_changes_nothing_and_says_why(server):
    before = server.adapters.add("law", str(server.paths["fused"]), SECONDS)
    server.shard.failure = "no memory"
    with pytest.raises(AdapterLoadError, match=f"no memory; version {before.version[:12]} of adapter 'law' serves on"):
        server.adapters.update("law", str(server.paths["qv"]), SECONDS)
    server.shard.failure = ""
    assert server.served() == {"law": before.version}
    assert "no memory" in said(server)[0]
    server.kill()
    assert "no memory" in said(server)[0]
    assert server.served() == {"law": before.version}
    assert [one.version for one in server.adapters.versions("law")] == [before.version]


def test_a_directorys_files_are_read_again_only_if_touched(server, monkeypatch):
    """By the stamps of its files; a whole restart, whose shards know nothing."""
    found = dict(itertools.islice(server.paths.items(), 2))
    server.adapters.register_directory(found)
    before = server.served()
    server.adapters.pin(next(iter(found)), SECONDS)
    server.shard.close()
    server.shard = None
    server.database.close()
    server.start()

    def read(*_, **__):
        raise LoraServerError("it was read")

    monkeypatch.setattr("lora_server.control.adapters.adapters.opened", read)
    server.adapters.register_directory(found)
    assert server.served() == before and not server.adapters.refused()
    assert server.adapters.get(next(iter(found))).record.pinned


def test_a_failed_updates_warning_ends_with_the_next_update_or_its_adapter(server):
    """It was not there, or as it is; then the adapter was removed."""
    server.adapters.add("law", str(server.paths["fused"]), SECONDS)
    for uri in ("/nowhere", str(server.paths["fused"].parent)):
        with pytest.raises(AdapterError):
            server.adapters.update("law", uri, SECONDS)
        assert "failed: " in said(server)[0]
    server.adapters.update("law", str(server.paths["fused"]), SECONDS)
    assert not said(server)
    with pytest.raises(AdapterError):
        server.adapters.update("law", "/nowhere", SECONDS)
    server.adapters.remove("law")
    server.adapters.add("law", str(server.paths["qv"]), SECONDS)
    assert not said(server)
    server.kill()
    assert not said(server)
