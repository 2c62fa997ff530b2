"""`lora-server resize` on several nodes, as processes of one host, under engines that check every answer."""

import contextlib
import re
import signal
import threading

import pytest

from client_connector.transformers import attach
from lora_server.placement import Layout, share
from tests.support.fleet import Fleet, now
from tests.support.resizing import children_of, placed, resize
from tests.support.serving import HANG_SECONDS, Nodes, all_gone, answers, flags, kill, shard_processes, status, until


@contextlib.contextmanager
def running(load, tmp_path, count):
    """The nodes of a server in ep2-pp1, of which those above rank 1 have no shards."""
    token = tmp_path / "token"
    token.write_text("the same on all nodes\n")
    common = flags(load, "--layout", "ep2-pp1", "--join-token-file", str(token))
    with Nodes(tmp_path, *common, count=count) as nodes:
        for _ in range(count):
            nodes.start()
        nodes.all[0].wait_ready()
        yield nodes
        assert nodes.stop() == [0] * count


@contextlib.contextmanager
def no_request_fails(load, nodes, tmp_path):
    with Fleet(load, nodes.all[0].address, tmp_path, ("shm", "tcp")) as fleet:
        yield fleet
        fleet.check_all_right()


def resized(nodes, layout, generation):
    """Resize the server; return once the old shards are gone, and each node has its share of the new ones."""
    address = nodes.all[0].address
    old, done = shard_processes(address), resize(address, layout)
    assert done.returncode == 0, done.stderr
    all_gone(old)
    assert placed(address) == (layout, generation)
    number = Layout.parse(layout).num_shards
    own = [rank for rank in range(nodes.count) for _ in share(number, nodes.count, rank)]
    assert [one.node for one in status(address).shards] == own


def test_two_nodes_go_over_to_other_layouts_and_one_that_restarts_comes_back_in_the_new_one(load, tmp_path):
    with running(load, tmp_path, 2) as nodes:
        resized(nodes, "ep2-pp2", 2)  # node 1 has fetched no adapter yet
        with no_request_fails(load, nodes, tmp_path) as fleet:
            for generation, layout in enumerate(("ep1-pp1", "ep2-pp2"), start=3):
                resized(nodes, layout, generation)
                fleet.all_right_again(now())
        first, killed = nodes.all[0], nodes.all.pop()
        kill(killed)
        until(lambda: first.get("/readyz") == (503, "shards not up: [2, 3]\n"), "node 0 has noticed")
        nodes.start()
        first.wait_ready()
        assert placed(first.address) == ("ep2-pp2", 4)
        with attach(load.model, first.address, timeout_seconds=HANG_SECONDS) as lora:
            assert answers(lora, load, "fused")


@pytest.mark.long
def test_a_node_that_dies_or_is_silent_before_the_new_shards_serve_is_named_and_the_old_ones_serve_on(load, tmp_path):
    """Four nodes, of which the last two are to start their first shards."""
    with running(load, tmp_path, 4) as nodes:
        first, second, third, fourth = nodes.all
        with no_request_fails(load, nodes, tmp_path) as fleet:
            resized(nodes, "ep2-pp2", 2)  # so all nodes are connected
            resized(nodes, "ep2-pp1", 3)
            serving, said = shard_processes(first.address), []
            asking = threading.Thread(target=lambda: said.append(resize(first.address, "ep2-pp2")))
            fourth.process.send_signal(signal.SIGSTOP)  # its shard never starts
            asking.start()
            until(lambda: said or status(first.address).resize.total, "nodes were told to start them")
            kill(fourth)
            asking.join()
            assert said[0].returncode == 1 and "node 3: its connection" in said[0].stderr, said[0].stderr
            nodes.all.pop()
            nodes.start()
            third.process.send_signal(signal.SIGSTOP)
            late = r"not up are .*shards \[2\] on node 2|node 2: its connection"  # keepalive may find it first
            done = resize(first.address, "ep2-pp2", "--seconds", "5")
            third.process.send_signal(signal.SIGCONT)
            assert done.returncode == 1 and re.search(late, done.stderr), done.stderr
            until(lambda: len(children_of(second)) == 1 and not children_of(third), "the new shards ended")
            assert placed(first.address) == ("ep2-pp1", 3) and shard_processes(first.address) == serving
            fleet.all_right_again(now())
            resized(nodes, "ep2-pp2", 6)
            fleet.all_right_again(now())
            resized(nodes, "ep1-pp1", 7)
