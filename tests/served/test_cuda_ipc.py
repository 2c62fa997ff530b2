"""A GPU engine and GPU shards in real processes: the same answers over CUDA IPC, shared memory and TCP."""

from __future__ import annotations

import os

import pytest
import torch

from client_connector.transformers import attach
from lora_server.demo import tiny
from lora_server.demo.engine import pad
from lora_server.demo.launch import running_server
from lora_server.errors import ConfigError, StepError
from lora_server.wire.messages import Welcome
from lora_server.wire.region import RegionLayout
from tests.support.serving import shard_processes, until
from tests.support.workload import workload


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
@pytest.mark.parametrize("wire", ["exact", "e4m3"])
@pytest.mark.parametrize("layout", ["ep1-pp1", "ep2-pp2"])
def test_every_transport_gives_the_same_bits(tmp_path, layout, wire):
    """Several shards share one GPU; a row's bits do not depend on how it came, nor on its neighbours."""
    load = workload("mixtral")
    model = tiny.make_model("mixtral", dtype=torch.bfloat16).cuda()
    more = ("--layout", layout, "--device", "cuda", "--device-pool", "256MiB", "--max-step-rows", "32", "--wire", wire)
    with running_server(tmp_path / "log", flags(load, *more)) as server:
        answers = [logits(model, load, server.address, name) for name in ("cuda_ipc", "shm", "tcp", "auto")]
    for answer in answers[1:]:
        assert torch.equal(answer, answers[0])


@pytest.mark.cuda
@pytest.mark.parametrize("wire", ["exact", "e4m3"])
@pytest.mark.parametrize("transport", ["cuda_ipc", "shm"])
def test_no_site_waits_for_the_gpu(tmp_path, transport, wire):
    """From the first layer to the last: routing, pushes, the engine's own GEMMs, and the deltas' way back."""
    load = workload("mixtral")
    model = tiny.make_model("mixtral", dtype=torch.bfloat16).cuda()
    ids, mask = (tensor.cuda() for tensor in pad(load.batch, 0))
    layers, more = model.base_model.layers, ("--device", "cuda", "--device-pool", "256MiB", "--wire", wire)
    with running_server(tmp_path / "log", flags(load, *more)) as server:
        with attach(model, server=server.address, transport=transport) as lora, lora.adapters(load.names):
            before = model(ids, attention_mask=mask).logits
            began = layers[0].register_forward_pre_hook(lambda *_: torch.cuda.set_sync_debug_mode("error"))
            ended = layers[-1].register_forward_hook(lambda *_: torch.cuda.set_sync_debug_mode("default"))
            try:
                after = model(ids, attention_mask=mask).logits
            finally:
                torch.cuda.set_sync_debug_mode("default")
                began.remove(), ended.remove()
    assert torch.equal(before, after)


@pytest.mark.cuda
def test_a_twin_begins_with_zeros_and_outlives_its_shard():
    """In one process here; between two in every test above."""
    from lora_server.transport.device_memory import GpuMemory, ImportedTwin
    from lora_server.transport.virtual_memory import can_share_descriptors

    device = torch.device("cuda", 0)
    if not can_share_descriptors(device):
        pytest.skip("this driver shares no memory by descriptors")
    layout = RegionLayout(depth=2, request_bytes=8192, response_bytes=4096)
    used = torch.full((64 << 20,), 255, dtype=torch.uint8, device=device)
    del used
    torch.cuda.empty_cache()
    twin = GpuMemory(device).twin(layout, os.getpid())
    assert int(twin.rows.memory.count_nonzero()) == 0 and twin.rows.memory.nbytes % (2 << 20) == 0
    client = ImportedTwin(Welcome(2, 8192, 4096, twin="fd"), twin.fd, layout, device)
    client.rows.memory[5] = 7
    assert int(twin.rows.memory[5]) == 7
    assert twin.free()
    client.rows.memory[6] = 8
    assert client.rows.memory[5:7].tolist() == [7, 8]
    client.close()


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
    with running_server(tmp_path / "log", flags(load, "--device", "cuda", "--device-pool", "256MiB")) as server:
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
