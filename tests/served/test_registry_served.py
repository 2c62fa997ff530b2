"""What was added by name outlives every process: a controller that is killed, a whole node."""

import shutil

import pytest

from client_connector.transformers import attach
from lora_server.demo.engine import generate
from lora_server.demo.launch import launch
from lora_server.errors import AdapterFormatError, ServerUnavailableError, UnknownAdapterError
from tests.support.killed_controller import ORDER, STAGES, order
from tests.support.serving import (
    ANYWHERE,
    HANG_SECONDS,
    answers,
    ask,
    cli,
    generates,
    kill,
    kill_controller,
    listed,
    status,
    stop,
    until,
    wait_successor,
)
from tests.support.workload import NEW_TOKENS, workload

SHORT = [("_load_beside", True, False), ("_keep_replaced", True, True)]  # either outcome; the others take long


class Node:
    """A server with --data-dir, which may be killed, the controller alone or all of it."""

    def __init__(self, directory):
        self.load, self.directory = workload("mixtral"), directory
        self.paths = self.load.paths
        self.start()

    def start(self):
        flags = ["--base-model", str(self.load.base), "--data-dir", str(self.directory / "data"), *ANYWHERE]
        self.server = launch(
            self.directory / "log", *flags, "--layout", "ep1-pp1", module="tests.support.killed_controller"
        )
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
        kill(self.server)
        self.start()


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    one = Node(tmp_path_factory.mktemp("node"))
    yield one
    stop(one.server)


@pytest.fixture(autouse=True)
def nothing_listed(node):
    yield
    for name in node.listed():
        node.ask("Remove", name=name)
    until(lambda: not node.copies(), "copies that no adapter needs go")


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
    kill_controller(node.server)
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


@pytest.mark.parametrize(
    "stage", [*SHORT, *(pytest.param(one, marks=pytest.mark.long) for one in STAGES if one not in SHORT)], ids=str
)
def test_a_controller_process_that_is_killed_in_an_update(node, stage):
    """A node starts it again: what serves is complete, one of the two, and what is shown says why."""
    method, after, new = stage
    node.add("law", "fused")
    with attach(node.load.model, server=node.server.address, timeout_seconds=HANG_SECONDS) as lora:
        (node.directory / "data" / ORDER).write_text(order(method, after))
        before = status(node.server.address).pid
        with pytest.raises(ServerUnavailableError):
            node.update("law", node.paths["qv"])
        wait_successor(node.server, before)
        assert answers(lora, node.load, "law", "qv" if new else "fused")
        shown = node.ask("Get", name="law")
        assert any("did not end" in warning for warning in shown.warnings) == (not new)
        assert [one.listed for one in shown.versions].count(True) == 1 == len(node.listed())


def test_a_client_that_holds_a_removed_adapter_is_cut_off_at_the_deadline(node):
    node.add("law", "fused")
    with attach(node.load.model, server=node.server.address) as lora:
        with pytest.raises(UnknownAdapterError, match="was it removed"), lora.adapters(["law"]):
            assert node.ask("Remove", name="law", drain_seconds=2.0).holders == 1
            kill_controller(node.server)  # its successor knows when
            until(lambda: not node.ask("List").adapters, "its weights go")
            generate(node.load.model, [node.load.batch[node.load.names.index("fused")]], NEW_TOKENS)
