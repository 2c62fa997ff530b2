"""Servers of two nodes: no directory in common, and a network that goes away."""

import shutil

import psutil
import pytest

from client_connector.transformers import attach
from lora_server.adapters import CONFIG, WEIGHTS
from lora_server.demo.engine import generate
from tests.support.fleet import Fleet
from tests.support.serving import (
    HANG_SECONDS,
    Nodes,
    all_gone,
    answers,
    ask,
    cli,
    kill,
    listed,
    metric,
    reached,
    status,
    stop,
    until,
)  # fmt: skip
from tests.support.workload import NEW_TOKENS, workload

OTHERS = ("shard 2", "shard 3")


def states(address):
    """The states of all shards; none while node 0 is away."""
    reply = reached(address)
    return {shard.state for shard in reply.shards} if reply else set()


class ApartNodes(Nodes):
    """Node 0, which alone is told of `--adapters`, and node 1."""

    def __init__(self, load, directory):
        self.load = load
        token = directory / "token"
        token.write_text("the same on both nodes\n")
        common = ["--base-model", str(load.base), "--layout", "ep2-pp2", "--join-token-file", str(token)]
        super().__init__(directory, *common)
        own = ("--adapters", str(load.adapters), "--adapter-root", str(directory))
        self.own = [(*own, "--data-dir", str(directory / "data0")), ()]
        self.counts_all = True  # node 1's shards count every fetch since their disk cache was empty
        self.move_data("data1")
        self.first, self.second = (self.start(*flags) for flags in self.own)

    def move_data(self, name):
        """Give node 1 another data directory, from its next start on."""
        data = self.directory / name
        self.own[1], self.cache = ("--data-dir", str(data)), data / "disk-cache"

    def restart(self, rank):
        """Stop a node and start it again, with its flags, at its address."""
        assert stop(self.all[rank]) == 0
        self.counts_all &= rank == 0
        where = () if rank else ("--listen", self.first.address)
        self.start(*where, *self.own[rank], joins=rank > 0)
        if not rank:
            self.all[-1].address = self.first.address
        self.all[rank] = self.all.pop()
        self.first, self.second = self.all

    def ask(self, method, **fields):
        return ask(self.first.address, method, **fields)

    def add_late(self):
        """Add "late", with the content of "qv", unless it is there; its source goes at once."""
        if "late" not in listed(self.first.address):
            source = shutil.copytree(self.load.paths["qv"], self.directory / "source")
            assert self.ask("Add", name="late", uri=str(source)).name == "late"
            shutil.rmtree(source)

    def attach(self, transport="auto"):
        return attach(self.load.model, self.first.address, transport=transport, timeout_seconds=HANG_SECONDS)

    def fetched(self):
        """Adapters that node 1's shards fetched, together."""
        text = self.first.get("/metrics")[1]
        return sum(metric(text, f'lora_server_fetches_total{{process="{one}"}}') for one in OTHERS)

    def versions(self):
        """Versions whose files lie on node 1."""
        return {one.name.split(".")[0] for one in self.cache.iterdir() if one.is_dir()}


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    with ApartNodes(workload("mixtral"), tmp_path_factory.mktemp("nodes")) as it:
        it.first.wait_ready()
        yield it
        assert it.stop() == [0, 0]


def test_all_that_node_0_has_is_served_and_fetched_once(nodes):
    """From its --adapters, and what was added, whose source is gone; once for both shards of node 1."""
    load, before = nodes.load, nodes.fetched()
    assert [shard.node for shard in status(nodes.first.address).shards] == [0, 0, 1, 1]
    nodes.add_late()
    for transport in ("shm", "tcp"):
        with nodes.attach(transport) as lora:
            with lora.adapters(load.names):
                load.check(generate(load.model, load.batch, NEW_TOKENS))
            assert answers(lora, load, "late", "qv")
    contents = len(load.paths)  # "late" has that of "qv"
    until(lambda: len(nodes.versions()) == contents, "what another test replaced is gone")
    if not before and nodes.counts_all:
        until(lambda: nodes.fetched() >= contents, "counters are told")
        assert nodes.fetched() == contents


@pytest.mark.long
@pytest.mark.parametrize("rank", [1, 0])
def test_a_drained_node_is_restarted_under_load_and_no_request_fails(nodes, tmp_path, rank):
    """As docs/operations.md and deploy/README.md say: drain, restart, look at `status`, admit again."""
    address = nodes.first.address
    with Fleet(nodes.load, address, tmp_path, ("shm", "tcp"), timeout=HANG_SECONDS) as fleet:
        pids = [shard.pid for shard in status(address).shards]
        assert cli("drain", "--server", address).returncode == 0
        nodes.restart(rank)
        until(lambda: states(address) == {"up"}, "every shard is up")
        assert cli("drain", "--undo", "--server", address).returncode == 0
        fleet.check_all_right()
        changed = [old != shard.pid for old, shard in zip(pids, status(address).shards, strict=True)]
        assert changed == ([True, True, False, False] if rank == 0 else [False, False, True, True])


@pytest.mark.long
def test_damaged_files_come_again_also_while_the_controller_does(nodes):
    load = nodes.load
    with nodes.attach() as lora, lora.adapters(load.names):
        load.check(generate(load.model, load.batch, NEW_TOKENS))
        for weights in nodes.cache.glob(f"*/{WEIGHTS}"):
            content = bytearray(weights.read_bytes())
            content[-8:] = bytes(8)
            weights.write_bytes(content)
        reply = status(nodes.first.address)
        killed = [psutil.Process(pid) for pid in (reply.pid, reply.shards[2].pid, reply.shards[3].pid)]
        nodes.counts_all = False
        for process in killed:
            process.kill()
        all_gone(killed)
        nodes.first.wait_ready()
        load.check(generate(load.model, load.batch, NEW_TOKENS))
    assert "files of the disk cache were changed; fetching them again" in nodes.second.log.read_text()


def test_what_is_replaced_or_removed_goes_from_node_1(nodes):
    nodes.add_late()
    served = nodes.ask("Get", name="late").version
    until(lambda: served in nodes.versions(), "it is there")
    path = shutil.copytree(nodes.load.paths["attention"], nodes.directory / "another")
    config = path / CONFIG
    config.write_text(config.read_text().replace('"lora_alpha": ', '"lora_alpha": 1'))
    updated = nodes.ask("Update", name="late", uri=str(path)).version
    until(lambda: updated in nodes.versions(), "the new one is there")
    nodes.ask("Remove", name="late")
    until(lambda: updated not in nodes.versions(), "it went")
    assert served in nodes.versions(), "'qv' means it"


def test_another_host_takes_the_rank_of_a_dead_node(nodes):
    """It has an empty disk; docs/operations.md says what to do."""
    load, first = nodes.load, nodes.first
    kill(nodes.all.pop())

    def others():
        return [(shard.state, shard.node) for shard in status(first.address).shards[2:]]

    until(lambda: others() == [("lost", 1), ("lost", 1)], "node 0 has noticed")
    assert first.get("/readyz") == (503, "shards not up: [2, 3]\n")
    nodes.move_data("data of another host")
    nodes.second = nodes.start(*nodes.own[1])
    first.wait_ready()
    assert others() == [("up", 1), ("up", 1)]
    with nodes.attach() as lora, lora.adapters(load.names):
        load.check(generate(load.model, load.batch, NEW_TOKENS))
