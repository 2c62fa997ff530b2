"""Hosts of a server that are cut off, killed and replaced, under engines that check every answer."""

import contextlib
import json
import os
import random
import subprocess
import sys
import time

import pytest

from client_connector.transformers import attach
from lora_server.demo.engine import generate
from lora_server.demo.launch import READY_SECONDS
from tests.support.cluster import NODES, Cluster, any_fault
from tests.support.hosts import switch
from tests.support.serving import HANG_SECONDS, kill, stop, until
from tests.support.workload import NEW_TOKENS

FAULTS = int(os.environ.get("LORA_FAULTS", "3"))  # `make test-cluster` sets more
CUTS = (1, 5, 35) if "LORA_FAULTS" in os.environ else (1, 8)  # seconds


@pytest.fixture(scope="module")
def running(load, tmp_path_factory):
    with switch() as wires, Cluster(tmp_path_factory.mktemp("cluster"), load, wires) as it:
        started = time.monotonic()
        it.wait_ready(READY_SECONDS)
        print(f"ready {time.monotonic() - started:.1f} s after the last node was started")
        with it.fleet(tmp_path_factory.mktemp("engines")):
            it.heals()
            yield it


@pytest.fixture
def cluster(running):
    """Engines that are right again when a test ends, on a server that is complete."""
    before = running.engines.check()
    yield running
    running.heals()
    print(f"rounds of this test by outcome: {dict(running.engines.check() - before)}")


def test_tokens_equal_pefts_over_tls_on_four_hosts(cluster, load):
    assert [node for node, _ in cluster.shards()] == [0, 1, 2, 3]
    began = time.monotonic()
    with attach(load.model, cluster.address, transport="tcp", timeout_seconds=HANG_SECONDS) as lora:
        print(f"an engine joined in {time.monotonic() - began:.2f} s")
        assert lora.client.described()["transport"] == "tls"
        with lora.adapters(load.names):
            load.check(generate(load.model, load.batch, NEW_TOKENS))


def test_a_narrow_network_changes_no_token(cluster):
    before, hosts = cluster.engines.check(), [*cluster.at, *cluster.engines_at]
    with contextlib.ExitStack() as wide:
        for host in hosts:
            host.narrow("1gbit")
            wide.callback(host.widen)
        cluster.heals()
    assert set(cluster.engines.check() - before) == {"right"}


def test_a_host_behind_a_bad_wire_serves_as_well(cluster):
    """1 % of its frames are lost each way, and each takes a millisecond."""
    kill(cluster.nodes[3])
    cluster.replace(3, cluster.switch.host(loss=0.01, delay_ms=1.0))
    cluster.heals()


@pytest.mark.parametrize("seconds", CUTS)
@pytest.mark.parametrize("who", ["a shard's host", "node 0", "an engine"])
def test_a_host_that_is_cut_off_comes_back_by_itself(cluster, who, seconds):
    host = {"a shard's host": cluster.at[2], "node 0": cluster.at[0], "an engine": cluster.engines_at[0]}[who]
    before = cluster.shards()
    with host.is_cut():
        time.sleep(seconds)  # the outage itself
    print(f"{who} cut off for {seconds} s: all right again {cluster.heals():.1f} s after it was back")
    assert cluster.shards() == before, "none was restarted"


def test_another_host_takes_the_place_of_one_that_died(cluster):
    """Under another address, which engines learn from the server."""
    kill(cluster.nodes[2])
    before = cluster.shards()
    cluster.replace(2, cluster.switch.host())
    print(f"a host replaced: all right again after {cluster.heals():.1f} s")
    after = cluster.shards()
    assert [node for node, _ in after] == [0, 1, 2, 3] and after[2] != before[2]
    assert [*after[:2], after[3]] == [*before[:2], before[3]], "no other shard was restarted"


def test_a_host_that_was_replaced_takes_nothing_back(cluster):
    """It only stood still: its processes go on, and are turned away. They stand by until their rank is free."""
    old = cluster.nodes[1]
    with cluster.stopped(1):
        until(lambda: cluster.states() == ["up", "lost", "up", "up"], "node 0 has noticed")
        cluster.replace(1, cluster.switch.host())
        cluster.heals()
        replaced_by = cluster.shards()
    until(lambda: "was replaced while it was away" in old.log.read_text(), "its shard is turned away")
    cluster.heals()
    assert cluster.shards() == replaced_by and stop(old) == 0


def test_node_0_comes_back_at_its_address(cluster):
    """Shards keep what they have; requests for adapters wait, and none is answered wrongly."""
    before = cluster.shards()
    kill(cluster.nodes[0])
    cluster.restart_first()
    print(f"node 0 restarted: all right again after {cluster.heals():.1f} s")
    assert cluster.shards()[1:] == before[1:], "no other shard was restarted"


@pytest.mark.parametrize("seed", range(FAULTS))
def test_any_fault_of_a_host_is_survived(cluster, seed):
    fault = any_fault(cluster, random.Random(seed))
    print(f"{fault}: all right again after {cluster.heals():.1f} s")


def test_the_doctor_finds_a_narrow_wire_and_one_that_is_cut(cluster):
    """`doctor --cluster` from an engine's host, with a cure for each."""

    def found():
        command = [sys.executable, "-m", "lora_server", "doctor", "--cluster", "--json", "--server", cluster.address]
        done = subprocess.run(
            [*cluster.engines_at[0].prefix, *command], capture_output=True, text=True, check=False, timeout=HANG_SECONDS
        )
        lines = json.loads(done.stdout)
        assert done.returncode == any(one["state"] == "failed" for one in lines)
        assert all(one["cure"] for one in lines if one["state"] != "ok")
        return [(one["check"], one["state"], one["found"]) for one in lines]

    well = found()
    assert [(check, state) for check, state, _ in well[:3]] == [(one, "ok") for one in ("server", "version", "clock")]
    assert [check for check, _, _ in well[3:]] == [f"shard {shard}" for shard in range(NODES)] * 2, well
    assert all(state == "ok" and "MTU 1,500" in text for _, state, text in well[3:7])
    cluster.at[3].narrow("10mbit", burst="16kb")
    try:
        narrow = found()
    finally:
        cluster.at[3].widen()
    assert {state for check, state, _ in narrow if check == "shard 3"} == {"ok", "warning"}, narrow
    with cluster.at[3].is_cut():
        cut = found()
    told = [text for check, state, text in cut if state == "failed" and ("shard 3" in check or "shards [3]" in text)]
    assert told, cut
    cluster.wait_ready()
