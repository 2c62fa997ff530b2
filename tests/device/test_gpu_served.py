"""Shards whose kernel serves by itself, in real processes: the kernels' own source, on a GPU that is this CPU.

What is played is the whole backend: memory by descriptors, kernels at both ends, the mailbox, and its host. What only
a GPU can show is in bench/gpu_run.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass

import pytest
import torch

from client_connector.remote import RemoteServer
from client_connector.transformers import attach
from lora_server.demo import children, tiny
from lora_server.demo.engine import pad
from lora_server.demo.launch import RunningServer, running_server
from lora_server.errors import ShardUnavailableError
from tests.support.gpu import emulated, emulated_gpu
from tests.support.gpu.gpu_steps import Steps
from tests.support.serving import cli, shard_processes, status, until
from tests.support.workload import Workload, workload

pytestmark = pytest.mark.skipif(bool(emulated.MISSING), reason=emulated.MISSING)


@dataclass
class Served:
    server: RunningServer
    load: Workload
    gpu: emulated_gpu.EmulatedGpu

    @property
    def address(self) -> str:
        return self.server.address

    def join(self, transport: str = "gpu"):
        return RemoteServer(self.address, transport).join()

    def clients(self) -> int:
        return status(self.address).shards[0].stats.clients


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server with a shard whose kernel serves, and this process's GPU. All kernels are compiled first, once."""
    emulated_gpu.compile_all()
    load, gpu = workload("mixtral"), emulated_gpu.use()
    flags = ["--base-model", str(load.base), "--adapters", str(load.adapters), "--dtype", "bfloat16"]
    flags += ["--max-step-rows", "32", "--data-dir", str(tmp_path_factory.mktemp("data"))]
    flags += ["--adapter-root", str(tmp_path_factory.getbasetemp())]
    log = tmp_path_factory.mktemp("log") / "log"
    with running_server(log, flags, module="tests.support.gpu.gpu_serve") as server:
        yield Served(server, load, gpu)
    del emulated_gpu.opened.openers["cpu"]


def test_every_transport_gives_the_bits_of_one_kernel(served):
    """An engine on a GPU, and clients that a host polls, of the same shard."""
    model, load = tiny.make_model("mixtral", dtype=torch.bfloat16), served.load
    ids, mask = pad(load.batch[:6], 0)

    def logits(transport: str) -> torch.Tensor:
        with attach(model, server=served.address, transport=transport) as lora, lora.adapters(load.names[:6]):
            return model(ids, attention_mask=mask).logits[:, -1].float()

    answers = [logits(transport) for transport in ("gpu", "shm", "tcp")]
    assert torch.equal(answers[0], answers[1]) and torch.equal(answers[0], answers[2])
    oracles = [tiny.peft_model(load.model, load.paths[one.adapter]) for one in load.batch[:6]]
    prompts = [torch.tensor([one.prompt]) for one in load.batch[:6]]
    exact = torch.stack([oracle(prompt).logits[0, -1] for oracle, prompt in zip(oracles, prompts, strict=True)])
    base = model(ids, attention_mask=mask).logits[:, -1].float()
    ours, without = (answers[0] - exact).abs().mean(), (base - exact).abs().mean()
    assert ours < 0.2 * without, f"{ours} from PEFT in float32, {without} without adapters"


def test_clients_of_both_kinds_take_turns_on_one_kernel(served):
    sessions = [served.join(transport) for transport in ("gpu", "shm", "gpu", "tcp")]
    steps = [Steps(session, session.acquire(["fused"], time.monotonic() + 60)[0].handle) for session in sessions]
    first = steps[0].step()
    for _ in range(4):
        sent = [one.push() for one in steps]
        for one, header in zip(steps, sent, strict=True):
            one.link.wait(header.seq, time.monotonic() + 60)
            assert torch.equal(one.link.rows.response(header), first)
    for session in sessions:
        session.leave()
    until(lambda: served.clients() == 0, "all have gone")


def test_a_client_killed_in_the_middle_of_a_put_harms_nobody(served):
    """Its rows are there, and its signal is not: the put's blocks wait for each other."""
    survivor = served.join()
    steps = Steps(survivor, survivor.acquire(["qv"], time.monotonic() + 60)[0].handle)
    before = steps.step()
    command = [sys.executable, "-m", "tests.support.gpu.gpu_client", served.address, "fused", "1"]
    process = subprocess.Popen(children.own(command), stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "step\n" and process.stdout.readline() == "in the middle\n"
        assert torch.equal(steps.step(), before)
        process.kill()
    until(lambda: served.clients() == 1, "it is missed")
    assert torch.equal(steps.step(), before)
    survivor.leave()


def test_adapters_come_and_go_while_steps_run(served, tmp_path):
    """Evicted ones come back, one that is dropped is refused, and nobody's bits change."""
    session, load = served.join(), served.load
    steps = {name: Steps(session, session.acquire([name], time.monotonic() + 60)[0].handle) for name in ("fused", "qv")}
    tiny.make_adapter(load.model, tmp_path / "late", seed=99, lora_rank=20, targets="all")
    seq, before = 0, {}
    for turn in range(2):
        assert cli("adapters", "add", "--server", served.address, "late", str(tmp_path / "late")).returncode == 0
        late = Steps(session, session.acquire(["late"], time.monotonic() + 60)[0].handle)
        for name, one in (*steps.items(), ("late", late)):
            one.seq = seq
            got = one.step()
            seq = one.seq
            assert isinstance(got, torch.Tensor), got
            assert torch.equal(before.setdefault(name, got), got), f"{name}, turn {turn}"
        session.release([late.handle])
        assert cli("adapters", "remove", "--server", served.address, "late").returncode == 0
        late.seq = seq
        assert late.step() == "unknown_adapter"
        seq = late.seq
    session.leave()
    assert status(served.address).shards[0].stats.evictions >= 1, "six pages, seven adapters"


def test_a_shard_that_dies_is_missed_and_its_successor_serves(served):
    session = served.join()
    steps = Steps(session, session.acquire(["fused"], time.monotonic() + 60)[0].handle)
    before = steps.step()
    (shard,) = shard_processes(served.address)
    shard.kill()
    with pytest.raises(ShardUnavailableError, match="the shard closed the connection"):
        for _ in range(100):
            steps.step()
    session.leave()
    until(lambda: served.server.get("/readyz")[0] != 200, "it is missed")
    served.server.wait_ready()
    session = served.join()
    steps = Steps(session, session.acquire(["fused"], time.monotonic() + 60)[0].handle)
    assert torch.equal(steps.step(), before)
    session.leave()
