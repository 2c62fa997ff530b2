"""Registries: bad adapters leave them as before, of an update one version serves, whole, and servers share one."""

import itertools
import json
import os
import shutil
from pathlib import Path

import psutil
import psycopg
import pytest
import torch

from lora_server.adapters import validate_adapter
from lora_server.demo import tiny
from lora_server.demo.launch import running_server
from lora_server.errors import AdapterError, AdapterLoadError, ConfigError, LoraServerError, ServerUnavailableError
from lora_server.registry.database import FILE, Database
from lora_server.registry.versions import Ledger, versions
from lora_server.sources.copies import Copies
from lora_server.timings import Timings
from tests.support.adapter_files import LAYERS, Q, good
from tests.support.killed_controller import STAGES, part_of
from tests.support.postgres import host_of, read_only, running_postgres
from tests.support.restarts import SECONDS, Killed, Server, dies
from tests.support.serving import ANYWHERE, HANG_SECONDS, ask, cli, command_of, listed, suspended, until
from tests.support.workload import workload


@pytest.fixture
def server(tmp_path):
    one = Server(tmp_path)
    yield one
    one.close()


def said(server):
    """Beside an adapter, that its files do not."""
    (one,) = server.adapters.listings.all()
    return [why for why in one.warnings if why not in one.record.warnings]


@pytest.mark.parametrize(("method", "after", "new"), STAGES, ids=lambda value: str(value))
def test_a_controller_that_is_killed_in_an_update(server, monkeypatch, method, after, new):
    first = server.adapters.rollout.add("law", str(server.paths["fused"]), SECONDS)
    server.adapters.rollout.pin("law", SECONDS)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        dies(server, patch, *part_of(server.adapters, method), after)
        server.adapters.rollout.update("law", str(server.paths["qv"]), SECONDS)
    server.kill()
    (record,) = [one.record for one in server.adapters.listings.all()]
    assert (record.version != first.version, record.pinned) == (new, True)
    until(lambda: set(server.shard.memory.loads) == {record.handle}, "nothing is left of the other")
    assert [("did not end" in why, first.version[:12] in why) for why in said(server)] == [(True, True)] * (not new)
    updated = server.adapters.rollout.update("law", str(server.paths["attention"]), SECONDS)
    assert server.served() == {"law": updated.version} and updated.handle > record.handle
    assert not said(server)


def test_a_directorys_adapter_serves_on_when_its_update_by_hand_is_killed(server, monkeypatch):
    server.adapters.directory.register({"law": server.paths["fused"]})
    server.controller.arrivals.announce()
    before = server.served()
    with monkeypatch.context() as patch, pytest.raises(Killed):
        dies(server, patch, server.adapters.catalog.ledger, "added", False)
        server.adapters.rollout.update("law", str(server.paths["qv"]), SECONDS)
    server.kill()
    assert server.served() == before and server.controller.start.registered.is_set()


def test_an_update_that_a_shard_cannot_load_changes_nothing_and_says_why(server):
    before = server.adapters.rollout.add("law", str(server.paths["fused"]), SECONDS)
    server.shard.failure = "no memory"
    with pytest.raises(AdapterLoadError, match=f"no memory; version {before.version[:12]} of adapter 'law' serves on"):
        server.adapters.rollout.update("law", str(server.paths["qv"]), SECONDS)
    server.shard.failure = ""
    assert server.served() == {"law": before.version}
    assert "no memory" in said(server)[0]
    server.kill()
    assert "no memory" in said(server)[0]
    assert server.served() == {"law": before.version}
    assert [one.version for one in server.adapters.listings.versions("law")] == [before.version]


def test_pins_are_read_once_however_many_adapters_lie_in_the_directory(server, monkeypatch):
    reads, pinned_places = [], Ledger.pinned_places
    monkeypatch.setattr(Ledger, "pinned_places", lambda ledger: reads.append(1) or pinned_places(ledger))
    server.adapters.directory.register(dict(itertools.islice(server.paths.items(), 3)))
    assert len(server.served()) == 3 and len(reads) == 2, "before them, and for the records that are kept"


def test_a_directorys_files_are_read_again_only_if_touched(server, monkeypatch):
    """By the stamps of its files; a whole restart, whose shards know nothing."""
    found = dict(itertools.islice(server.paths.items(), 2))
    server.adapters.directory.register(found)
    before = server.served()
    server.adapters.rollout.pin(next(iter(found)), SECONDS)
    server.shard.close()
    server.shard = None
    server.database.close()
    server.start()

    def read(*_, **__):
        raise LoraServerError("it was read")

    monkeypatch.setattr("lora_server.control.adapters.directory.validate_adapter", read)
    server.adapters.directory.register(found)
    assert server.served() == before and not server.adapters.catalog.refusals.listed()
    assert server.adapters.listings.get(next(iter(found))).record.pinned


def test_a_failed_updates_warning_ends_with_the_next_update_or_its_adapter(server):
    """It was not there, or as it is; then the adapter was removed."""
    server.adapters.rollout.add("law", str(server.paths["fused"]), SECONDS)
    for uri in ("/nowhere", str(server.paths["fused"].parent)):
        with pytest.raises(AdapterError):
            server.adapters.rollout.update("law", uri, SECONDS)
        assert "failed: " in said(server)[0]
    server.adapters.rollout.update("law", str(server.paths["fused"]), SECONDS)
    assert not said(server)
    with pytest.raises(AdapterError):
        server.adapters.rollout.update("law", "/nowhere", SECONDS)
    server.adapters.rollout.remove("law")
    server.adapters.rollout.add("law", str(server.paths["qv"]), SECONDS)
    assert not said(server)
    server.kill()
    assert not said(server)


@pytest.mark.parametrize("damage", ["overwritten", "truncated", "a link"])
def test_a_copy_that_others_changed_is_made_again(tmp_path, damage):
    """Under its version's name another adapter was served to whoever added the same content again."""
    spec = workload("mixtral").spec
    server = Server(tmp_path, spec=spec, copies=Copies(tmp_path / "copies", spec))
    version = server.adapters.rollout.add("law", str(server.paths["fused"]), SECONDS).version
    weights = tmp_path / "copies" / version / "adapter_model.safetensors"
    if damage == "truncated":
        os.truncate(weights, 20_000)
    elif damage == "overwritten":
        data = weights.read_bytes()
        weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    else:
        weights.unlink()
        weights.symlink_to(server.paths["qv"] / weights.name)
    record = server.adapters.rollout.add("again", str(server.paths["fused"]), SECONDS)
    adapter, found = validate_adapter(record.path, spec)
    adapter.close()
    assert found == record.version == version and adapter.stamp == record.stamp
    server.close()


# ---- several servers of one PostgreSQL


def shared(url, directory, **options):
    spec = workload("mixtral").spec
    return Server(directory, url=url, spec=spec, copies=Copies(directory, spec), **options)


def meanings(server):
    """(version, handle, pinned) by name."""
    found = [one.record for one in server.adapters.listings.all() if one.state != "draining"]
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
        both[0].adapters.rollout.remove(name)
    both[0].close(), both[1].close()


@pytest.mark.long
def test_what_one_adds_changes_and_removes_the_other_serves(pair, tmp_path):
    mine, other = pair
    source = shutil.copytree(mine.paths["fused"], tmp_path / "source")
    mine.adapters.rollout.add("law", str(source), SECONDS)
    other.adapters.rollout.add("code", str(mine.paths["qv"]), SECONDS)
    for one in pair:
        one.adapters.peers.refresh()
    assert meanings(mine) == meanings(other) and set(meanings(mine)) == {"law", "code"}
    record = other.adapters.listings.get("law").record
    assert Path(record.path).parent == tmp_path / "copies-1", "each has files of its own"
    shutil.rmtree(source)
    mine.adapters.rollout.pin("law", SECONDS)
    mine.adapters.rollout.update("law", str(mine.paths["attention"]), SECONDS)
    other.adapters.peers.refresh()
    assert meanings(mine) == meanings(other) and meanings(other)["law"][0] != record.version
    assert meanings(other)["law"][2], "the pin stays"
    mine.adapters.rollout.rollback("law", "", SECONDS)
    other.adapters.peers.refresh()
    assert meanings(other)["law"][0] == record.version
    other.adapters.rollout.remove("law")
    mine.adapters.peers.refresh()
    assert set(meanings(mine)) == {"code"}
    listed = {one.record.handle for one in mine.adapters.listings.all()}
    until(lambda: set(mine.shard.memory.loads) == listed, "its shard drops the rest", HANG_SECONDS)


@pytest.fixture
def hasty(postgres, tmp_path):
    one = shared(postgres, tmp_path / "hasty", timings=Timings(database=0.5))
    yield one
    one.close()


@pytest.mark.long
def test_what_is_served_goes_on_while_the_database_is_away(pair, postgres, hasty):
    mine, other = pair
    hasty.adapters.rollout.add("law", str(mine.paths["fused"]), SECONDS)
    mine.adapters.peers.refresh()
    directory = postgres.partition("host=")[2]
    pid = int((Path(directory) / "data" / "postmaster.pid").read_text().split()[0])
    family = [psutil.Process(pid), *psutil.Process(pid).children()]
    for process in family[1:]:
        if "lora" in " ".join(command_of(process)):  # others of them come and go
            process.kill()  # its connections break, and it makes no new ones until it has recovered
    with suspended(pid):
        with pytest.raises(ServerUnavailableError, match=r"--registry postgresql.*not reached within"):
            hasty.adapters.rollout.add("code", str(mine.paths["qv"]), SECONDS)
        assert set(meanings(hasty)) == {"law"} and hasty.adapters.admission.acquire(1, ["law"])[0]
    hasty.adapters.admission.release(1, [hasty.adapters.listings.get("law").record.handle])
    mine.adapters.rollout.add("code", str(mine.paths["qv"]), SECONDS)
    other.adapters.peers.refresh()
    assert meanings(other) == meanings(mine)


@pytest.mark.long
def test_a_server_refuses_changes_by_a_typed_error_until_a_failover_is_over(tmp_path):
    with running_postgres() as primary, running_postgres(primary) as standby:
        hosts = f"{primary}&host={host_of(standby)}&target_session_attrs=read-write"
        server = shared(hosts, tmp_path / "copies", timings=Timings(database=0.5))
        server.adapters.rollout.add("law", str(server.paths["fused"]), SECONDS)
        with read_only(primary):
            with pytest.raises(ServerUnavailableError, match=r"--registry postgresql.*not reached within .*read-only"):
                server.adapters.rollout.add("code", str(server.paths["qv"]), SECONDS)
            assert set(meanings(server)) == {"law"} and server.adapters.admission.acquire(1, ["law"])[0]
            with psycopg.connect(standby) as connection:
                connection.execute("SELECT pg_promote()")
            server.adapters.rollout.add("code", str(server.paths["qv"]), SECONDS)
            server.kill()
            assert set(meanings(server)) == {"law", "code"}, "the next controller finds both, at the new primary"
        server.close()


@pytest.mark.long
def test_changes_go_on_once_a_read_only_database_is_writable(pair, postgres, hasty):
    with read_only(postgres):
        with pytest.raises(ServerUnavailableError, match=r"cannot execute .* in a read-only transaction"):
            hasty.adapters.rollout.add("law", str(hasty.paths["qv"]), SECONDS)
    hasty.adapters.rollout.add("law", str(hasty.paths["qv"]), SECONDS)
    pair[0].adapters.peers.refresh()
    assert meanings(pair[0]) == meanings(hasty) and set(meanings(hasty)) == {"law"}


@pytest.mark.long
def test_a_server_follows_what_others_do_to_its_registry(pair, postgres, tmp_path):
    mine = pair[0]
    flags = ["--base-model", str(workload("mixtral").base), "--registry", postgres, *ANYWHERE]

    def states():
        return {name: (one.version, one.handle, one.pinned) for name, one in listed(server.address).items()}

    mine.adapters.rollout.add("law", str(mine.paths["fused"]), SECONDS)
    with running_server(tmp_path / "log", flags) as server:
        assert states() == meanings(mine), "what was there when it started"
        mine.shard.lives()
        mine.adapters.rollout.update("law", str(mine.paths["qv"]), SECONDS)
        until(lambda: states() == meanings(mine), "it follows", HANG_SECONDS)
        added = cli("adapters", "add", "code", str(mine.paths["fused"]), "--server", server.address)
        assert added.returncode == 0, added.stderr
        mine.adapters.peers.refresh()
        assert set(meanings(mine)) == {"law", "code"} and states() == meanings(mine)
        assert "postgresql" not in (tmp_path / "log").read_text()


@pytest.mark.long
def test_a_database_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"postgresql.*\*\*\*.*cannot be opened: .*expected postgresql://USER@"):
        Database(f"postgresql://lora:secret@/none?host={tmp_path}", Timings(database_open=0.1))


CONFIG = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "w1"]}
FIRST = f"{Q}.lora_A.weight"
# kind: what is changed in the config, what in the tensors, and what the refusal says
FILES = {
    "DoRA": ({"use_dora": True}, {}, "use_dora"),
    "biases": ({"bias": "all"}, {}, "bias"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, {}, "modules_to_save"),
    "another method": ({"peft_type": "IA3"}, {}, "peft_type"),
    "PiSSA": ({"init_lora_weights": "pissa"}, {}, "init_lora_weights"),
    "replicated layers": ({"layer_replication": [[0, 2], [1, 4]]}, {}, "layer_replication"),
    "QA-LoRA": ({"use_qalora": True}, {}, "use_qalora"),
    "block diagonal": ({"use_bdlora": {"nblocks": 2}}, {}, "use_bdlora"),
    "trained tokens": ({"trainable_token_indices": [3]}, {}, "trainable_token_indices"),
    "what nobody knows": ({"use_something_new": True}, {}, "use_something_new"),
    "rank 0": ({"r": 0}, {}, "got 0"),
    "rank too large": ({"r": 1025}, {}, "got 1025"),
    "rank no number": ({"r": "8"}, {}, "got '8'"),
    "alpha NaN": ({"lora_alpha": float("nan")}, {}, "lora_alpha"),
    "a pattern that never ends": ({"rank_pattern": {r"(a)\1": 4}}, {}, "references to groups"),
    "an empty invocation": ({"alora_invocation_tokens": []}, {}, "alora_invocation_tokens"),
    "a rank that is not the tensors'": ({"r": 8}, {}, "lora_rank 8"),
    "NaN": ({}, {FIRST: torch.full((4, 64), float("nan"))}, "NaN"),
    "another width": ({}, {FIRST: torch.ones(4, 63)}, "[4, 63]"),
    "a scalar": ({}, {FIRST: torch.ones(())}, "shape []"),
    "64 bits": ({}, {FIRST: torch.ones(4, 64, dtype=torch.float64)}, "'F64'"),
    "integers": ({}, {FIRST: torch.ones(4, 64, dtype=torch.int8)}, "'I8'"),
    "a layer too many": ({}, {f"{LAYERS}.9.self_attn.q_proj.lora_A.weight": torch.ones(4, 64)}, "layer 9"),
    "an expert too many": ({}, {f"{LAYERS}.0.mlp.experts.99.w1.lora_A.weight": torch.ones(4, 64)}, "expert 99"),
    "a module without a site": ({}, {f"{LAYERS}.0.mlp.gate.lora_A.weight": torch.ones(4, 64)}, "no site takes"),
}


def config_text(directory, text):
    (directory / "adapter_config.json").write_text(text)


# kind: what happens to a good adapter's directory, and what the refusal says
DIRECTORIES = {
    "no directory": (shutil.rmtree, "got none at this path"),
    "no config": (lambda path: (path / "adapter_config.json").unlink(), "adapter_config.json"),
    "no JSON": (lambda path: config_text(path, "{"), "adapter_config.json"),
    "no object": (lambda path: config_text(path, "[]"), "adapter_config.json"),
    "a pickle": (lambda path: (path / "adapter_model.safetensors").rename(path / "adapter_model.bin"), "pickle"),
    "no weights": (lambda path: (path / "adapter_model.safetensors").unlink(), "safetensors"),
    "cut short": (lambda path: cut(path, 100), "truncated"),
    "half a pair": (lambda path: without(path, FIRST), "half a pair"),
}
URIS = {
    "no path": ("", "adapter source"),
    "a password": ("s3://user:secret@bucket/law", "a password"),
    "no scheme of ours": ("gopher://host/law", "gopher"),
    "outside": ("/etc", "leads elsewhere"),
}
NAMES = {"no name": "", "a path's": "../law", "not ASCII": "lаw"}


def cut(path, less):
    file = path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-less])


def without(path, key):
    tiny.write_adapter(path, {name: value for name, value in good().items() if name != key}, CONFIG)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    directory, load = tmp_path_factory.mktemp("served"), workload("mixtral")
    (directory / "adapters").mkdir()
    flags = ["--base-model", str(load.base), "--data-dir", str(directory / "data")]
    with running_server(directory / "log", [*flags, "--adapter-root", str(directory / "adapters")]) as server:

        def add(name, uri):
            return ask(server.address, "Add", name=name, uri=str(uri), wait_seconds=HANG_SECONDS)

        tiny.write_adapter(directory / "adapters" / "first", *fitting({}, {}))
        add("first", directory / "adapters" / "first")
        yield directory, add


def fitting(config, tensors):
    return good() | tensors, CONFIG | config


def state(data):
    """Rows of the registry, and the copies that the server has."""
    database = Database(f"sqlite:///{data / FILE}")
    try:
        rows = database.read(lambda connection: sorted(map(tuple, connection.execute(versions.select()).all())))
    finally:
        database.close()
    return rows, sorted(one.name for one in (data / "adapters").iterdir())


def bad_adapters(adapters):
    """(kind, name, source, what the refusal says) of each; their directories are made."""
    for kind, (config, tensors, said) in FILES.items():
        path = adapters / kind
        tiny.write_adapter(path, *fitting(config, tensors))
        yield kind, "bad", path, said
    for kind, (damage, said) in DIRECTORIES.items():
        path = adapters / kind
        tiny.write_adapter(path, *fitting({}, {}))
        damage(path)
        yield kind, "bad", path, said
    for kind, (uri, said) in URIS.items():
        yield kind, "bad", uri, said
    for kind, name in NAMES.items():
        yield kind, name, adapters / "first", "adapter name"
    second = adapters / "second"
    tiny.write_adapter(second, *fitting({"lora_alpha": 9}, {}))
    yield "a name that is taken", "first", second, "adapters update first SOURCE"


def test_each_kind_has_a_message_of_its_own_and_the_registry_is_as_before(served):
    directory, add = served
    before, messages = state(directory / "data"), {}
    assert list(map(len, before)) == [1, 1]
    for kind, name, source, said in bad_adapters(directory / "adapters"):
        with pytest.raises(LoraServerError) as caught:
            add(name, source)
        message = str(caught.value)
        assert isinstance(caught.value, AdapterError) and said in message, (kind, message)
        messages[kind] = message.replace(str(source), "")
    until(lambda: state(directory / "data") == before, "its rows and its copies are as before")
    assert len(messages) >= 25 and len(set(messages.values())) == len(messages), json.dumps(messages, indent=1)
