"""A stage whose kernels serve by themselves, in leader mode, in real processes; its GPUs are this CPU."""

from __future__ import annotations

import time

import pytest
import torch

from bench.gpu_run.passes import Layer, answers
from client_connector.client import Client
from client_connector.remote import RemoteServer
from client_connector.serving.launched import LaunchedPass
from client_connector.serving.plan import Assigned, StepPlan
from client_connector.serving.planned import PlannedPass
from client_connector.transformers import attach
from lora_server.config import MOST_LED, load
from lora_server.demo import tiny
from lora_server.demo.engine import pad
from lora_server.demo.launch import running_server
from lora_server.errors import ConfigError, ShardUnavailableError
from lora_server.shard.numbers import MAX_FOLLOWERS
from tests.support.gpu import emulated, emulated_gpu
from tests.support.gpu.gpu_graph import Graph
from tests.support.gpu.gpu_steps import Steps
from tests.support.serving import shard_processes, status, until
from tests.support.workload import workload

ROWS = 20  # more entries than a message holds: chunks
on_the_emulator = pytest.mark.skipif(bool(emulated.MISSING), reason=emulated.MISSING)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A stage of two shards, a leader and a follower."""
    emulated_gpu.compile_all()
    load = workload("mixtral")
    emulated_gpu.use()
    flags = ["--base-model", str(load.base), "--adapters", str(load.adapters), "--dtype", "bfloat16"]
    flags += ["--layout", "ep2-pp1", "--coordination", "leader", "--max-step-rows", "32"]
    flags += ["--data-dir", str(tmp_path_factory.mktemp("data"))]
    with running_server(tmp_path_factory.mktemp("log") / "log", flags, module="tests.support.gpu.gpu_serve") as server:
        yield server
    del emulated_gpu.opened.openers["cpu"]


def logits(server, transport: str) -> torch.Tensor:
    load, model = workload("mixtral"), tiny.make_model("mixtral", dtype=torch.bfloat16)
    ids, mask = pad(load.batch[:6], 0)
    with attach(model, server=server.address, transport=transport) as lora, lora.adapters(load.names[:6]):
        return model(ids, attention_mask=mask).logits[:, -1].float()


@on_the_emulator
def test_a_led_stage_gives_one_answer_over_every_transport(served):
    """Also where a shard has nothing of a site: it is sent an empty step, so that both count alike."""
    answers = [logits(served, transport) for transport in ("gpu", "tcp", "shm")]
    assert torch.equal(answers[0], answers[1]) and torch.equal(answers[0], answers[2])
    load = workload("mixtral")
    oracle = tiny.peft_model(load.model, load.paths[load.batch[0].adapter])
    exact = oracle(torch.tensor([load.batch[0].prompt])).logits[0, -1]
    assert (answers[0][0] - exact).norm() < 0.05 * exact.norm()


@on_the_emulator
def test_launched_passes_are_led(served):
    """Recorded with nobody's rows, and played: TCP's bits. All shards of the stage are sent as many steps, whoever has
    something of them, also behind a refusal, which ends the pass on all links."""

    def client(transport: str) -> Client:
        return Client(RemoteServer(served.address, transport), 20.0)

    forward = LaunchedPass(client("gpu"), lambda: True, dtype=torch.bfloat16, max_rows=2 * ROWS, max_adapters=3)
    spec = forward.client.terms.spec
    layer, other = Layer(spec, forward, ROWS, "cpu"), PlannedPass(client("tcp"), lambda: True)
    theirs = Layer(spec, other, ROWS, "cpu")
    graph = Graph(forward)
    with graph.capture():
        layer.run()

    def check(seed: int, *names: str | None) -> None:
        ours, expected = answers(layer, names, seed, graph.replay), answers(theirs, names, seed, theirs.run)
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True)), names
        assert len(set(forward.sent())) == 1, "the stage counts alike"

    assert forward.sent() == [0, 0], "nothing is sent while it is captured"
    for seed, names in enumerate([("fused",), ("qv", None, "experts"), ("attention", "fused", None)]):
        check(seed, *names)
    before = forward.sent()
    check(5, None, None)
    assert forward.sent() == before, "nobody's rows"
    (good,) = forward.client.acquire(["fused"])
    bad = good.__class__("nobody", 700 | 1 << 16, good.sites, "v", None)
    rows = {"g": Assigned(good.handle, 0), "b": Assigned(bad.handle, 0)}
    forward.receive(StepPlan(forward.client.terms.server, rows, (good, bad)))
    forward.begin(["g", "b"], [ROWS // 2, ROWS // 2], [0, 0])
    graph.replay()
    failures = forward.end()
    assert {name: failure.code for name, failure in failures.items()} == {"g": "retry", "b": "unknown_adapter"}
    assert len(set(forward.sent())) == 1
    check(6, "experts", "fused")
    forward.close()
    other.close()


@on_the_emulator
@pytest.mark.parametrize("victim", [0, 1])
def test_a_stage_lacks_a_shard_and_serves_again(served, victim):
    """No step is the follower's without its leader's number: it is refused in time. A successor leads, or is led."""
    before = logits(served, "gpu")
    session = RemoteServer(served.address, "gpu").join()
    (held,) = session.acquire(["fused"], time.monotonic() + 60)
    both = [Steps(session, held.handle, shard) for shard in (0, 1)]
    began = time.monotonic()
    assert both[1].step(0.5) == "step_timeout" and time.monotonic() - began >= 0.5
    shard_processes(served.address)[victim].kill()
    with pytest.raises(ShardUnavailableError, match="the shard closed the connection"):
        for _ in range(1000):
            both[victim].step(0.1)
    session.leave()
    until(lambda: served.get("/readyz")[0] != 200, "it is missed")
    served.wait_ready()
    assert status(served.address).shards[0].stats.followers == 1
    assert torch.equal(logits(served, "gpu"), before)


def test_what_no_leader_can_tell_is_refused():
    assert MOST_LED == MAX_FOLLOWERS + 1
    flags = {"base_model": "x", "device": "cuda", "gpu_transport": "gpu", "coordination": "leader"}
    load(flags | {"layout": "ep2-pp4", "nodes": 2})
    for wrong in ({"layout": "ep4-pp1", "nodes": 2}, {"layout": f"ep{MOST_LED + 1}-pp1"}):
        with pytest.raises(ConfigError, match="coordination: got leader"):
            load(flags | wrong)
    with pytest.raises(ConfigError, match="expected gpu, and every stage on one node"):
        load(flags | {"gpu_transport": "nvshmem", "nvshmem_clients": 1, "layout": "ep2-pp1"})
