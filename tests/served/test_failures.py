"""Killed clients, shards and servers under load: nobody else sees an error, the affected see a typed one."""

import json
import os
import shutil
import signal
import time

import psutil
import pytest
import torch

from client_connector.remote import RemoteServer
from client_connector.transformers import attach
from lora_server.demo import tiny
from lora_server.demo.engine import generate
from lora_server.demo.launch import launch, running_server
from lora_server.errors import AdapterLoadError, LoraServerError, ServerUnavailableError, StepError
from tests.support.serving import cli, shard_processes, start_engine, status, until
from tests.support.workload import NEW_TOKENS, Workload, workload

pytestmark = pytest.mark.usefixtures("forked")


def flags(load: Workload, *more: str) -> list[str]:
    return ["--base-model", str(load.base), "--adapters", str(load.adapters), *more]


def test_a_killed_client_harms_nobody(tmp_path):
    load = workload("mixtral")
    more = ("--layout", "ep2-pp2", "--lease-seconds", "2")  # with a leader: tests/chaos
    with running_server(tmp_path / "log", flags(load, *more)) as server:
        victims = [start_engine(str(load.base), server.address, "fused", "experts") for _ in range(2)]
        with attach(load.model, server=server.address) as lora, lora.adapters(load.names):
            for victim in victims:
                victim.kill()
                victim.communicate(timeout=10)
                load.check(generate(load.model, load.batch, NEW_TOKENS))
            until(lambda: status(server.address).clients == 1, "the dead clients' leases are gone")
            load.check(generate(load.model, load.batch, NEW_TOKENS))
        reply = status(server.address)
        assert [shard.restarts for shard in reply.shards] == [0, 0, 0, 0]


# tests/chaos has the other two
@pytest.mark.parametrize(("transport", "coordination"), [("shm", "independent"), ("tcp", "leader")])
def test_a_killed_shard_is_named_and_restarted(tmp_path, transport, coordination):
    load = workload("mixtral")
    more = ("--layout", "ep2-pp2", "--coordination", coordination)
    with running_server(tmp_path / "log", flags(load, *more)) as server:
        with attach(load.model, server=server.address, transport=transport, timeout_seconds=60) as lora:
            for shard in (2, 3):  # a leader and a follower
                with lora.adapters(load.names):
                    load.check(generate(load.model, load.batch, NEW_TOKENS))
                    victim = status(server.address).shards[shard].pid
                    killed = _kill_during_step(load, lora, victim)
                    assert isinstance(killed, StepError)
                    assert f"shard {shard}" in str(killed)
                    load.check(generate(load.model, load.batch, NEW_TOKENS))  # joins anew, in the same block
        log = server.tail()
        assert "shard 3 (stage 1, ep_rank 1) died: killed by SIGKILL; restarting it" in log
        assert server.log.read_text().count('"shard lost"') == 2
        assert [shard.restarts for shard in status(server.address).shards] == [0, 0, 1, 1]
        assert {shard.state for shard in status(server.address).shards} == {"up"}


def _kill_during_step(load: Workload, lora, pid: int) -> LoraServerError:
    """Kill a shard between two layers of a forward pass and return what the pass raised."""
    killed = []

    def kill(module, args):
        if not killed:
            killed.append(pid)
            os.kill(pid, signal.SIGKILL)

    handle = load.model.model.layers[1].register_forward_pre_hook(kill)
    began = time.monotonic()
    try:
        with pytest.raises(StepError) as caught:
            generate(load.model, load.batch, NEW_TOKENS)
    finally:
        handle.remove()
    assert time.monotonic() - began < 20, "within the client's deadline"
    return caught.value


def test_clients_of_other_shards_see_nothing_of_a_dead_one(tmp_path):
    """An adapter on attention alone never meets a shard that owns no dense site of its layers."""
    load = workload("mixtral")
    with running_server(tmp_path / "log", flags(load, "--layout", "ep4-pp1")) as server:
        with attach(load.model, server=server.address, transport="shm") as lora:
            owners = {lora.client.placement.owner(site) for site in load.spec.sites(("qkv", "o"))}
            assert owners == {0, 1, 2, 3}
            with lora.adapters(["qv"]):
                qkv = {lora.client.placement.owner(site) for site in load.spec.sites(("qkv",))}
                bystander = next(shard for shard in range(4) if shard not in qkv)
                ids = torch.tensor([load.batch[0].prompt])
                expected = load.model(ids).logits
                os.kill(status(server.address).shards[bystander].pid, signal.SIGKILL)
                assert torch.equal(load.model(ids).logits, expected)


def test_a_stopped_shard_times_out_with_names(tmp_path):
    load = workload("mixtral")
    with running_server(tmp_path / "log", flags(load)) as server:
        with attach(load.model, server=server.address, timeout_seconds=1) as lora, lora.adapters(["fused"]):
            ids = torch.tensor([[5, 6, 7]])
            expected = load.model(ids).logits
            (shard,) = shard_processes(server.address)
            shard.suspend()
            try:
                with pytest.raises(StepError, match=r"shard 0 slot \d+ seq \d+"):
                    load.model(ids)
            finally:
                shard.resume()
            assert torch.equal(load.model(ids).logits, expected)


def test_one_deadline_for_all_that_a_block_asks_of_a_stopped_controller(tmp_path):
    load, seconds, spare = workload("mixtral"), 2.0, 4.0
    with running_server(tmp_path / "log", flags(load)) as server:
        controller = psutil.Process(status(server.address).pid)
        with attach(load.model, server=server.address, timeout_seconds=seconds) as lora:
            with lora.adapters(["fused"]):
                controller.suspend()
                began = time.monotonic()
            assert time.monotonic() - began < 1.0 + spare, "letting go does not wait for it"
            began = time.monotonic()
            with pytest.raises(ServerUnavailableError, match="no answer within"), lora.adapters(["fused"]):
                pass
            assert time.monotonic() - began < seconds + spare
            lora.client.give_up(StepError("a step broke"))
            began = time.monotonic()
            with pytest.raises(ServerUnavailableError), lora.adapters(["fused"]):
                pass
            assert time.monotonic() - began < seconds + spare, "leaving and joining anew"
            controller.resume()
            with lora.adapters(["fused"]):
                load.model(torch.tensor([[5, 6]]))
            until(lambda: holders(server.address) == {0}, "what was let go meanwhile is told later")


def holders(address):
    listed = json.loads(cli("adapters", "list", "--server", address, "--json").stdout)
    return {adapter["holders"] for adapter in listed}


def test_a_silent_client_loses_its_lease_and_what_it_held(tmp_path):
    load = workload("mixtral")
    with running_server(tmp_path / "log", flags(load, "--lease-seconds", "1")) as server:
        engine = start_engine(str(load.base), server.address, "fused")
        process = psutil.Process(engine.pid)
        try:
            process.suspend()
            until(lambda: status(server.address).clients == 0, "the lease expires")
            assert holders(server.address) == {0}
            process.resume()
            remaining = engine.communicate(timeout=60)[0] if engine.poll() is not None else engine.stdout.readline()
            assert remaining or engine.wait(60) == 1, "it joins anew, or ends with a typed error"
        finally:
            engine.kill()
            engine.communicate(timeout=10)


def test_a_server_that_went_away_is_a_typed_error(tmp_path):
    load = workload("mixtral")
    server = launch(tmp_path / "log", *flags(load))
    server.wait_ready()
    with attach(load.model, server=server.address, timeout_seconds=5) as lora:
        with lora.adapters(["fused"]):
            load.model(torch.tensor([[5, 6]]))
        server.stop()
        with pytest.raises((ServerUnavailableError, StepError)), lora.adapters(["fused"]):
            load.model(torch.tensor([[5, 6]]))
    with pytest.raises(ServerUnavailableError, match="is it running"):
        RemoteServer(server.address).join(0.5)


def test_a_shard_that_restarts_never_mixes_versions(tmp_path):
    """Files overwritten after registration: a restarted shard refuses them, under the old version's name."""
    load = workload("mixtral")
    shutil.copytree(load.paths["experts"], tmp_path / "adapters" / "tenant")
    tiny.make_adapter(load.model, tmp_path / "newer", lora_rank=5, seed=99, targets="experts", rslora=True)
    base = ["--base-model", str(load.base), "--adapters", str(tmp_path / "adapters"), "--layout", "ep1-pp2"]
    with running_server(tmp_path / "log", base) as server:
        with attach(load.model, server=server.address) as lora:
            with lora.adapters(["tenant"]):
                load.model(torch.tensor([[5, 6]]))
            shutil.copytree(tmp_path / "newer", tmp_path / "adapters" / "tenant", dirs_exist_ok=True)
            os.kill(status(server.address).shards[1].pid, signal.SIGKILL)
            until(lambda: status(server.address).shards[1].restarts == 1, "the shard is back")
            with pytest.raises(AdapterLoadError, match="changed since it was registered"):
                until(lambda: _use(lora, load), "the step says so")


def _use(lora, load: Workload) -> bool:
    try:
        with lora.adapters(["tenant"]):
            load.model(torch.tensor([[5, 6]]))
    except (StepError, ServerUnavailableError):
        return False
    return False


def test_sigterm_ends_a_server_that_somebody_waits_for(tmp_path):
    """A client polls for a server whose second node never comes; SIGTERM still ends it at once."""
    load = workload("mixtral")
    server = launch(tmp_path / "log", *flags(load, "--layout", "ep1-pp2", "--nodes", "2"))
    until(lambda: server.get("/livez")[0] == 200, "it listens")
    with pytest.raises(ServerUnavailableError, match=r"shards \[.*1\] of ep1-pp2 are not up"):
        RemoteServer(server.address).join(1)
    began = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - began < 30


def test_a_stopped_shard_is_not_ready(tmp_path):
    load = workload("mixtral")
    with running_server(tmp_path / "log", flags(load)) as server:
        (shard,) = shard_processes(server.address)
        shard.suspend()
        try:
            until(lambda: server.get("/readyz") == (503, "shards not up: [0]\n"), "/readyz sees it", 40)
        finally:
            shard.resume()
        server.wait_ready(20)
