"""Adapters that are added, resolved, followed in a directory or fetched, in real processes: they outlive any death."""

import contextlib
import itertools
import json
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
from safetensors.torch import load_file, save_file
from sqlalchemy import select

from client_connector.directory import AdapterDirectory
from client_connector.transformers import attach
from lora_server.adapters import WEIGHTS, validate_adapter
from lora_server.demo.engine import generate
from lora_server.demo.launch import launch, running_server
from lora_server.errors import (
    AdapterFormatError,
    LimitError,
    LoraServerError,
    ServerUnavailableError,
    UnauthenticatedError,
    UnknownAdapterError,
)
from lora_server.registry.database import FILE, Database, counters
from tests.support import serving
from tests.support.doc_commands import blocks
from tests.support.far import SECONDS, far_server, left, size_of
from tests.support.killed_controller import ORDER, order
from tests.support.processes import line_of, start
from tests.support.serving import ANYWHERE, HANG_SECONDS, answers, ask, cli, generates, listed, status, until
from tests.support.workload import NEW_TOKENS, workload


class Node:
    """A server with --data-dir, which may be killed, the controller alone or all of it."""

    def __init__(self, directory):
        self.load, self.directory = workload("mixtral"), directory
        self.paths = self.load.paths
        self.start()

    def start(self):
        flags = ["--base-model", str(self.load.base), "--data-dir", str(self.directory / "data"), *ANYWHERE]
        self.server = launch(self.directory / "log", *flags, module="tests.support.killed_controller")
        self.server.wait_ready()

    def ask(self, method, **fields):
        return ask(self.server.address, method, **fields)

    def add(self, name, kind):
        return self.ask("Add", name=name, uri=str(self.paths[kind]), wait_seconds=HANG_SECONDS)

    def update(self, name, uri):
        return self.ask("Update", name=name, uri=str(uri), wait_seconds=HANG_SECONDS)

    def listed(self):
        """(version, handle, pinned) by name."""
        return {name: (one.version, one.handle, one.pinned) for name, one in listed(self.server.address).items()}

    def copies(self):
        return sorted(one.name for one in (self.directory / "data" / "adapters").iterdir())

    def cli(self, *words):
        return cli("adapters", *words, "--server", self.server.address)

    def restart(self):
        serving.kill(self.server)
        self.start()


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    one = Node(tmp_path_factory.mktemp("node"))
    yield one
    serving.stop(one.server)


@pytest.fixture
def node(running):
    """It has no adapter."""
    yield running
    for name in running.listed():
        running.ask("Remove", name=name)
    until(lambda: not running.copies(), "copies that no adapter needs go")


def test_a_backup_that_was_made_while_it_served_restores_what_there_was(node):
    """By the commands of docs/operations.md, as written."""
    backup, restore = (one for one in blocks("docs/operations.md") if one.why == "tests/served/test_registry_served.py")

    def run(block):
        for command in block.commands:
            subprocess.run(command, shell=True, cwd=node.directory, check=True, timeout=HANG_SECONDS)

    node.add("law", "fused")
    node.ask("Pin", name="law", wait_seconds=HANG_SECONDS)
    node.add("code", "qv")
    before = node.listed()
    run(backup)
    node.ask("Remove", name="code")
    node.add("late", "attention")
    serving.kill(node.server)
    run(restore)
    node.start()
    assert node.listed() == before
    with attach(node.load.model, server=node.server.address) as lora:
        assert answers(lora, node.load, "law", "fused") and answers(lora, node.load, "code", "qv")


def test_what_was_added_is_there_after_any_death_pins_and_handles_too(node, tmp_path):
    source = shutil.copytree(node.paths["qv"], tmp_path / "source")
    node.add("law", "fused")
    node.ask("Add", name="team/code", uri=str(source), wait_seconds=HANG_SECONDS)
    shutil.rmtree(source)  # what was added is the server's own
    node.ask("Pin", name="law", wait_seconds=HANG_SECONDS)
    node.add("gone", "attention")
    node.ask("Remove", name="gone")
    before = node.listed()
    assert before["law"][2] and not before["team/code"][2] and "gone" not in before
    serving.kill_controller(node.server)
    assert node.listed() == before
    node.restart()
    assert node.listed() == before
    with attach(node.load.model, server=node.server.address) as lora:
        assert answers(lora, node.load, "law", "fused") and answers(lora, node.load, "team/code", "qv")
    until(lambda: len(node.copies()) == 2, "a copy that no adapter needs goes")
    assert node.add("new", "experts").handle > max(handle for _, handle, _ in before.values()), "none is used twice"


def test_a_second_server_on_a_data_dir_is_told_which_process_has_it(node):
    """Also with another base model, which would make the registry its own."""
    node.add("law", "fused")
    data, before = node.directory / "data", node.listed()
    for base in (node.load.base, workload("llama").base):
        anywhere = ("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0")
        done = cli("serve", "--base-model", str(base), "--data-dir", str(data), *anywhere)
        holder = f"error: --data-dir {data}: process {node.server.process.pid} on "
        assert done.returncode == 2 and done.stderr.startswith(holder), done.stderr
    node.restart()
    assert node.listed() == before


def test_an_update_is_switched_while_requests_go_on_and_can_be_taken_back(node):
    first = node.add("law", "fused")
    with pytest.raises(AdapterFormatError, match=r"version .* of adapter 'law' serves on|adapter_config"):
        node.ask("Update", name="law", uri=str(node.directory))
    told = node.cli("show", "law")
    assert "the update begun" in told.stdout + told.stderr and "failed" in told.stdout + told.stderr
    with attach(node.load.model, server=node.server.address) as lora:
        with lora.adapters(["law"]):
            second = node.update("law", node.paths["qv"])
            assert second.version != first.version and second.handle > first.handle
            assert generates(node.load, "fused"), "a request that holds the earlier one goes on with it"
        assert answers(lora, node.load, "law", "qv")
        node.restart()
    with attach(node.load.model, server=node.server.address) as lora:
        assert answers(lora, node.load, "law", "qv")
        shown = [(one.version, one.listed) for one in node.ask("Get", name="law").versions]
        assert shown == [(second.version, True), (first.version, False)]
        assert node.cli("rollback", "law").returncode == 0
        assert answers(lora, node.load, "law", "fused")
    assert f"before {second.version[:12]}" in " ".join(node.cli("show", "law").stdout.split())
    with pytest.raises(UnknownAdapterError, match="not registered here"):
        node.ask("Update", name="none", uri=str(node.paths["qv"]))
    with pytest.raises(UnknownAdapterError, match="no earlier version ffff"):
        node.ask("Rollback", name="law", version="ffff")
    assert node.ask("Rollback", name="law", version=second.version[:8]).version == second.version


@pytest.mark.parametrize(("method", "new"), [("changes.load_beside", False), ("catalog.ledger.added", True)])
def test_a_controller_process_that_is_killed_in_an_update(node, method, new):
    """A node starts it again: what serves is complete, and what is shown says why. test_registry.py has every
    stage of an update; here is one of either outcome."""
    node.add("law", "fused")
    with attach(node.load.model, server=node.server.address, timeout_seconds=HANG_SECONDS) as lora:
        (node.directory / "data" / ORDER).write_text(order(method, True))
        before = status(node.server.address).pid
        with pytest.raises(ServerUnavailableError):
            node.update("law", node.paths["qv"])
        serving.wait_successor(node.server, before)
        assert answers(lora, node.load, "law", "qv" if new else "fused")
        shown = node.ask("Get", name="law")
        assert any("did not end" in warning for warning in shown.warnings) == (not new)
        assert [one.listed for one in shown.versions].count(True) == 1 == len(node.listed())


def test_a_client_that_holds_a_removed_adapter_is_cut_off_at_the_deadline(node):
    node.add("law", "fused")
    with attach(node.load.model, server=node.server.address) as lora:
        with pytest.raises(UnknownAdapterError, match="was it removed"), lora.adapters(["law"]):
            assert node.ask("Remove", name="law", drain_seconds=2.0).holders == 1
            serving.kill_controller(node.server)  # its successor knows when
            until(lambda: not node.ask("List").adapters, "its weights go")
            generate(node.load.model, [node.load.batch[node.load.names.index("fused")]], NEW_TOKENS)


def states(address):
    """Name and state of each adapter, in the order of handles."""
    return [(one.name, one.state) for one in ask(address, "List").adapters]


def test_a_directory_is_followed(load, tmp_path):
    """Its entry is a link that is flipped at once: no look finds it missing."""
    directory, count = tmp_path / "adapters", itertools.count()
    directory.mkdir()
    flags = ["--base-model", str(load.base), "--adapters", str(directory), "--watch", "--layout", "ep2-pp1"]

    def put(kind, **fields):
        new = shutil.copytree(load.paths[kind], tmp_path / f"content-{next(count)}")
        config = new / "adapter_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | fields))
        link = tmp_path / "link"
        link.symlink_to(new)
        link.replace(directory / "law")

    with running_server(tmp_path / "log", flags) as server:
        put("fused")
        until(lambda: states(server.address) == [("law", "ready")], "it is served")
        with attach(load.model, server=server.address) as lora:
            with lora.adapters(["law"]):
                put("qv")
                both = [("law", "draining"), ("law", "ready")]
                until(lambda: states(server.address) == both, "another version is, too")
                assert generates(load, "fused"), "a request that holds the earlier one goes on with it"
            assert answers(lora, load, "law", "qv")
            put("fused", use_dora=True)
            until(lambda: status(server.address).refused, "newer content is refused")
            shown = cli("adapters", "list", "--server", server.address).stdout
            assert "warning: law:" in shown and "DoRA" in shown and "serves on" in " ".join(shown.split())
            until(lambda: states(server.address) == [("law", "ready")], "what drained is gone")
            (before,) = ask(server.address, "List").adapters
            serving.kill_controller(server)
            until(lambda: states(server.address) == [("law", "ready")], "it is as it was")
            assert answers(lora, load, "law", "qv")
        put("fused")
        until(lambda: not status(server.address).refused, "good content is taken")
        until(lambda: states(server.address) == [("law", "ready")], "it serves alone")
        (after,) = ask(server.address, "List").adapters
        assert after.handle > before.handle and after.version != before.version
        (directory / "law").unlink()
        until(lambda: not states(server.address), "it is gone")
    lines = [json.loads(line) for line in server.log.read_text().splitlines()]
    mine = [line["event"].removeprefix("adapter ") for line in lines if line.get("name") == "law"]
    expected = ["registered", "replaced", "refused", "not refused any more", "replaced", "removed"]
    assert [event for event in mine if event in expected] == expected


@pytest.mark.long
def test_a_followed_adapter_that_others_change_under_load_is_never_a_mixture(load, tmp_path):
    """Its weights are overwritten, cut short, swapped and linked elsewhere between the look and the load."""
    directory, ways = tmp_path / "adapters", ("overwritten", "a file", "truncated", "a directory", "a link")
    kinds = [shutil.copytree(load.paths["fused"], tmp_path / kind) for kind in ("even", "odd")]
    tensors = load_file(kinds[1] / WEIGHTS)
    save_file({key: -5 * value for key, value in tensors.items()}, kinds[1] / WEIGHTS)
    law, right, outcomes = directory / "law", [], []
    shutil.copytree(kinds[0], law)
    flags = ["--base-model", str(load.base), "--adapters", str(directory), "--watch", "--layout", "ep2-pp1"]

    def tokens():
        with lora.adapters(["law"]):
            return generate(load.model, [load.batch[load.names.index("fused")]], NEW_TOKENS)[0].tokens

    def serves(version):
        one = listed(server.address).get("law")
        return one is not None and (one.version, one.state) == (version, "ready")

    def outcome():
        """Whose tokens came, or a typed error; any others are wrong."""
        try:
            return right.index(tokens())
        except LoraServerError as error:
            return type(error).__name__

    def change(how, kind):
        new = tmp_path / "new"
        if how == "truncated":
            os.truncate(law / WEIGHTS, 20_000)
        elif how == "overwritten":
            shutil.copyfile(kind / WEIGHTS, law / WEIGHTS)
        elif how == "a directory":
            law.rename(tmp_path / f"old-{len(outcomes)}")
            shutil.copytree(kind, law)
        else:
            new.symlink_to(kind / WEIGHTS) if how == "a link" else shutil.copyfile(kind / WEIGHTS, new)
            new.replace(law / WEIGHTS)

    versions = [version_of(kind, load.spec) for kind in kinds]
    with running_server(tmp_path / "log", flags) as server:
        with attach(load.model, server=server.address) as lora:
            for kind, version in zip(kinds, versions, strict=True):
                change("a file", kind)
                until(lambda version=version: serves(version), "it is served")
                right.append(tokens())
            assert right[0] != right[1]
            for number, how in enumerate(ways * 2):
                if (law / WEIGHTS).is_symlink():  # what it leads to stays
                    (law / WEIGHTS).unlink()
                change(how, kinds[number % 2])
                serving.kill_shard(server, number % 2)  # its successor loads what it finds
                outcomes.append(outcome())
            change("a directory", kinds[0])
            until(lambda: outcome() == 0, "good content is served again")


def version_of(path, spec):
    adapter, version = validate_adapter(path, spec)
    adapter.close()
    return version


def test_a_server_of_remote_adapters(tmp_path):
    """Its disk cache holds one adapter or two, its pool one."""
    work, cache, names = workload("mixtral"), tmp_path / "cache", ("fused", "experts", "qv")
    cap = max(size_of(work.paths[name]) for name in names) + 1000
    flags = ["--base-model", str(work.base), "--disk-cache", str(cache), "--disk-cache-size", str(cap)]
    flags += ["--max-active-adapters", "1", "--device-pool", "490000"]  # all but 7 kB of it for "fused"
    with far_server(tmp_path / "far") as far, running_server(tmp_path / "log", flags) as server:
        with attach(work.model, server=server.address, timeout_seconds=HANG_SECONDS) as lora:

            def push_out(name):
                """Use the others until this adapter is in no memory and not in the cache."""
                for other in (one for one in names if one != name):
                    assert answers(lora, work, other)
                until(lambda: ask(server.address, "Get", name=name).state == "remote", f"{name} is away")

            def right_now():
                """Whether it answers right; a failure is remembered for a second."""
                try:
                    return answers(lora, work, "qv")
                except LoraServerError:
                    return False

            for name in names:
                ask(server.address, "Add", name=name, uri=far.put(name, work.paths[name]))
            for name in (*names, *names):
                assert answers(lora, work, name)
                assert sum(int(one.split(".")[1]) for one in left(cache)) <= cap
            push_out("qv")
            shown = cli("adapters", "show", "qv", "--server", server.address).stdout
            assert f"{far.url}/qv" in shown and "remote 4/4" in shown, shown

            far.stalled.clear()
            far.open.clear()
            (shard,) = serving.shard_processes(server.address)
            with lora.adapters(["qv"]):  # it begins to come
                assert far.stalled.wait(SECONDS)
                shard.kill()
                far.open.set()
            until(lambda: status(server.address).shards[0].restarts == 1, "another shard")
            server.wait_ready()
            until(right_now, "right again")

            push_out("qv")
            far.put("qv", work.paths["attention"])
            with pytest.raises(LoraServerError, match="content changed since it was registered"):
                answers(lora, work, "qv")
            far.put("qv", work.paths["qv"])
            until(right_now, "it is what was registered again")
        failures = re.compile(r'lora_server_fetch_failures_total\{process="shard 0"\} [1-9]')
        until(lambda: failures.search(server.get("/metrics")[1]), "the shard reported its failure")
        metrics = server.get("/metrics")[1]
    assert f'lora_server_disk_cache_capacity_bytes{{node="0"}} {float(cap)}' in metrics
    assert 'lora_server_fetches_total{process="controller"} 3.0' in metrics


COUNTER = """
import sys
from lora_server.registry.database import Database, count
database = Database(sys.argv[1])
while True:
    print(database.write(lambda connection: (count(connection, "left"), count(connection, "right")))[0], flush=True)
"""


def test_a_killed_writer_leaves_complete_transactions(tmp_path):
    told, url = 0, f"sqlite:///{tmp_path / FILE}"
    for _ in range(2):
        writer = start(COUNTER, url)
        for _ in range(3):
            told = int(line_of(writer))
        writer.kill()
        lines = writer.communicate(timeout=HANG_SECONDS)[0].split()
        told = max([told, *map(int, lines[:-1])])  # the last one may be cut
        with contextlib.closing(Database(url)) as database:
            rows = dict(map(tuple, database.read(lambda connection: connection.execute(select(counters)).all())))
        assert rows["left"] == rows["right"] >= told


def test_an_unregistered_name_is_resolved_and_served(load, tmp_path):
    root = tmp_path / "adapters"
    shutil.copytree(load.paths["fused"], root / "acme" / "law")
    flags = ["--base-model", str(load.base), "--adapter-root", str(root)]
    flags += ["--resolve", f"file://{root}/{{tenant}}/{{name}}"]
    with running_server(tmp_path / "log", flags) as server:
        directory = AdapterDirectory(server.address)
        with attach(load.model, server=server.address) as lora:
            with lora.adapters(["acme/law"]):
                got = generate(load.model, [load.batch[load.names.index("fused")]], NEW_TOKENS)[0]
            assert got.tokens == load.expected[load.names.index("fused")].tokens
            with pytest.raises(UnknownAdapterError, match="not registered here, and cannot be added from"):
                with lora.adapters(["acme/none"]):
                    pass
            with pytest.raises(UnknownAdapterError, match="cannot be added from"):
                directory.get("other/law")
            shutil.copytree(load.paths["qv"], root / "default" / "code")
            assert directory.get("code").lora_rank == 4, "a look-up resolves it as well"
        directory.close()


def test_a_resolved_adapter_counts_as_its_tenants_and_stands_in_the_audit(load, tmp_path, monkeypatch):
    root, data, names = tmp_path / "adapters", tmp_path / "data", [f"law-{number}" for number in range(6)]
    for name in names:
        shutil.copytree(load.paths["fused"], root / "acme" / name)
    flags = ["--base-model", str(load.base), "--adapter-root", str(root), "--data-dir", str(data)]
    flags += ["--resolve", f"file://{root}/{{tenant}}/{{name}}"]

    def get(name):
        try:
            return directory.get(name).name
        except LimitError as error:
            return str(error)

    def is_known():
        with contextlib.suppress(UnauthenticatedError):
            return directory.list() == []

    with running_server(tmp_path / "log", flags) as server:
        beside = ["--data-dir", str(data)]
        assert cli("tenants", "set", "acme", "--max-adapters", "2", *beside).returncode == 0
        token = cli("tokens", "create", "--role", "viewer", "--tenant", "acme", *beside).stdout.strip()
        monkeypatch.setenv("LORA_SERVER_TOKEN", token)
        directory = AdapterDirectory(server.address)
        with contextlib.closing(directory), ThreadPoolExecutor(len(names)) as threads:
            until(is_known, "the server knows the token that was made beside it")
            told = sorted(threads.map(get, names))
            brought = [one.name for one in directory.list()]
        assert len(brought) == 2 and told[:2] == brought, told
        assert all(one.startswith("tenant acme: got 3 adapters, 2 may be") for one in told[2:]), told
        kept = json.loads(cli("audit", "--json", *beside).stdout)
        added = [(one["tenant"], one["token"], one["subject"]) for one in kept if one["call"] == "Adapters/Add"]
        assert sorted(added) == [("acme", token.split("_")[1], f"name={name} by --resolve") for name in brought]
