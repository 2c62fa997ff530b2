"""Transport `nvshmem`: a vLLM worker as a PE of NVSHMEM's world, whose steps are launches. Heaps and GPUs are this
CPU's; what it is compared with is the same engine over TCP, on the same shards."""

import contextlib

import pytest

from client_connector.serving.plan import parse_flag
from lora_server.demo.engine import Sequence
from lora_server.demo.launch import launch
from tests.support.gpu import emulated, emulated_gpu, emulated_world
from tests.support.serving import HANG_SECONDS, flags, shard_processes, until
from tests.support.workload import NEW_TOKENS
from tests.vllm.engines import ROOT, Engine

pytestmark = pytest.mark.skipif(bool(emulated.MISSING), reason=emulated.MISSING)
LONG = 12
PATIENCE = 15  # seconds of requests for a server that went away


@pytest.fixture
def server(load, scratch, monkeypatch):
    """Its shards are here, and no engine is."""
    emulated_gpu.compile_all(nvshmem=True)
    monkeypatch.setenv(emulated_world.NETWORK, "1")  # nothing of another PE is mapped
    more = ["--dtype", "bfloat16", "--device", "cuda", "--gpu-transport", "nvshmem", "--nvshmem-clients", "1"]
    more += ["--layout", "ep2-pp1", "--slots", "2", "--data-dir", str(scratch / "world-data")]
    server = launch(scratch / "world-server.log", *flags(load, *more), module="tests.support.gpu.gpu_serve")
    try:
        until(lambda: "2 of 2 shards and 0 of 1" in server.get("/readyz")[1], "its shards are here", HANG_SECONDS)
        yield server
    finally:
        server.stop()


@pytest.fixture
def start(load, server, scratch):
    with contextlib.ExitStack() as stack:

        def one(transport: str, dtype: str = "bfloat16") -> Engine:
            environment = {"LORA_SERVER_TIMEOUT_SECONDS": str(PATIENCE), "LORA_SERVER_TRANSPORT": transport}
            environment |= {"LORA_SERVER_TEST_GPU": "1", "PYTHONPATH": str(ROOT)}
            log = scratch / f"world-engine-{transport}-{dtype}.log"
            return stack.enter_context(Engine(load.base, server.address, log, environment, dtype=dtype))

        yield one


def test_a_worker_is_a_pe(load, server, start):
    """Who is refused took no place. TCP's tokens and log probabilities; with a shard's death the world is over, and
    requests for adapters end with the reason, the one under way once nobody came back. Base rows go on."""
    with pytest.raises(RuntimeError, match="float32 activations, expected bfloat16"):
        start("nvshmem", dtype="float32")
    worker, by_host = start("nvshmem"), start("tcp")
    server.wait_ready()
    assert worker.generate(load.batch, NEW_TOKENS) == by_host.generate(load.batch, NEW_TOKENS)
    prompt = load.batch[0].prompt
    pair = [Sequence(prompt, "fused"), Sequence(prompt, None)]
    adapted, base = (worker.add(prompt, one.adapter, LONG) for one in pair)
    worker.call("step", count=4)
    shard_processes(server.address)[1].kill()
    answers = worker.call("step", count=0)
    ended, later = answers[adapted], worker.generate(pair, 2)
    for answer, expected in ((ended, "shard_unavailable"), (later[0], "world")):
        outcome, code, message = parse_flag(answer["stop_reason"])
        assert (outcome, code) == ("error", expected), message
    assert "start the engine anew" in message
    assert len(answers[base]["tokens"]) == LONG and len(later[1]["tokens"]) == 2
    assert answers[base]["stop_reason"] is None and later[1]["stop_reason"] is None
