"""Nodes with `--node-rank auto`: the controller leases them ranks, and a spare takes the rank of one that is gone."""

import pytest

from client_connector.transformers import attach
from tests.support.serving import (
    HANG_SECONDS,
    Nodes,
    answers,
    descendants,
    flags,
    kill,
    kill_controller,
    serves,
    status,
    stop,
    suspended,
    until,
)
from tests.support.workload import workload

AUTO = "--nodes", "3", "--node-rank", "auto"
LEASED = "leased a rank"


class Elastic(Nodes):
    """Node 0, and three more for the two ranks that are left: one of them stands by."""

    def __init__(self, directory, load):
        (directory / "token").write_text("0123456789abcdef of all nodes")
        token = "--join-token-file", str(directory / "token")
        super().__init__(directory, *flags(load, "--layout", "ep1-pp3", *token))
        self.first = self.start("--nodes", "3")
        self.others = [self.start(*AUTO) for _ in range(3)]
        self.first.wait_ready()

    @property
    def address(self):
        return self.first.address

    def serving(self):
        """Return the other nodes by rank, as far as their shards are up."""
        up = {shard.pid: shard.node for shard in status(self.address).shards if shard.state == "up"}
        found = {}
        for one in self.others:
            if one.process.poll() is None:
                ranks = {up[child.pid] for child in descendants(one.process.pid) if child.pid in up}
                found |= dict.fromkeys(ranks, one)
        return found

    def spare(self):
        """Return the node that stands by; one is started where none does."""
        here = [one for one in self.others if one.process.poll() is None and LEASED not in one.log.read_text()]
        if not here:
            here = [self.start(*AUTO)]
            self.others += here
        (one,) = here
        return one

    def taken(self, rank, spare):
        """Wait until a spare has a rank."""
        until(lambda: self.serving().get(rank) is spare, f"the spare is node {rank}")
        self.first.wait_ready()


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    with Elastic(tmp_path_factory.mktemp("auto"), workload("mixtral")) as it:
        yield it


def test_nodes_take_the_free_ranks_and_one_too_many_stands_by(nodes, load):
    assert set(nodes.serving()) == {1, 2}
    spare = nodes.spare()
    until(lambda: "no rank is free" in spare.tail(), "it says why it waits")
    assert serves(nodes.address, load, "qv")


def test_the_spare_takes_the_rank_of_a_node_that_was_killed(nodes, load):
    """From a controller that was restarted, which learns the other's lease."""
    kill_controller(nodes.first)
    lost, spare = nodes.serving()[2], nodes.spare()
    with attach(load.model, nodes.address, timeout_seconds=HANG_SECONDS) as lora:
        kill(lost)
        nodes.taken(2, spare)
        assert answers(lora, load, "fused")


@pytest.mark.long
def test_a_node_that_was_replaced_while_it_was_away_ends(nodes, load):
    """It is stopped, as if its host were cut off, and the spare takes its rank. Later it says why it ends."""
    away = nodes.serving()[1]
    spare = nodes.spare()
    with suspended(away.process.pid, *(one.pid for one in descendants(away.process.pid))):
        nodes.taken(1, spare)
    until(lambda: away.process.poll() is not None, "it ends")
    assert away.process.returncode == 1
    assert "rank 1 was leased to another node while this one was away" in away.tail()
    assert serves(nodes.address, load, "qv")


def test_other_settings_are_refused(nodes):
    other = nodes.start("--nodes", "2", "--node-rank", "auto")
    until(lambda: other.process.poll() is not None, "it ends")
    assert other.process.returncode == 2
    assert "--nodes: got 2, expected 3, as node 0 was started with" in other.tail()


def test_a_spare_stops_when_it_is_asked_to(nodes):
    spare = nodes.start(*AUTO)
    until(lambda: "no rank is free" in spare.tail(), "it stands by")
    assert stop(spare) == 0
