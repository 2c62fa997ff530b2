"""Transport `gpu`: steps that kernels put, wait for and add. GPUs are this CPU, kernels their own source; the engine is
vLLM, eager and compiled, and what it is compared with, bit by bit, is the same engine over TCP, on the same shards.

tests/vllm/test_undisturbed.py has what befalls them."""

import contextlib
import statistics
from pathlib import Path

import pytest
import torch

from client_connector.serving.plan import parse_flag
from lora_server.demo.engine import Sequence
from lora_server.demo.launch import running_server
from tests.support.gpu import emulated, emulated_gpu
from tests.support.serving import HANG_SECONDS, flags, kill, settled_steps
from tests.support.workload import NEW_TOKENS
from tests.vllm.engines import ROOT, START_SECONDS, Engine

pytestmark = pytest.mark.skipif(bool(emulated.MISSING), reason=emulated.MISSING)
IN_ORDER = True  # the last test ends the server
LONG = 24
PATIENCE = 20  # seconds of requests for a server that went away


@pytest.fixture(scope="module")
def gpu_server(load, kind, scratch):
    emulated_gpu.compile_all()
    more = ("--dtype", "bfloat16", "--layout", "ep2-pp1", "--data-dir", str(scratch / f"gpu-data-{kind}"))
    log = scratch / f"gpu-server-{kind}.log"
    with running_server(log, flags(load, *more), module="tests.support.gpu.gpu_serve") as server:
        yield server


@pytest.fixture(scope="module")
def start(load, kind, gpu_server, scratch):
    """An engine of a transport."""
    with contextlib.ExitStack() as stack:

        def one(transport: str, eager: bool = True, base: Path = load.base, **environment: str) -> Engine:
            environment = {"LORA_SERVER_TIMEOUT_SECONDS": str(HANG_SECONDS)} | environment
            environment |= {"LORA_SERVER_TRANSPORT": transport, "LORA_SERVER_TEST_GPU": "1", "PYTHONPATH": str(ROOT)}
            log, settings = scratch / f"engine-{kind}-{transport}-{eager}.log", {"enforce_eager": eager}
            engine = Engine(base, gpu_server.address, log, environment, dtype="bfloat16", **settings)
            return stack.enter_context(engine)

        yield one


@pytest.fixture(scope="module")
def engine(start):
    """Over transport `gpu`, eager; rows do not depend on those beside them, so that a request alone is a reference."""
    return start("gpu", LORA_SERVER_TEST_ROWS_APART="1", LORA_SERVER_TIMEOUT_SECONDS=str(PATIENCE))


@pytest.mark.timeout(2 * START_SECONDS + 600)
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        pytest.param("llama", "DYNAMO_TRACE_ONCE,inductor", marks=pytest.mark.long),
        ("mixtral", "VLLM_COMPILE,eager"),
    ],
    indirect=["kind"],
)
def test_compiled_equals_the_host_s_exchanges(load, start, how):
    """Our opaque ops in one graph of the whole model, and as vLLM cuts one for piecewise CUDA graphs: at attention, not
    for us; experts lie behind its own op. What the ops change is what they say."""
    ours, theirs = (start(transport, False, LORA_SERVER_TEST_COMPILE=how) for transport in ("gpu", "tcp"))
    answers = ours.generate(load.batch, NEW_TOKENS)
    assert answers == theirs.generate(load.batch, NEW_TOKENS)
    (base,) = ours.generate([Sequence(load.batch[0].prompt, None)], NEW_TOKENS)
    assert base["logprobs"][0] != answers[0]["logprobs"][0], "the adapter acts"
    found = ours.call("evaluate", expression="llm.llm_engine.vllm_config.compilation_config.splitting_ops")
    assert "VLLM" not in how or found
    assert not any(name.startswith(("lora_server::", "vllm::moe_forward")) for name in found or [])


@pytest.mark.parametrize("kind", ["mixtral"], indirect=True)
def test_eager_equals_the_host_s_exchanges(load, gpu_server, engine, start):
    answers = engine.generate(load.batch, NEW_TOKENS)
    assert answers == start("tcp", LORA_SERVER_TEST_ROWS_APART="1").generate(load.batch, NEW_TOKENS)
    before = settled_steps(gpu_server.address)
    index = load.names.index(None)
    assert engine.generate([load.batch[index]], NEW_TOKENS) == [answers[index]]
    assert settled_steps(gpu_server.address) == before, "base batches send nothing"


@pytest.mark.parametrize("kind", ["mixtral"], indirect=True)
def test_launches_over_merged_weights(load, merged, gpu_server, engine, start):
    """But for rounding, which may send a row to another expert, each request gets what it gets without a merge."""
    ours = start("gpu", base=merged[0])
    answers = [one.generate(load.batch, 1) for one in (ours, engine)]
    first, expected = ([answer["logprobs"][0] for answer in found] for found in answers)
    assert statistics.median(abs(a - b) for a, b in zip(first, expected, strict=True)) < 0.05, (first, expected)
    before = settled_steps(gpu_server.address)
    (hot,) = ours.generate([Sequence(load.batch[0].prompt, "fused")], NEW_TOKENS, merged[1])
    assert hot["stop_reason"] is None and settled_steps(gpu_server.address) == before


@pytest.mark.parametrize("kind", ["mixtral"], indirect=True)
def test_a_server_that_is_gone_ends_requests_with_the_reason(load, gpu_server, engine):
    """The last test of this server, which nothing starts again. Base rows of the same batch are served."""
    prompt = load.batch[0].prompt
    (alone,) = engine.generate([Sequence(prompt, None)], LONG)
    adapted, base = (engine.add(prompt, name, LONG) for name in ("fused", None))
    engine.call("step", count=6)
    kill(gpu_server)
    answers = engine.call("step", count=0)
    assert answers[adapted]["finish_reason"] == "error"
    outcome, code, message = parse_flag(answers[adapted]["stop_reason"])
    assert (outcome, code) == ("error", "shard_unavailable"), message
    assert answers[base] == alone


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
@pytest.mark.parametrize("cudagraph_mode", ["FULL_AND_PIECEWISE", "FULL", "PIECEWISE"])
@pytest.mark.parametrize("kind", ["mixtral", "llama"], indirect=True)
def test_captured_on_a_gpu(load, scratch, kind, cudagraph_mode):
    """What only a GPU can show: vLLM captures our launches with its own, and replays give what a host sends for itself.
    Both engines have graphs, so both pad a batch to the same shape."""
    more = ("--dtype", "bfloat16", "--device", "cuda", "--gpu-transport", "gpu", "--device-pool", "1GiB")

    def answers(transport: str, address: str, **settings) -> list[dict]:
        log = scratch / f"engine-{kind}-{cudagraph_mode}-{transport}.log"
        settings |= {"dtype": "bfloat16", "gpu_memory_utilization": 0.3}
        with Engine(load.base, address, log, {"LORA_SERVER_TRANSPORT": transport}, **settings) as engine:
            return engine.generate(load.batch, NEW_TOKENS)

    with running_server(scratch / f"cuda-server-{kind}-{cudagraph_mode}.log", flags(load, *more)) as server:
        graphs = {"enforce_eager": False, "compilation_config": {"cudagraph_mode": cudagraph_mode}}
        assert answers("gpu", server.address, **graphs) == answers("shm", server.address, **graphs)
