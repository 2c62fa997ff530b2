"""Controllers and shards that are killed under engines that generate: nothing wrong, nothing untyped, nothing left.

LORA_OUTAGES=20 makes the campaign as long as the bar asks for; by default it is short.
"""

from __future__ import annotations

import json
import os
import random
import signal

import grpc
import pytest
import torch

from client_connector.transformers import attach
from lora_server.demo.engine import generate
from lora_server.demo.launch import launch, running_server
from lora_server.errors import LoraServerError, ServerUnavailableError
from tests.support.checking_engine import held
from tests.support.fleet import Fleet, now
from tests.support.serving import cli, status, until
from tests.support.workload import NEW_TOKENS, workload

OUTAGES = int(os.environ.get("LORA_OUTAGES", "2"))
TRANSPORTS = ("shm", "tcp", "auto")
PATIENCE = 60.0


def flags(load, *more):
    return ["--base-model", str(load.base), "--adapters", str(load.adapters), "--layout", "ep2-pp2", *more]


def settled(address):
    """The server's status, once it is complete; None while it is not."""
    try:
        reply = status(address)
    except grpc.RpcError:
        return None
    return reply if reply.ready else None


@pytest.mark.timeout(120 + 120 * OUTAGES)
def test_a_killed_controller_is_not_missed(tmp_path):
    """Its shards keep weights and clients, steps go on without it, and its successor knows everything again."""
    load = workload("mixtral")
    with running_server(tmp_path / "log", flags(load)) as server:
        with Fleet(load, server.address, tmp_path, TRANSPORTS) as fleet:
            fleet.all_right_again(now(), PATIENCE)
            before = status(server.address)
            shards = [(shard.pid, shard.stats.weight_bytes) for shard in before.shards]
            slowest_ready = 0.0
            for _ in range(OUTAGES):
                killed = now()
                os.kill(status(server.address).pid, signal.SIGKILL)
                until(lambda: settled(server.address), "the server is complete again", PATIENCE)
                slowest_ready = max(slowest_ready, now() - killed)
                fleet.all_right_again(killed, PATIENCE)
            after = status(server.address)
            assert fleet.check().keys() == {"right"}, "engines never noticed"
            assert [shard.pid for shard in after.shards] == [pid for pid, _ in shards]
            assert (after.run, after.clients, after.adapters) == (before.run, before.clients, before.adapters)
            until(lambda: _weights(server.address) == [nbytes for _, nbytes in shards], "shards report their weights")
            print(f"controller killed {OUTAGES} times: complete again in at most {slowest_ready:.1f} s")


def _weights(address):
    return [shard.stats.weight_bytes for shard in status(address).shards]


def test_what_was_added_removed_pinned_and_held_survives_a_controller(tmp_path):
    """With room for half of it; what was pinned survives a shard, too."""
    load = workload("mixtral")
    with running_server(tmp_path / "log", flags(load, "--device-pool", "256KiB")) as server:
        at = ("--server", server.address)
        until(lambda: _pinned(server.address, "per-expert") == (False, "disk"), "it has no room beside the others")
        assert cli("adapters", "pin", "per-expert", *at).returncode == 0
        assert _pinned(server.address, "per-expert") == (True, "ready")
        assert cli("adapters", "add", "late", str(load.paths["qv"]), *at).returncode == 0
        assert cli("adapters", "remove", "gate-up", *at).returncode == 0
        index = load.names.index("fused")
        with attach(load.model, server=server.address) as lora:
            with lora.adapters(["fused"]):
                assert cli("adapters", "remove", "fused", *at).returncode == 0
                os.kill(status(server.address).pid, signal.SIGKILL)
                until(lambda: settled(server.address), "the server is complete again", PATIENCE)
                until(lambda: _holders(server.address, "fused") == ("draining", 1), "the client said what it holds")
                (answer,) = generate(load.model, [load.batch[index]], NEW_TOKENS)
                assert answer.tokens == load.expected[index].tokens, "what drains is served while it is held"
            until(lambda: _holders(server.address, "fused") is None, "what drained is gone")
            assert _holders(server.address, "late") == ("ready", 0)
            assert _holders(server.address, "gate-up") is None, "a removed adapter does not come back"
            with lora.adapters(["late"]):
                (answer,) = generate(load.model, [load.batch[load.names.index("qv")]], NEW_TOKENS)
                assert answer.tokens == load.expected[load.names.index("qv")].tokens
        assert _pinned(server.address, "per-expert") == (True, "ready"), "nobody took its place"
        os.kill(status(server.address).shards[0].pid, signal.SIGKILL)
        until(lambda: _restarts(server.address) == [1, 0, 0, 0], "the shard is there again", PATIENCE)
        until(lambda: _pinned(server.address, "per-expert") == (True, "ready"), "it comes back", PATIENCE)
        assert cli("adapters", "unpin", "per-expert", *at).returncode == 0
        shards = json.loads(cli("adapters", "show", "per-expert", *at, "--json").stdout)["shards"]
        assert [(one["device_layers"], one["layers"]) for one in shards] == [(2, 2)] * 4
        assert _pinned(server.address, "per-expert") == (False, "ready")


def _pinned(address, name):
    shown = json.loads(cli("adapters", "show", name, "--server", address, "--json").stdout)
    return shown["pinned"], shown["state"]


def _restarts(address):
    reply = settled(address)
    return reply and [shard.restarts for shard in reply.shards]


def _holders(address, name):
    listed = json.loads(cli("adapters", "list", "--server", address, "--json").stdout)
    return next(((one["state"], one["holders"]) for one in listed if one["name"] == name), None)


@pytest.mark.timeout(120 + 240 * OUTAGES)
def test_deaths_under_three_engines(tmp_path):
    """Shards and controllers, in a seeded order: typed errors at most, and what engines hold stays flat."""
    load, rng = workload("mixtral"), random.Random(20261121)
    victims = ["shard"] * OUTAGES + ["controller"] * OUTAGES
    rng.shuffle(victims)
    with running_server(tmp_path / "log", flags(load)) as server:
        with Fleet(load, server.address, tmp_path, TRANSPORTS) as fleet:
            fleet.all_right_again(now(), PATIENCE)
            first = None
            for victim in victims:
                reply = status(server.address)
                os.kill(reply.pid if victim == "controller" else rng.choice(reply.shards).pid, signal.SIGKILL)
                until(lambda: settled(server.address), f"complete after the death of a {victim}", PATIENCE)
                fleet.all_right_again(now(), PATIENCE)
                if victim == "shard":
                    first = first or fleet.held()
            outcomes = fleet.check()
            print(
                f"{OUTAGES} shards and {OUTAGES} controllers killed: {dict(outcomes)}, held {first} -> {fleet.held()}"
            )
            for (descriptors, regions), (at_first, regions_at_first) in zip(fleet.held(), first, strict=True):
                assert descriptors <= at_first + 3 and regions <= regions_at_first


def test_a_second_claimant_of_a_rank_waits_for_its_turn(tmp_path):
    """Two nodes with one rank: the second keeps trying, harms nobody, and takes over when the first is gone."""
    load = workload("mixtral")
    common = [*flags(load), "--nodes", "2"]
    first = launch(tmp_path / "log0", *common)
    servers = [first]
    try:
        until(lambda: first.get("/livez")[0] == 200, "node 0 listens", PATIENCE)
        more = ("--node-rank", "1", "--controller", first.address)
        servers.append(launch(tmp_path / "log1", *common, *more))
        first.wait_ready()
        shards = [shard.pid for shard in status(first.address).shards]
        servers.append(launch(tmp_path / "log2", *common, *more))
        until(
            lambda: "is a node rank used twice" in servers[2].tail(), "the second claimant says why it waits", PATIENCE
        )
        assert [shard.pid for shard in status(first.address).shards] == shards
        servers[1].stop()
        until(lambda: _taken_over(first.address, shards), "the second claimant has the rank", PATIENCE)
    finally:
        for server in reversed(servers):
            server.stop()


def test_a_node_0_that_is_started_anew_finds_the_shards_of_the_others(tmp_path):
    """Controller and its node's shards are killed together; the other node's keep what they have, and teach it."""
    load = workload("mixtral")
    first = launch(tmp_path / "log0", *flags(load), "--nodes", "2")
    servers = [first]
    try:
        until(lambda: first.get("/livez")[0] == 200, "node 0 listens", PATIENCE)
        more = ("--node-rank", "1", "--controller", first.address)
        servers.append(launch(tmp_path / "log1", *flags(load), "--nodes", "2", *more))
        first.wait_ready()
        assert cli("adapters", "add", "late", str(load.paths["qv"]), "--server", first.address).returncode == 0
        before = status(first.address)
        with attach(load.model, server=first.address, timeout_seconds=30) as lora:
            with lora.adapters(load.names):
                load.check(generate(load.model, load.batch, NEW_TOKENS))
            first.process.kill()
            again = launch(tmp_path / "log2", *flags(load), "--nodes", "2", "--listen", first.address)
            again.address = first.address
            servers.append(again)
            again.wait_ready()
            until(lambda: settled(first.address), "this process tries to connect again", PATIENCE)
            after = status(first.address)
            assert after.run == before.run
            assert [shard.pid for shard in after.shards[2:]] == [shard.pid for shard in before.shards[2:]]
            until(lambda: _holders(first.address, "late") == ("ready", 0), "what was added lives on")
            with lora.adapters(load.names):
                load.check(generate(load.model, load.batch, NEW_TOKENS))
    finally:
        for server in reversed(servers):
            server.stop()


def _taken_over(address, shards):
    reply = settled(address)
    return reply is not None and all(shard.pid not in shards for shard in reply.shards[2:])


def test_a_left_session_keeps_nothing_whatever_refers_to_it(tmp_path):
    """Tracebacks of errors keep dead sessions: not their descriptors, not their regions."""
    load = workload("mixtral")
    with running_server(tmp_path / "log", flags(load)) as server:
        for transport in ("shm", "tcp"):
            _check_what_is_left(load, server.address, transport)


def _check_what_is_left(load, address, transport):
    kept = []
    with attach(load.model, server=address, transport=transport) as lora, lora.adapters(["fused"]):
        load.model(torch.tensor([[5, 6]]))
        before = held()
        for _ in range(5):
            lora.client.give_up(LoraServerError("as if a step had failed"))
            try:
                lora.client.lanes[0].link.region.request(1)[:8].cast("Q")[0] = 1
                raise LoraServerError("kept")
            except LoraServerError as error:
                kept.append((error, lora.client, lora.client.lanes, lora.client.session))
            load.model(torch.tensor([[5, 6]]))
    now_held = held()
    assert len({id(session) for *_, session in kept}) == 5
    left = kept[0][-1]
    left.release([1]), left.prefetch({1: 0.0})
    with pytest.raises(ServerUnavailableError, match="was left"):
        left.acquire(["fused"])
    assert now_held["regions"] <= before["regions"] and now_held["descriptors"] <= before["descriptors"] + 3
