"""What was added by name outlives every process: a controller that is killed, a whole node."""

import shutil

import psutil
import pytest

from client_connector.transformers import attach
from lora_server.demo.engine import generate
from lora_server.demo.launch import launch
from lora_server.errors import AdapterFormatError, AdapterSourceError, ServerUnavailableError, UnknownAdapterError
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire import lora_server_pb2_grpc as rpc
from lora_server.wire.listing import all_pages
from lora_server.wire.rpc import call, open_channel
from tests.support.killed_controller_main import ORDER, order
from tests.support.serving import ANYWHERE, HANG_SECONDS, cli, kill, status, until
from tests.support.stages import STAGES
from tests.support.workload import NEW_TOKENS, workload

SECONDS = 60.0


class Node:
    """A server with --data-dir, which may be killed, the controller alone or all of it."""

    def __init__(self, directory):
        self.load, self.directory = workload("mixtral"), directory
        self.paths = {name: shutil.copytree(path, directory / name) for name, path in self.load.paths.items()}
        self.start()

    def start(self):
        flags = ["--base-model", str(self.load.base), "--data-dir", str(self.directory / "data"), *ANYWHERE]
        self.server = launch(self.directory / "log", *flags, "--layout", "ep1-pp1", module="tests.support.killed_serve")
        self.server.wait_ready()

    def ask(self, method, **fields):
        stub = rpc.AdaptersStub
        kind = {"Get": pb.GetAdapterRequest, "List": pb.ListAdaptersRequest}.get(method)
        request = (kind or getattr(pb, f"{method}AdapterRequest"))(**fields)
        with open_channel(self.server.address) as channel:
            return call(getattr(stub(channel), method), request, server=self.server.address, seconds=SECONDS)

    def add(self, name, kind):
        return self.ask("Add", name=name, uri=str(self.paths[kind]), wait_seconds=SECONDS)

    def listed(self):
        """(version, handle, pinned) by name."""
        with open_channel(self.server.address) as channel:
            stub = rpc.AdaptersStub(channel)
            pages = all_pages(lambda one: call(stub.List, one, server=self.server.address, seconds=SECONDS))
        return {one.name: (one.version, one.handle, one.pinned) for one in pages.adapters if one.state != "draining"}

    def copies(self):
        return sorted(one.name for one in (self.directory / "data" / "adapters").iterdir())

    def kill_controller(self):
        before = status(self.server.address).pid
        psutil.Process(before).kill()
        until(lambda: self.server.get("/readyz")[0] != 200 or self.pid() != before, "it is gone")
        self.wait_back()

    def wait_back(self):
        """Until the next controller is there, for channels that saw the last one go, too."""
        self.server.wait_ready()
        until(self.pid, "it answers", HANG_SECONDS)

    def pid(self):
        try:
            return status(self.server.address).pid
        except Exception:
            return 0

    def restart(self):
        kill(self.server)
        self.start()

    def answers(self, lora, name, kind):
        """Whether the name's tokens are those that PEFT has for this adapter."""
        index = self.load.names.index(kind)
        with lora.adapters([name]):
            got = generate(self.load.model, [self.load.batch[index]], NEW_TOKENS)[0]
        return got.tokens == self.load.expected[index].tokens


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    one = Node(tmp_path_factory.mktemp("node"))
    yield one
    one.server.stop()


@pytest.fixture(autouse=True)
def nothing_listed(node):
    yield
    for name in node.listed():
        node.ask("Remove", name=name)
    until(lambda: not node.copies(), "copies that nobody needs go", HANG_SECONDS)


def test_what_was_added_is_there_after_any_death_pins_and_handles_too(node):
    node.add("law", "fused")
    node.add("team/code", "qv")
    for file in node.paths["qv"].iterdir():
        file.unlink()  # what was added is the server's own
    node.ask("Pin", name="law", wait_seconds=SECONDS)
    node.add("gone", "attention")
    node.ask("Remove", name="gone")
    before = node.listed()
    assert before["law"][2] and not before["team/code"][2] and "gone" not in before
    node.kill_controller()
    assert node.listed() == before
    node.restart()
    assert node.listed() == before
    with attach(node.load.model, server=node.server.address) as lora:
        assert node.answers(lora, "law", "fused") and node.answers(lora, "team/code", "qv")
        shutil.copytree(node.load.paths["qv"], node.paths["qv"], dirs_exist_ok=True)
    until(lambda: len(node.copies()) == 2, "a copy that nobody needs goes", HANG_SECONDS)
    assert node.add("new", "experts").handle > max(handle for _, handle, _ in before.values()), "none is used twice"


def test_an_update_is_switched_while_requests_go_on_and_can_be_taken_back(node):
    first = node.add("law", "fused")
    with pytest.raises(AdapterFormatError, match=r"version .* of adapter 'law' serves on|adapter_config"):
        node.ask("Update", name="law", uri=str(node.directory))
    with attach(node.load.model, server=node.server.address) as lora:
        with lora.adapters(["law"]):
            second = node.ask("Update", name="law", uri=str(node.paths["qv"]), wait_seconds=SECONDS)
            assert second.version != first.version and second.handle > first.handle
            index = node.load.names.index("fused")
            held = generate(node.load.model, [node.load.batch[index]], NEW_TOKENS)[0]
            assert held.tokens == node.load.expected[index].tokens, "who holds the earlier one goes on with it"
        assert node.answers(lora, "law", "qv")
        node.restart()
    with attach(node.load.model, server=node.server.address) as lora:
        assert node.answers(lora, "law", "qv")
        shown = [(one.version, one.listed) for one in node.ask("Get", name="law").versions]
        assert shown == [(second.version, True), (first.version, False)]
        assert cli("adapters", "rollback", "law", "--server", node.server.address).returncode == 0
        assert node.answers(lora, "law", "fused")
    told = cli("adapters", "show", "law", "--server", node.server.address).stdout
    assert f"before    {second.version[:12]}" in " ".join(told.split()).replace("before ", "before    ")
    with pytest.raises(UnknownAdapterError, match="no earlier version ffff"):
        node.ask("Rollback", name="law", version="ffff")
    assert node.ask("Rollback", name="law", version=second.version[:8]).version == second.version


def test_a_controller_that_is_killed_at_each_stage_of_an_update(node):
    """Its process, which a node starts again: what serves is whole, one of the two, and what is shown says why."""
    node.add("law", "fused")
    served, other = "fused", "qv"
    with attach(node.load.model, server=node.server.address) as lora:
        for method, after, new in STAGES:
            (node.directory / "data" / ORDER).write_text(order(method, after))
            before = node.pid()
            with pytest.raises(ServerUnavailableError):
                node.ask("Update", name="law", uri=str(node.paths[other]), wait_seconds=SECONDS)
            node.wait_back()
            assert node.pid() != before, (method, after)
            if new:
                served, other = other, served
            assert node.answers(lora, "law", served), (method, after)
            shown = node.ask("Get", name="law")
            assert any("did not end" in warning for warning in shown.warnings) == (not new), (method, after)
            assert [one.listed for one in shown.versions].count(True) == 1 == len(node.listed())
    told = cli("adapters", "update", "law", str(node.directory), "--server", node.server.address)
    told = cli("adapters", "show", "law", "--server", node.server.address)
    assert "the update begun" in told.stdout + told.stderr and "failed" in told.stdout + told.stderr


def test_who_holds_what_was_removed_is_cut_off_at_the_deadline(node):
    node.add("law", "fused")
    with attach(node.load.model, server=node.server.address) as lora:
        with pytest.raises(UnknownAdapterError, match="was it removed"), lora.adapters(["law"]):
            assert node.ask("Remove", name="law", drain_seconds=2.0).holders == 1
            node.kill_controller()  # its successor knows when

            def gone():
                with open_channel(node.server.address) as channel:
                    request = pb.ListAdaptersRequest()
                    return not rpc.AdaptersStub(channel).List(request, timeout=10, wait_for_ready=True).adapters

            until(gone, "its weights go", HANG_SECONDS)
            generate(node.load.model, [node.load.batch[node.load.names.index("fused")]], NEW_TOKENS)


def test_a_name_that_means_other_content_is_not_given_away(node):
    node.add("law", "fused")
    told = cli("adapters", "add", "law", str(node.paths["qv"]), "--server", node.server.address)
    assert told.returncode == 1 and "lora-server adapters update law SOURCE" in " ".join(told.stderr.split())
    assert len(node.listed()) == 1
    with pytest.raises((AdapterSourceError, AdapterFormatError)):
        node.ask("Update", name="law", uri="/nowhere")
    with pytest.raises(UnknownAdapterError, match="not registered here"):
        node.ask("Update", name="none", uri=str(node.paths["qv"]))
