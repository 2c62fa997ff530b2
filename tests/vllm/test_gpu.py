"""Transport `gpu`: steps that kernels put, wait for and add. GPUs are this CPU, kernels their own source; the engine is
vLLM, once eager and once compiled, and what it is compared with is the same engine over TCP, on the same shards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from client_connector.serving.plan import parse_flag
from lora_server.demo.engine import Sequence
from lora_server.demo.launch import running_server
from tests.support.gpu import emulated, emulated_gpu
from tests.support.serving import HANG_SECONDS, kill, settled_steps, shard_processes
from tests.support.workload import NEW_TOKENS
from tests.vllm.engines import Engine

pytestmark = pytest.mark.skipif(bool(emulated.MISSING), reason=emulated.MISSING)
ROOT = Path(__file__).parents[2]
LONG = 24
KINDS = pytest.mark.parametrize("kind", ["llama", "mixtral"], indirect=True)
MIXTRAL = pytest.mark.parametrize("kind", ["mixtral"], indirect=True)
CLOSE = 0.25  # log probabilities of one context in batches of different shapes


@pytest.fixture(scope="module")
def gpu_server(load, kind, scratch):
    emulated_gpu.compile_all()
    flags = ["--base-model", str(load.base), "--adapters", str(load.adapters), "--dtype", "bfloat16"]
    flags += ["--layout", "ep2-pp1", "--data-dir", str(scratch / f"gpu-data-{kind}")]
    with running_server(scratch / f"gpu-server-{kind}.log", flags, module="tests.support.gpu.gpu_serve") as server:
        yield server


@pytest.fixture(scope="module")
def start(load, kind, gpu_server, scratch):
    """An engine of a transport."""
    started = []

    def one(transport: str, enforce_eager: bool = True, **environment: str) -> Engine:
        environment = {"LORA_SERVER_TIMEOUT_SECONDS": str(HANG_SECONDS)} | environment
        environment |= {"LORA_SERVER_TRANSPORT": transport, "LORA_SERVER_TEST_GPU": "1", "PYTHONPATH": str(ROOT)}
        log, settings = scratch / f"engine-{kind}-{transport}-{len(started)}.log", {"enforce_eager": enforce_eager}
        started.append(Engine(load.base, gpu_server.address, log, environment, dtype="bfloat16", **settings))
        return started[-1]

    yield one
    for engine in started:
        engine.close()


@pytest.fixture(scope="module")
def by_host(start):
    return start("tcp")


@pytest.fixture(scope="module")
def engine(start):
    return start("gpu")


def same(ours: dict, theirs: dict) -> bool:
    """Up to the first token at which rounding, which a batch's shape has a part in, decided."""
    for a, b, p, q in zip(ours["tokens"], theirs["tokens"], ours["logprobs"], theirs["logprobs"], strict=True):
        if abs(p - q) > CLOSE:
            return False
        if a != b:
            return True
    return True


@KINDS
def test_eager_equals_the_host_s_exchanges(load, engine, by_host):
    assert engine.generate(load.batch, NEW_TOKENS) == by_host.generate(load.batch, NEW_TOKENS)


@KINDS
def test_base_batches_send_nothing(load, gpu_server, engine):
    before = settled_steps(gpu_server.address)
    engine.generate([sequence for sequence in load.batch if sequence.adapter is None], NEW_TOKENS)
    assert settled_steps(gpu_server.address) == before


@MIXTRAL
def test_a_shard_that_dies_costs_no_request_its_adapter(load, gpu_server, engine, by_host):
    """Those under way wait for its successor, and go on under the adapter that they had."""
    prompt = load.batch[0].prompt
    with_it, without = by_host.generate([Sequence(prompt, "fused"), Sequence(prompt, None)], LONG)
    assert not same(with_it, without)
    adapted, base = (
        engine.call("add", request={"prompt": prompt, "adapter": name, "new_tokens": LONG}) for name in ("fused", None)
    )
    engine.call("step", count=6)
    shard_processes(gpu_server.address)[1].kill()
    answers = engine.call("step", count=0)
    assert answers[adapted]["stop_reason"] is None
    assert same(answers[adapted], with_it) and same(answers[base], without)


@pytest.mark.parametrize("kind", ["llama"], indirect=True)
def test_compiled_by_inductor(load, start, by_host):
    """Our opaque ops in one graph of the whole model: what they change is what they say. Eager rounds otherwise."""
    compiled = start("gpu", enforce_eager=False, LORA_SERVER_TEST_COMPILE="DYNAMO_TRACE_ONCE,inductor")
    pairs = zip(compiled.generate(load.batch, NEW_TOKENS), by_host.generate(load.batch, NEW_TOKENS), strict=True)
    assert all(same(ours, theirs) for ours, theirs in pairs)


@MIXTRAL
def test_compiled_in_pieces(load, start):
    """As vLLM cuts a model for piecewise CUDA graphs: at attention, not for us. Experts lie behind its own op."""
    how = {"enforce_eager": False, "LORA_SERVER_TEST_COMPILE": "VLLM_COMPILE,eager"}
    ours, theirs = start("gpu", **how), start("tcp", **how)
    assert ours.generate(load.batch, NEW_TOKENS) == theirs.generate(load.batch, NEW_TOKENS)
    found = ours.call("evaluate", expression="llm.llm_engine.vllm_config.compilation_config.splitting_ops")
    assert found and not any(name.startswith(("lora_server::", "vllm::moe_forward")) for name in found)


@MIXTRAL
def test_a_server_that_is_gone_ends_requests_with_the_reason(load, gpu_server, start):
    """Behind all others of this server: nobody starts it again. Base rows of the same batch are served."""
    engine = start("gpu", LORA_SERVER_TIMEOUT_SECONDS="2")
    prompt = load.batch[0].prompt
    (alone,) = engine.generate([Sequence(prompt, None)], LONG)
    adapted, base = (
        engine.call("add", request={"prompt": prompt, "adapter": name, "new_tokens": LONG}) for name in ("fused", None)
    )
    engine.call("step", count=6)
    kill(gpu_server)
    answers = engine.call("step", count=0)
    assert answers[adapted]["finish_reason"] == "error"
    outcome, code, message = parse_flag(answers[adapted]["stop_reason"])
    assert (outcome, code) == ("error", "shard_unavailable"), message
    assert same(answers[base], alone)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
@pytest.mark.parametrize("cudagraph_mode", ["FULL_AND_PIECEWISE", "FULL", "PIECEWISE"])
@KINDS
def test_captured_on_a_gpu(load, scratch, kind, cudagraph_mode):
    """What only a GPU can show: vLLM captures our launches with its own, and replays give what a host computes."""
    flags = ["--base-model", str(load.base), "--adapters", str(load.adapters), "--dtype", "bfloat16"]
    flags += ["--device", "cuda", "--gpu-transport", "gpu", "--device-pool", "1GiB"]

    def answers(transport: str, address: str, **settings) -> list[dict]:
        log = scratch / f"engine-{kind}-{cudagraph_mode}-{transport}.log"
        settings |= {"dtype": "bfloat16", "gpu_memory_utilization": 0.3}
        engine = Engine(load.base, address, log, {"LORA_SERVER_TRANSPORT": transport}, **settings)
        try:
            return engine.generate(load.batch, NEW_TOKENS)
        finally:
            engine.close()

    with running_server(scratch / f"cuda-server-{kind}-{cudagraph_mode}.log", flags) as server:
        by_a_host = answers("shm", server.address)
        compilation = {"cudagraph_mode": cudagraph_mode}
        replayed = answers("gpu", server.address, enforce_eager=False, compilation_config=compilation)
    assert all(same(ours, theirs) for ours, theirs in zip(replayed, by_a_host, strict=True))
