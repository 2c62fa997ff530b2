"""Controllers, shards and nodes that are killed under engines that generate: nothing wrong, nothing untyped.

LORA_OUTAGES=20 makes the campaign as long as the bar asks for; by default it is short.
"""

import contextlib
import json
import os
import random
import signal
from collections import Counter

import psutil
import pytest

from client_connector.serving.leases import AdapterLeases
from client_connector.serving.settings import Settings
from client_connector.transformers import attach
from lora_server.demo.engine import generate
from lora_server.demo.launch import launch, running_server
from lora_server.errors import LoraServerError, ShardUnavailableError
from tests.support import serving
from tests.support.fleet import Fleet, now
from tests.support.serving import (
    HANG_SECONDS,
    Nodes,
    all_gone,
    cli,
    complete,
    flags,
    kill_controller,
    kill_shard,
    status,
    until,
)
from tests.support.workload import NEW_TOKENS, workload

OUTAGES = int(os.environ.get("LORA_OUTAGES", "2"))
LAYOUT = ("--layout", "ep2-pp2")


def test_what_was_added_removed_pinned_and_held_survives_a_controller(load, tmp_path):
    """With a pool for half of the adapters; what was pinned survives a shard, too."""
    with running_server(tmp_path / "log", flags(load, *LAYOUT, "--device-pool", "256KiB")) as server:
        at = ("--server", server.address)

        def pinned():
            shown = serving.listed(server.address)["per-expert"]
            return shown.pinned, shown.state

        def holds(name):
            found = serving.ask(server.address, "List").adapters
            return next(((one.state, one.holders) for one in found if one.name == name), None)

        until(lambda: pinned() == (False, "disk"), "the others fill the pool")
        assert cli("adapters", "pin", "per-expert", *at).returncode == 0
        assert pinned() == (True, "ready")
        assert cli("adapters", "add", "late", str(load.paths["qv"]), *at).returncode == 0
        assert cli("adapters", "remove", "gate-up", *at).returncode == 0
        with attach(load.model, server=server.address) as lora:
            with lora.adapters(["fused"]):
                assert cli("adapters", "remove", "fused", *at).returncode == 0
                kill_controller(server)
                until(lambda: holds("fused") == ("draining", 1), "the client said what it holds")
                assert serving.generates(load, "fused"), "what drains is served while it is held"
            until(lambda: holds("fused") is None, "what drained is gone")
            until(lambda: holds("late") == ("ready", 0), "it was loaded before")
            assert holds("gate-up") is None, "a removed adapter does not come back"
            assert serving.answers(lora, load, "late", "qv")
        assert pinned() == (True, "ready"), "nothing evicted it"
        kill_shard(server, 0)
        assert [shard.restarts for shard in status(server.address).shards] == [1, 0, 0, 0]
        until(lambda: pinned() == (True, "ready"), "it is loaded again")
        assert cli("adapters", "unpin", "per-expert", *at).returncode == 0
        shards = json.loads(cli("adapters", "show", "per-expert", *at, "--json").stdout)["shards"]
        assert [(one["device_layers"], one["layers"]) for one in shards] == [(2, 2)] * 4
        assert pinned() == (False, "ready")


@pytest.mark.long
@pytest.mark.timeout(900 + 240 * OUTAGES)
def test_deaths_under_three_engines(load, tmp_path):
    """Shards and controllers, in a seeded order: typed errors at most, and what engines hold stays flat."""
    rng = random.Random(20261121)
    victims = ["shard"] * OUTAGES + ["controller"] * OUTAGES
    rng.shuffle(victims)
    with running_server(tmp_path / "log", flags(load, *LAYOUT)) as server:
        with Fleet(load, server.address, tmp_path, ("shm", "tcp", "auto")) as fleet:
            first = None
            for victim in victims:
                if victim == "controller":
                    kill_controller(server)
                else:
                    kill_shard(server, rng.randrange(4))
                fleet.all_right_again(now())
                if victim == "shard":
                    first = first or fleet.held()
            print(f"{OUTAGES} of each killed: {dict(fleet.check())}, held {first} -> {fleet.held()}")
            for (descriptors, regions), (at_first, regions_at_first) in zip(fleet.held(), first, strict=True):
                assert descriptors <= at_first + 3 and regions <= regions_at_first


@pytest.mark.long
@pytest.mark.timeout(900 + 120 * OUTAGES)
def test_a_shard_and_the_controller_that_die_together_take_no_place_with_them(load, tmp_path):
    """There is a place for one adapter, which is given at once, not when the lease of before ends."""
    small = ("--layout", "ep2-pp1", "--max-active-adapters", "1", "--lease-seconds", str(10 * HANG_SECONDS))
    took, outcomes = [], Counter()
    with running_server(tmp_path / "log", flags(load, *small)) as server:
        with attach(load.model, server=server.address, timeout_seconds=HANG_SECONDS) as lora:
            for number in range(OUTAGES):
                before = status(server.address)
                with lora.adapters(["fused"]):
                    assert serving.generates(load, "fused")
                    victims = [psutil.Process(one) for one in (before.pid, before.shards[number % 2].pid)]
                    for victim in victims:
                        victim.kill()
                    began = now()
                    all_gone(victims)
                    with contextlib.suppress(ShardUnavailableError):  # or it joins anew at once
                        serving.generates(load, "fused")
                while not outcomes["right"] > number:
                    assert now() - began < HANG_SECONDS, outcomes
                    try:
                        outcomes["right" if serving.answers(lora, load, "qv") else "wrong"] += 1
                    except LoraServerError as error:
                        outcomes[error.code] += 1
                took.append(round(now() - began, 1))
                until(lambda: complete(server.address), "it is complete again")
    print(f"{OUTAGES} times: {dict(outcomes)}, served again after {took} s")
    assert not outcomes["wrong"] and not outcomes["admission"], outcomes


@pytest.mark.long
def test_a_second_claimant_of_a_node_rank_waits_for_its_turn(tmp_path):
    """The second of two nodes with one rank keeps trying, harms none, and takes over when the first is gone."""
    with Nodes(tmp_path, *flags(workload("mixtral"), *LAYOUT)) as nodes:
        first, second = nodes.start(), nodes.start()
        first.wait_ready()
        shards = [shard.pid for shard in status(first.address).shards]
        third = nodes.start()
        until(lambda: "is a node rank used twice" in third.tail(), "the second claimant says why it waits")
        assert [shard.pid for shard in status(first.address).shards] == shards
        second.stop()

        until(
            lambda: (reply := complete(first.address)) and all(shard.pid not in shards for shard in reply.shards[2:]),
            "the second claimant has the rank",
        )


@pytest.mark.long
def test_a_node_0_that_is_started_anew_finds_the_shards_of_the_others(load, tmp_path):
    """Controller and its node's shards are killed together; the other node's keep what they have, and report it."""
    with Nodes(tmp_path, *flags(load, *LAYOUT)) as nodes:
        first = nodes.start()
        nodes.start()
        first.wait_ready()
        assert cli("adapters", "add", "late", str(load.paths["qv"]), "--server", first.address).returncode == 0
        before = status(first.address)
        with attach(load.model, server=first.address, timeout_seconds=HANG_SECONDS) as lora:
            with lora.adapters(load.names):
                load.check(generate(load.model, load.batch, NEW_TOKENS))
            os.kill(first.process.pid, signal.SIGKILL)
            first.process.wait(HANG_SECONDS)
            again = nodes.start("--listen", first.address, joins=False)
            again.address = first.address
            again.wait_ready()
            until(lambda: complete(first.address), "this process connects again")
            after = status(first.address)
            assert after.run == before.run
            assert [shard.pid for shard in after.shards[2:]] == [shard.pid for shard in before.shards[2:]]
            until(lambda: serving.listed(first.address)["late"].state == "ready", "what was added lives on")
            with lora.adapters(load.names):
                load.check(generate(load.model, load.batch, NEW_TOKENS))


def test_the_first_request_after_a_long_outage_is_served(load, tmp_path):
    """Requests have failed at once, since the server was away for longer than any waits: now it is back."""
    first, name = launch(tmp_path / "first", *flags(load)), next(iter(load.paths))
    first.wait_ready()
    leases = AdapterLeases(Settings(first.address, timeout_seconds=5.0), lambda text: ())

    def failure(request):
        leases.hold(request, name, ())
        until(lambda: not leases.state(request).is_undecided, "it is answered")
        failure = leases.state(request).failure
        leases.release(request)
        return failure

    try:
        serving.kill(first)
        until(lambda: failure("r"), "it has been away for longer than any request waits")
        with running_server(tmp_path / "second", flags(load, "--listen", first.address)):
            assert failure("next") is None
    finally:
        leases.close()
