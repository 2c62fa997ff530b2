"""Killed and stopped clients, shards and controllers under load: the affected get typed errors, all others none."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch

from client_connector.remote import RemoteServer
from client_connector.transformers import attach
from lora_server import errors
from lora_server.demo import children, tiny
from lora_server.demo.engine import generate
from lora_server.demo.launch import RunningServer, launch, running_server
from lora_server.wire import bounds
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire import lora_server_pb2_grpc as rpc
from lora_server.wire.rpc import call, open_channel
from tests.support import serving
from tests.support.checking_engine import held
from tests.support.fleet import Fleet, now
from tests.support.serving import HANG_SECONDS, complete, flags, status, until
from tests.support.workload import NEW_TOKENS, Workload

LEASE_SECONDS = 4  # a silent client's; those that the tests watch are heard each second
MOST_CLIENTS = 16


@pytest.fixture(scope="module")
def running(load, tmp_path_factory):
    more = ("--layout", "ep2-pp2", "--lease-seconds", str(LEASE_SECONDS), "--clients-per-token", str(MOST_CLIENTS))
    with running_server(tmp_path_factory.mktemp("server") / "log", flags(load, *more)) as one:
        yield one


@pytest.fixture
def server(running):
    """The module's server, complete and without clients."""
    until(lambda: (reply := complete(running.address)) and not reply.clients, "the server recovered")
    running.wait_ready()
    return running


def restarts(server: RunningServer) -> list[int]:
    return [shard.restarts for shard in status(server.address).shards]


def test_shards_register_again_whatever_an_engine_joined_with(server):
    """What a shard keeps of a client goes to the next controller in one message."""
    wide, before = "\U00010300" * bounds.DEFAULT.length, restarts(server)
    window = "x" * (bounds.REQUEST_BYTES - 60)  # a join that fits a message, and no report of it does
    too_large = [{"instance": "x" * 3_900_000}, {"instance": window}, {"served_names": [window]}]
    with open_channel(server.address) as channel:

        def join(**fields):
            stub = rpc.ClientsStub(channel)
            return call(stub.Join, pb.JoinRequest(**fields), server=server.address, seconds=HANG_SECONDS)

        for fields in (*too_large, {"served_names": ["x"] * 65}, {"instance": "\x1b[2J"}, {"served_names": ["a\x00"]}):
            with pytest.raises(errors.ConfigError, match=r"JoinRequest.*: got"):
                join(**fields)
        with ThreadPoolExecutor(MOST_CLIENTS + 1) as pool:  # at once, for a silent client's lease soon ends
            joins = [pool.submit(join, instance=wide, served_names=[wide] * 64) for _ in range(MOST_CLIENTS + 1)]
        with pytest.raises(errors.LimitError, match="--clients-per-token"):
            for one in joins:
                one.result()
    serving.kill_controller(server)
    assert restarts(server) == before


def test_a_killed_client_harms_no_other(load, server):
    before = restarts(server)
    victims = [serving.start_engine(str(load.base), server.address, "fused", "experts") for _ in range(2)]
    with attach(load.model, server=server.address) as lora, lora.adapters(load.names):
        for victim in victims:
            victim.kill()
            victim.communicate(timeout=HANG_SECONDS)
            load.check(generate(load.model, load.batch, NEW_TOKENS))
        until(lambda: status(server.address).clients == 1, "the dead clients' leases are gone")
        load.check(generate(load.model, load.batch, NEW_TOKENS))
    assert restarts(server) == before


# tests/chaos has the other two
@pytest.mark.parametrize("setup", ["shm, independent", pytest.param("tcp, leader", marks=pytest.mark.long)])
def test_a_killed_shard_is_named_and_restarted(request, load, tmp_path, setup):
    transport, coordination = setup.split(", ")
    with contextlib.ExitStack() as stack:
        if coordination == "independent":
            server = request.getfixturevalue("server")
        else:
            more = flags(load, "--layout", "ep2-pp2", "--coordination", coordination)
            server = stack.enter_context(running_server(tmp_path / "log", more))
        before, lost = restarts(server), server.log.read_text().count('"shard lost"')
        joined = attach(load.model, server.address, transport=transport, timeout_seconds=HANG_SECONDS)
        lora = stack.enter_context(joined)
        for shard in (2, 3):  # with a leader: the leader, and a follower
            with lora.adapters(load.names):
                load.check(generate(load.model, load.batch, NEW_TOKENS))
                killed = _kill_during_step(load, status(server.address).shards[shard].pid)
                assert f"shard {shard}" in str(killed)
                load.check(generate(load.model, load.batch, NEW_TOKENS))  # joins anew, in the same block
        log = server.log.read_text()
        assert "shard 3 (stage 1, ep_rank 1) died: killed by SIGKILL; restarting it" in log
        assert log.count('"shard lost"') - lost == 2
        assert [now - then for now, then in zip(restarts(server), before, strict=True)] == [0, 0, 1, 1]
        assert {shard.state for shard in status(server.address).shards} == {"up"}


def _kill_during_step(load: Workload, pid: int) -> errors.ShardUnavailableError:
    """Kill a shard between two layers of a forward pass; what the pass raised, which is no time-out."""
    killed = []

    def kill(module, args):
        if not killed:
            killed.append(pid)
            os.kill(pid, signal.SIGKILL)

    handle = load.model.model.layers[1].register_forward_pre_hook(kill)
    try:
        with pytest.raises(errors.ShardUnavailableError) as caught:
            generate(load.model, load.batch, NEW_TOKENS)
    finally:
        handle.remove()
    return caught.value


def test_clients_of_other_shards_see_nothing_of_a_dead_one(load, server):
    """An adapter on attention alone never meets a shard that owns no dense site of its layers."""
    with attach(load.model, server=server.address, transport="shm") as lora:
        owners = {lora.client.placement.owners(site)[0] for site in load.spec.sites(("qkv", "o"))}
        assert owners == {0, 1, 2, 3}
        with lora.adapters(["qv"]):
            qkv = {lora.client.placement.owners(site)[0] for site in load.spec.sites(("qkv",))}
            bystander = next(shard for shard in range(4) if shard not in qkv)
            ids = torch.tensor([load.batch[0].prompt])
            expected = load.model(ids).logits
            os.kill(status(server.address).shards[bystander].pid, signal.SIGKILL)
            assert torch.equal(load.model(ids).logits, expected)


def test_a_stopped_shard_times_out_with_names_and_is_not_ready(load, server):
    ids = torch.tensor([[5, 6, 7]])
    with attach(load.model, server=server.address, timeout_seconds=5) as lora, lora.adapters(["fused"]):
        expected = load.model(ids).logits
        with serving.suspended(status(server.address).shards[0].pid):
            with pytest.raises(errors.StepError, match=r"shard 0 slot \d+ seq \d+"):
                load.model(ids)
            until(lambda: server.get("/readyz") == (503, "shards not up: [0]\n"), "/readyz sees it")
        server.wait_ready()
        assert torch.equal(load.model(ids).logits, expected)


@pytest.mark.long
def test_one_deadline_for_all_that_a_block_asks_of_a_stopped_controller(load, server):
    """Each part of a block that had a deadline of its own would double the time."""
    seconds = 6.0
    controller = psutil.Process(status(server.address).pid)
    with attach(load.model, server=server.address, timeout_seconds=seconds) as lora:
        with lora.adapters(["fused"]):
            controller.suspend()
            began = time.monotonic()
        assert time.monotonic() - began < seconds, "releasing does not wait for it"
        began = time.monotonic()
        with pytest.raises(errors.ServerUnavailableError, match="no answer within"), lora.adapters(["fused"]):
            pass
        assert time.monotonic() - began < 2 * seconds
        lora.client.give_up(errors.StepError("a step broke"))
        began = time.monotonic()
        with pytest.raises(errors.ServerUnavailableError), lora.adapters(["fused"]):
            pass
        assert time.monotonic() - began < 2 * seconds, "leaving and joining anew"
        controller.resume()
        server.wait_ready()
        with lora.adapters(["fused"]):
            load.model(torch.tensor([[5, 6]]))
        until(lambda: holders(server) == {0}, "what was released meanwhile is told later")


def holders(server: RunningServer) -> set[int]:
    return {one.holders for one in serving.listed(server.address).values()}


def test_a_silent_client_loses_its_lease_and_what_it_held(load, server):
    engine = serving.start_engine(str(load.base), server.address, "fused")
    process = psutil.Process(engine.pid)
    try:
        process.suspend()
        until(lambda: status(server.address).clients == 0, "the lease expires")
        assert holders(server) == {0}
        process.resume()
        until(lambda: engine.poll() is not None or status(server.address).clients, "it ends, or joins anew")
        assert engine.poll() in (None, 1), "it joins anew, or ends with a typed error"
    finally:
        engine.kill()
        engine.communicate(timeout=HANG_SECONDS)


def test_engines_do_not_notice_that_a_controller_is_killed(load, server, tmp_path):
    """Its shards keep weights and clients, steps go on without it, and its successor knows everything again."""

    weights = lambda: [shard.stats.weight_bytes for shard in status(server.address).shards]  # noqa: E731
    with Fleet(load, server.address, tmp_path, ("shm", "tcp")) as fleet:
        before = status(server.address)
        nbytes = weights()
        killed = now()
        serving.kill_controller(server)
        print(f"complete again after {now() - killed:.1f} s")
        fleet.all_right_again(killed)
        after = status(server.address)
        assert fleet.check().keys() == {"right"}, "engines never noticed"
        assert [shard.pid for shard in after.shards] == [shard.pid for shard in before.shards]
        assert (after.run, after.clients, after.adapters) == (before.run, before.clients, before.adapters)
        until(lambda: weights() == nbytes, "shards report their weights")


def test_a_server_has_as_many_descriptors_as_it_may(load, tmp_path):
    few = ("sh", "-c", 'ulimit -Sn 1000; exec "$@"', "sh")
    server = launch(tmp_path / "log", *flags(load), prefix=few)
    try:
        server.wait_ready()
        reply = status(server.address)
        for pid in (server.process.pid, reply.pid, reply.shards[0].pid):
            soft, hard = psutil.Process(pid).rlimit(psutil.RLIMIT_NOFILE)
            assert soft == hard > 1000
    finally:
        server.stop()


TAKE = """
import contextlib, os, select, socket, sys
os.setuid(65534)
print("trying", flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    for port in map(int, sys.argv[1:]):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            print("took", port, flush=True)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_no_other_user_takes_a_port_of_a_dead_controller(server):
    """It tries all the time; whoever answers there is shown tokens and told what shards do."""
    ports = [one.rpartition(":")[2] for one in (server.address, server.http)]
    command = [sys.executable, "-c", TAKE, *ports]
    with children.start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout.readline() == "trying\n"
            serving.kill_controller(server)
            assert other.communicate(timeout=HANG_SECONDS)[0] == ""
        finally:
            other.kill()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_session_that_was_left_keeps_nothing_though_errors_refer_to_it(load, server, transport):
    """Tracebacks of errors keep dead sessions: not their descriptors, not their regions."""
    kept = []
    with attach(load.model, server=server.address, transport=transport) as lora, lora.adapters(["fused"]):
        load.model(torch.tensor([[5, 6]]))
        before = held()
        for _ in range(5):
            lora.client.give_up(errors.LoraServerError("as if a step had failed"))
            try:
                lora.client.lanes[0].link.region.request(1)[:8].cast("Q")[0] = 1
                raise errors.LoraServerError("kept")
            except errors.LoraServerError as error:
                kept.append((error, lora.client, lora.client.lanes, lora.client.session))
            load.model(torch.tensor([[5, 6]]))
        now_held = held()
    assert len({id(session) for *_, session in kept}) == 5
    left = kept[0][-1]
    left.release([1]), left.prefetch({1: 0.0})
    with pytest.raises(errors.ServerUnavailableError, match="was left"):
        left.acquire(["fused"])
    assert now_held["regions"] <= before["regions"] and now_held["descriptors"] <= before["descriptors"] + 3


def test_a_shard_that_restarts_never_mixes_versions(load, tmp_path):
    """Files overwritten after registration: a restarted shard refuses them, under the old version's name."""
    shutil.copytree(load.paths["experts"], tmp_path / "adapters" / "tenant")
    tiny.make_adapter(load.model, tmp_path / "newer", lora_rank=5, seed=99, targets="experts", rslora=True)
    base = ["--base-model", str(load.base), "--adapters", str(tmp_path / "adapters"), "--layout", "ep1-pp2"]
    with running_server(tmp_path / "log", base) as server:
        with attach(load.model, server=server.address, timeout_seconds=HANG_SECONDS) as lora:

            def use():
                with contextlib.suppress(errors.StepError, errors.ServerUnavailableError), lora.adapters(["tenant"]):
                    load.model(torch.tensor([[5, 6]]))

            use()
            shutil.copytree(tmp_path / "newer", tmp_path / "adapters" / "tenant", dirs_exist_ok=True)
            serving.kill_shard(server, 1)
            with pytest.raises(errors.AdapterLoadError, match="changed since it was registered"):
                until(use, "the step says so")


def test_sigterm_ends_a_server_while_a_client_waits_for_it(load, tmp_path):
    """A client polls for a server whose second node never comes; SIGTERM still ends it."""
    server = launch(tmp_path / "log", *flags(load, "--layout", "ep1-pp2", "--nodes", "2"))
    until(lambda: server.get("/livez")[0] == 200, "it listens")
    with pytest.raises(errors.ServerUnavailableError, match=r"shards \[.*1\] of ep1-pp2 are not up"):
        RemoteServer(server.address).join(5)
    assert serving.stop(server) == 0
