"""Adapters that are added, resolved, followed in a directory or fetched, in real processes: they outlive any death."""

import contextlib
import itertools
import json
import shutil

import pytest
from sqlalchemy import select

from client_connector.directory import Directory
from client_connector.transformers import attach
from lora_server.demo.engine import generate
from lora_server.demo.launch import launch, running_server
from lora_server.errors import AdapterFormatError, LoraServerError, ServerUnavailableError, UnknownAdapterError
from lora_server.registry.database import FILE, Database, counters
from tests.support import serving
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


@pytest.mark.parametrize(("method", "new"), [("_load_beside", False), ("_keep_replaced", True)])
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
        metrics = server.get("/metrics")[1]
    assert f'lora_server_disk_cache_capacity_bytes{{node="0"}} {float(cap)}' in metrics
    assert 'lora_server_fetches_total{process="controller"} 3.0' in metrics
    assert 'lora_server_fetch_failures_total{process="shard 0"} 0.0' not in metrics


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
        directory = Directory(server.address)
        with attach(load.model, server=server.address) as lora:
            with lora.adapters(["acme/law"]):
                got = generate(load.model, [load.batch[load.names.index("fused")]], NEW_TOKENS)[0]
            assert got.tokens == load.expected[load.names.index("fused")].tokens
            with pytest.raises(UnknownAdapterError, match="not registered here, and not to be had from"):
                with lora.adapters(["acme/none"]):
                    pass
            with pytest.raises(UnknownAdapterError, match="not to be had from"):
                directory.get("other/law")
            shutil.copytree(load.paths["qv"], root / "default" / "code")
            assert directory.get("code").lora_rank == 4, "a look-up resolves it as well"
        directory.close()
