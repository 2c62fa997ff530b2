"""Registries of several servers, and of one that is killed: one version serves, whole, the one that was kept."""

import itertools
import os
import shutil
import signal
from pathlib import Path

import psutil
import pytest

from lora_server.demo.launch import running_server
from lora_server.errors import AdapterError, AdapterLoadError, ConfigError, LoraServerError, ServerUnavailableError
from lora_server.registry.database import Database
from lora_server.sources.copies import Copies
from lora_server.timings import Timings
from tests.support.killed_controller import STAGES
from tests.support.postgres import running_postgres
from tests.support.restarts import SECONDS, Killed, Server, dies
from tests.support.serving import ANYWHERE, HANG_SECONDS, cli, command_of, listed, until
from tests.support.workload import spec_of, workload


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


# ---- several servers of one PostgreSQL


def shared(url, directory, **options):
    return Server(directory, url=url, copies=Copies(directory, spec_of("mixtral")), **options)


def meanings(server):
    """(version, handle, pinned) by name."""
    found = [one.record for one in server.adapters.listings() if one.state != "draining"]
    return {one.name: (one.version, one.handle, one.pinned) for one in found}


@pytest.fixture(scope="module")
def postgres():
    with running_postgres() as url:
        yield url


@pytest.fixture
def pair(postgres, tmp_path):
    both = [shared(postgres, tmp_path / f"copies-{number}") for number in range(2)]
    yield both
    for name in both[0].served():
        both[0].adapters.remove(name)
    both[0].close(), both[1].close()


@pytest.mark.long
def test_what_one_adds_changes_and_removes_the_other_serves(pair, tmp_path):
    mine, other = pair
    source = shutil.copytree(mine.paths["fused"], tmp_path / "source")
    mine.adapters.add("law", str(source), SECONDS)
    other.adapters.add("code", str(mine.paths["qv"]), SECONDS)
    for one in pair:
        one.adapters.refresh()
    assert meanings(mine) == meanings(other) and set(meanings(mine)) == {"law", "code"}
    record = other.adapters.get("law").record
    assert Path(record.path).parent == tmp_path / "copies-1", "each has files of its own"
    shutil.rmtree(source)
    mine.adapters.pin("law", SECONDS)
    mine.adapters.update("law", str(mine.paths["attention"]), SECONDS)
    other.adapters.refresh()
    assert meanings(mine) == meanings(other) and meanings(other)["law"][0] != record.version
    assert meanings(other)["law"][2], "the pin stays"
    mine.adapters.rollback("law", "", SECONDS)
    other.adapters.refresh()
    assert meanings(other)["law"][0] == record.version
    other.adapters.remove("law")
    mine.adapters.refresh()
    assert set(meanings(mine)) == {"code"}
    listed = {one.record.handle for one in mine.adapters.listings()}
    until(lambda: set(mine.shard.memory.loads) == listed, "its shard drops the rest", HANG_SECONDS)


@pytest.fixture
def hasty(postgres, tmp_path):
    one = shared(postgres, tmp_path / "hasty", timings=Timings(database=0.5))
    yield one
    one.close()


@pytest.mark.long
def test_what_is_served_goes_on_while_the_database_is_away(pair, postgres, hasty):
    mine, other = pair
    hasty.adapters.add("law", str(mine.paths["fused"]), SECONDS)
    mine.adapters.refresh()
    directory = postgres.partition("host=")[2]
    pid = int((Path(directory) / "data" / "postmaster.pid").read_text().split()[0])
    family = [psutil.Process(pid), *psutil.Process(pid).children()]
    for process in family[1:]:
        if "lora" in " ".join(command_of(process)):  # others of them come and go
            process.kill()  # its connections break, and it makes no new ones until it has recovered
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(ServerUnavailableError, match=r"--registry postgresql.*not reached within"):
            hasty.adapters.add("code", str(mine.paths["qv"]), SECONDS)
        assert set(meanings(hasty)) == {"law"} and hasty.adapters.acquire(1, ["law"])[0]
    finally:
        os.kill(pid, signal.SIGCONT)
    hasty.adapters.release(1, [hasty.adapters.get("law").record.handle])
    mine.adapters.add("code", str(mine.paths["qv"]), SECONDS)
    other.adapters.refresh()
    assert meanings(other) == meanings(mine)


@pytest.mark.long
def test_a_server_follows_what_others_do_to_its_registry(pair, postgres, tmp_path):
    mine = pair[0]
    flags = ["--base-model", str(workload("mixtral").base), "--registry", postgres, *ANYWHERE]

    def states():
        return {name: (one.version, one.handle, one.pinned) for name, one in listed(server.address).items()}

    mine.adapters.add("law", str(mine.paths["fused"]), SECONDS)
    with running_server(tmp_path / "log", flags) as server:
        assert states() == meanings(mine), "what was there when it started"
        mine.shard.lives()
        mine.adapters.update("law", str(mine.paths["qv"]), SECONDS)
        until(lambda: states() == meanings(mine), "it follows", HANG_SECONDS)
        added = cli("adapters", "add", "code", str(mine.paths["fused"]), "--server", server.address)
        assert added.returncode == 0, added.stderr
        mine.adapters.refresh()
        assert set(meanings(mine)) == {"law", "code"} and states() == meanings(mine)
        assert "postgresql" not in (tmp_path / "log").read_text()


@pytest.mark.long
def test_a_database_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"postgresql.*\*\*\*.*cannot be opened: .*expected postgresql://USER@"):
        Database(f"postgresql://lora:secret@/none?host={tmp_path}", Timings(database_open=0.1))
