"""Two hosts whose network goes away while engines on both generate: typed errors at most, all back by itself."""

import contextlib
import os
import time
from dataclasses import replace

import pytest

from lora_server.demo.launch import READY_SECONDS
from tests.support.clocks import FAST, environment
from tests.support.fleet import Fleet, now
from tests.support.hosts import hosts, missing
from tests.support.serving import Nodes, flags, status, until
from tests.support.workload import workload

MISSING = missing()
BACK_SECONDS = 5.0
LIMIT_SECONDS = 6.0  # of leases, and of silent shards
LONG_SECONDS = 35 if "LORA_OUTAGES" in os.environ else 8
BUSY = 5  # a machine that is so many times busier


@pytest.mark.long
@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_a_network_that_goes_away_comes_back_by_itself(tmp_path, monkeypatch):
    monkeypatch.setenv(*environment(replace(FAST, shard_silence=LIMIT_SECONDS)).popitem())
    load = workload("mixtral")
    with contextlib.ExitStack() as stack:
        near, far = stack.enter_context(hosts(2))
        common = flags(load, "--layout", "ep1-pp2", "--insecure", "--lease-seconds", str(LIMIT_SECONDS))
        nodes = stack.enter_context(Nodes(tmp_path, *common))
        first, second = (nodes.start(host=one.address, prefix=one.prefix) for one in (near, far))
        first.wait_ready(READY_SECONDS)
        shards = [(shard.pid, shard.node) for shard in status(first.address).shards]
        assert [node for _, node in shards] == [0, 1]
        prefixes = (near.prefix, far.prefix)
        fleet = stack.enter_context(
            Fleet(load, first.address, tmp_path, ("tcp", "tcp"), prefixes=prefixes, timeout=4.0)
        )
        fleet.all_right_again(now(), READY_SECONDS)
        for seconds in (1, 5, LONG_SECONDS):
            far.cut()
            time.sleep(seconds)  # the outage itself
            far.mend()
            mended = now()
            slowest = fleet.all_right_again(mended, BACK_SECONDS * BUSY)
            until(lambda: first.get("/readyz")[0] == 200, "the server is complete", BACK_SECONDS * BUSY)
            print(f"link down for {seconds} s: all engines right again {slowest:.1f} s after it was up")
            print(dict(fleet.check()))
        assert [(shard.pid, shard.node) for shard in status(first.address).shards] == shards, "none was restarted"
        assert second.process.poll() is None
        print(first.tail(), second.tail())
