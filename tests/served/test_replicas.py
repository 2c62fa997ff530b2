"""`--replicas 2`, on two nodes of one host, under engines that check every answer: one of twins may always fail."""

import json
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import psutil
import pytest
from structlog.testing import capture_logs

from client_connector.transformers import attach
from lora_server.demo.engine import generate
from lora_server.placement import Layout
from tests.support.fleet import Fleet, now
from tests.support.resizing import children_of, placed, resize
from tests.support.serving import (
    HANG_SECONDS,
    Nodes,
    all_gone,
    answers,
    ask,
    flags,
    kill,
    shard_processes,
    status,
    suspended,
    until,
)
from tests.support.workload import NEW_TOKENS

SHARDS = 4  # ep2, twice
ELSEWHERE = ("--advertise", "127.0.0.2", "--insecure")  # of the other node, as if it were another host's
FLAGS = ("--layout", "ep2-pp1", "--replicas", "2", "--device-pool", "64MiB", "--failover-ms", "400")


class TwinNodes(Nodes):
    """Shards 0 and 1 on node 0, their twins 2 and 3 on node 1."""

    def __init__(self, directory, load):
        super().__init__(directory, *flags(load, *FLAGS))
        self.first = self.start()
        self.second = self.start(*ELSEWHERE)

    def shards(self):
        return status(self.first.address).shards

    def degraded(self):
        return status(self.first.address).degraded

    def steps(self, shard):
        return self.shards()[shard].stats.steps

    def wait_spread(self):
        """Wait until every shard serves steps that it had not served before."""
        before = [(one.pid, one.stats.steps) for one in self.shards()]

        def spread():
            rows = self.shards()
            return all(
                one.stats.steps > (steps if one.pid == pid else 0)
                for one, (pid, steps) in zip(rows, before, strict=True)
            )

        until(spread, "all shards serve steps")
        assert self.degraded() == ""

    def wait_whole(self, engines=2):
        """Wait until all shards are up and every engine is connected to each, also to those that it does not use."""
        until(lambda: self.degraded() == "", "all shards are up")
        until(
            lambda: all(one.stats.clients >= engines for one in self.shards()), "engines are connected to all of them"
        )


@pytest.fixture(scope="module")
def nodes(tmp_path_factory, load):
    with TwinNodes(tmp_path_factory.mktemp("replicas"), load) as it:
        it.first.wait_ready()
        until(lambda: it.degraded() == "", "the other node is up")
        yield it
        assert it.stop() == [0, 0]


@contextmanager
def undisturbed(nodes, load, scratch):
    """Engines by shared memory and by TCP, that see no failure while the block runs, and use all shards after it."""
    with Fleet(load, nodes.first.address, scratch, ("shm", "tcp")) as fleet:
        nodes.wait_spread()
        yield fleet
        until(lambda: nodes.degraded() == "", "the twin is back")
        nodes.wait_spread()
        fleet.check_all_right()


def test_clients_are_spread_over_replicas(nodes, load, tmp_path):
    with undisturbed(nodes, load, tmp_path):
        reply = status(nodes.first.address)
        assert [(one.stage, one.ep_rank, one.replica, one.node) for one in reply.shards] == [
            (0, 0, 0, 0),
            (0, 1, 0, 0),
            (0, 0, 1, 1),
            (0, 1, 1, 1),
        ]
        assert (reply.replicas, reply.ready) == (2, True)
        assert all('replicas="2"' in node.get("/metrics")[1] for node in nodes.all)


def test_a_killed_shard_fails_no_request_and_its_twin_may_be_the_next(nodes, load, tmp_path):
    with undisturbed(nodes, load, tmp_path) as fleet:
        for shard in (0, 2):
            killed = psutil.Process(nodes.shards()[shard].pid)
            killed.kill()
            all_gone([killed])
            fleet.all_right_again(now())
            until(lambda shard=shard, pid=killed.pid: nodes.shards()[shard].pid not in (0, pid), "it is restarted")
            nodes.wait_whole()
            nodes.wait_spread()


@contextmanager
def resizing(nodes, layout):
    """A resize that waits for its last new shard, on the second node, which is stopped before it is up while the block
    runs. The block has what the command answers, and the new shards."""
    address, width = nodes.first.address, Layout.parse(layout).width
    before = {one for node in nodes.all for one in children_of(node)}

    def new():
        return [one for node in nodes.all for one in children_of(node) if one not in before]

    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(resize, address, layout)
        until(lambda: {*children_of(nodes.second)} - before, "a new shard of the second node")
        last = ({*children_of(nodes.second)} - before).pop()
        with suspended(last.pid):
            until(lambda: status(address).resize.done == 2 * width - 1, "the other new shards are up")
            yield answer, new()


def resized(answer):
    done = answer.result()
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_no_request_fails_in_a_resize_or_when_an_old_shard_dies_in_it_or_a_new_one_after_it(nodes, load, tmp_path):
    address = nodes.first.address
    with undisturbed(nodes, load, tmp_path) as fleet:
        for layout, width, dies in (("ep1-pp1", 1, 0), ("ep2-pp1", 2, 1)):
            with resizing(nodes, layout) as (answer, _):
                old = shard_processes(address)
                old[dies].kill()
                all_gone([old[dies]])
                fleet.all_right_again(now())
                until(lambda dies=dies, pid=old[dies].pid: nodes.shards()[dies].pid not in (0, pid), "it is restarted")
                nodes.wait_whole()
                old += shard_processes(address)
            reply = resized(answer)
            assert (reply["moved"], reply["ended"]) == (2, 0), "under the lease that they have"
            all_gone(old)
            assert placed(address) == (layout, reply["generation"])
            assert [(one.replica, one.node) for one in nodes.shards()] == [(0, 0)] * width + [(1, 1)] * width
            nodes.wait_spread()
            killed = shard_processes(address)[0]
            killed.kill()
            all_gone([killed])
            fleet.all_right_again(now())
            until(lambda pid=killed.pid: nodes.shards()[0].pid not in (0, pid), "it is restarted")
            nodes.wait_whole()
            nodes.wait_spread()


def test_a_new_shard_that_dies_before_engines_move_is_named_and_the_old_twins_serve_on(nodes, load, tmp_path):
    address = nodes.first.address
    with undisturbed(nodes, load, tmp_path):
        before, serving = placed(address), shard_processes(address)
        with resizing(nodes, "ep1-pp1") as (answer, new):
            killed = next(one for one in new if one in children_of(nodes.first))
            killed.kill()
            done = answer.result()
        assert done.returncode == 1, done.stdout
        assert "ep1-pp1: lost shards [0] on node 0: see the node's log" in done.stderr, done.stderr
        all_gone(new)
        assert placed(address) == before and shard_processes(address) == serving


@pytest.mark.long
def test_a_node_that_dies_while_new_shards_start_is_named_and_once_it_is_back_a_resize_works(nodes, load, tmp_path):
    address = nodes.first.address
    with undisturbed(nodes, load, tmp_path) as fleet:
        before, serving = placed(address), [one.pid for one in nodes.shards()[:2]]
        with resizing(nodes, "ep1-pp1") as (answer, new):
            kill(nodes.all.pop())
            done = answer.result()
            fleet.all_right_again(now())
        assert done.returncode == 1, done.stdout
        assert re.search("ep1-pp1.* node 1.*", done.stderr), done.stderr
        all_gone(new)
        assert placed(address) == before and [one.pid for one in nodes.shards()[:2]] == serving
        assert nodes.degraded() == "shards [2, 3] are down; their twins serve"
        nodes.second = nodes.start(*ELSEWHERE)
        until(lambda: nodes.degraded() == "", "the node is back")
        nodes.wait_spread()
        for layout in ("ep1-pp1", "ep2-pp1"):
            done = resize(address, layout)
            assert done.returncode == 0, done.stderr
            fleet.all_right_again(now())


def test_a_stopped_shard_fails_no_request(nodes, load, tmp_path):
    """Also requests for adapters that come while it is stopped, and when it goes on."""
    with undisturbed(nodes, load, tmp_path) as fleet:
        pid = nodes.shards()[2].pid
        with suspended(pid):
            fleet.all_right_again(now())
            until(lambda: nodes.degraded() == "shards [2] are down; their twins serve", "the server has noticed")
            assert nodes.first.get("/readyz") == (200, "ok\n")
            assert "lora_server_degraded_shards 1.0" in nodes.first.get("/metrics")[1]
            added = ask(nodes.first.address, "Add", name="late", uri=str(load.paths["qv"]))
            assert added.name == "late"
            with attach(load.model, nodes.first.address, timeout_seconds=HANG_SECONDS) as lora:
                assert answers(lora, load, "late", "qv")
                fleet.all_right_again(now())
                os.kill(pid, signal.SIGCONT)
                until(lambda: nodes.degraded() == "", "it has registered again")
                assert answers(lora, load, "late", "qv")
        assert nodes.shards()[2].pid == pid
    ask(nodes.first.address, "Remove", name="late")


def test_a_host_that_falls_silent_is_waited_for_once(nodes, load):
    """By steps over TCP: its other shard is given up with the first."""
    with attach(load.model, nodes.first.address, transport="tcp", timeout_seconds=HANG_SECONDS) as lora:
        with lora.adapters(load.names):
            generate(load.model, load.batch, 1)
            used = [lora.client.lanes[shard].link for shard in range(2)]
            assert used[0].host == used[1].host and used[0].host in ("127.0.0.1", ELSEWHERE[1])
            stopped = [nodes.shards()[link.shard].pid for link in used]
            with suspended(*stopped):
                with capture_logs() as lines:
                    load.check(generate(load.model, load.batch, NEW_TOKENS))
    assert [one["event"] for one in lines].count("steps go to a shard's twin") == 1, lines
    until(lambda: nodes.degraded() == "", "they have registered again")


def test_shards_that_fall_silent_on_both_hosts_fail_no_step_while_each_has_a_twin(nodes, load):
    """Steps go to a twin on a host that is suspect, where the other twin is silent, too."""
    with attach(load.model, nodes.first.address, transport="tcp", timeout_seconds=HANG_SECONDS) as lora:
        with lora.adapters(load.names):
            generate(load.model, load.batch, 1)
            used = [lora.client.lanes[shard].shard for shard in range(2)]
            stopped = [nodes.shards()[shard].pid for shard in (used[0], (used[1] + 2) % SHARDS)]
            with suspended(*stopped):
                began = now()
                load.check(generate(load.model, load.batch, NEW_TOKENS))
                assert now() - began < HANG_SECONDS, "no step had to wait for its deadline"
    until(lambda: nodes.degraded() == "", "they have registered again")


def test_a_killed_node_fails_no_request(nodes, load, tmp_path):
    with undisturbed(nodes, load, tmp_path) as fleet:
        kill(nodes.all.pop())
        until(lambda: nodes.degraded() == "shards [2, 3] are down; their twins serve", "the server has noticed")
        assert [one.state for one in nodes.shards()] == ["up", "up", "lost", "lost"]
        fleet.all_right_again(now())
        assert nodes.first.get("/readyz") == (200, "ok\n")
        nodes.second = nodes.start(*ELSEWHERE)


def test_a_killed_controller_finds_both_replicas_again(nodes, load, tmp_path):
    with undisturbed(nodes, load, tmp_path) as fleet:
        before, run = status(nodes.first.address).pid, status(nodes.first.address).run
        os.kill(before, signal.SIGKILL)
        nodes.first.wait_ready()
        fleet.all_right_again(now())
        reply = status(nodes.first.address)
        assert reply.pid != before and reply.run == run


def test_both_twins_gone_is_a_typed_error_until_one_is_back(nodes, load, tmp_path):
    with Fleet(load, nodes.first.address, tmp_path, ("shm", "tcp")) as fleet:
        stopped = [nodes.shards()[shard].pid for shard in (1, 3)]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        for pid in stopped:
            os.kill(pid, signal.SIGKILL)
        until(lambda: not {one.pid for one in nodes.shards()} & {*stopped, 0}, "both are restarted")
        fleet.all_right_again(now())
        assert fleet.check()["right"]
    until(lambda: nodes.degraded() == "", "both are up")
    with attach(load.model, nodes.first.address, timeout_seconds=HANG_SECONDS) as lora, lora.adapters(load.names):
        load.check(generate(load.model, load.batch, NEW_TOKENS))
