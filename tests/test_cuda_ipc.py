"""A GPU engine and GPU shards in real processes: the same answers over CUDA IPC, shared memory and ZeroMQ."""

from __future__ import annotations

import pytest
import torch

from client_connector.transformers import attach
from lora_server.demo import tiny
from lora_server.demo.engine import pad
from lora_server.demo.launch import running_server
from lora_server.errors import ConfigError, StepError
from tests.serving import shard_processes, until
from tests.workload import workload


def flags(load, *more):
    return ["--base-model", str(load.base), "--adapters", str(load.adapters), *more]


def logits(model, load, address, transport):
    ids, mask = (tensor.to(model.device) for tensor in pad(load.batch, 0))
    with attach(model, server=address, transport=transport) as lora, lora.adapters(load.names):
        return model(ids, attention_mask=mask).logits[:, -1].float().cpu()


def test_cuda_ipc_needs_gpus_on_both_sides(tmp_path):
    load = workload("mixtral")
    with running_server(tmp_path / "log", flags(load)) as server:
        with pytest.raises(ConfigError, match="computes on cpu, the engine on cpu"):
            attach(load.model, server=server.address, transport="cuda_ipc")


@pytest.mark.cuda
@pytest.mark.parametrize("layout", ["ep1-pp1", "ep2-pp2"])
def test_every_transport_gives_the_same_bits(tmp_path, layout):
    """Several shards share one GPU; a row's bits do not depend on how it came, nor on its neighbours."""
    load = workload("mixtral")
    model = tiny.make_model("mixtral", dtype=torch.bfloat16).cuda()
    more = ("--layout", layout, "--device", "cuda", "--pool-gib", "0.25", "--max-step-rows", "32")
    with running_server(tmp_path / "log", flags(load, *more)) as server:
        answers = [logits(model, load, server.address, name) for name in ("cuda_ipc", "shm", "zmq", "auto")]
    for answer in answers[1:]:
        assert torch.equal(answer, answers[0])


@pytest.mark.cuda
def test_as_exact_as_the_host(tmp_path):
    load = workload("mixtral")
    exact = []
    for dtype, device in ((torch.float32, "cpu"), (torch.bfloat16, "cpu"), (torch.bfloat16, "cuda")):
        model = tiny.make_model("mixtral", dtype=dtype).to(device)
        settings = ("--device", device, "--dtype", str(dtype).removeprefix("torch."))
        with running_server(tmp_path / f"log-{device}-{dtype}", flags(load, *settings)) as server:
            exact.append(logits(model, load, server.address, "auto"))
    by_host, by_device = [(answer - exact[0]).abs().mean() for answer in exact[1:]]
    assert by_device <= 1.5 * by_host + 1e-3


@pytest.mark.cuda
def test_a_shard_that_dies_is_an_error_and_the_next_request_is_served(tmp_path):
    load = workload("mixtral")
    model = tiny.make_model("mixtral", dtype=torch.bfloat16).cuda()
    ids, mask = (tensor.cuda() for tensor in pad(load.batch, 0))
    with running_server(tmp_path / "log", flags(load, "--device", "cuda", "--pool-gib", "0.25")) as server:
        with attach(model, server=server.address, transport="cuda_ipc", timeout_seconds=60) as lora:
            with lora.adapters(load.names):
                before = model(ids, attention_mask=mask).logits
            (shard,) = shard_processes(server.address)
            shard.kill()
            until(lambda: server.get("/readyz")[0] != 200, "the shard is missed")
            server.wait_ready()
            with lora.adapters(load.names):
                try:
                    after = model(ids, attention_mask=mask).logits
                except StepError:
                    after = model(ids, attention_mask=mask).logits
            assert torch.equal(before, after)
