"""A GPU engine and GPU shards in real processes: the same answers over CUDA IPC, shared memory and TCP."""

import os

import pytest
import torch

from client_connector.transformers import attach
from lora_server.demo import tiny
from lora_server.demo.engine import pad
from lora_server.demo.launch import running_server
from lora_server.errors import StepError
from lora_server.wire.messages import Welcome
from lora_server.wire.region import RegionLayout
from tests.support.serving import HANG_SECONDS, flags, kill_shard

pytestmark = pytest.mark.cuda
ON_GPU = ("--device", "cuda", "--device-pool", "256MiB", "--max-step-rows", "32")


@pytest.fixture(scope="module")
def model():
    return tiny.make_model("mixtral", dtype=torch.bfloat16).cuda()


@pytest.fixture(scope="module")
def server(request, load, tmp_path_factory):
    """A server of the layout and wire that a test asks for; several shards share one GPU."""
    layout, wire = request.param
    more = (*ON_GPU, "--layout", layout, "--wire", wire)
    with running_server(tmp_path_factory.mktemp("server") / "log", flags(load, *more)) as running:
        yield running


def servers(*layouts):
    """Run a test with each of these layouts and each wire."""
    return pytest.mark.parametrize(
        "server", [(one, wire) for one in layouts for wire in ("exact", "e4m3")], indirect=True
    )


def logits(model, load, address, transport):
    ids, mask = (tensor.to(model.device) for tensor in pad(load.batch, 0))
    with attach(model, server=address, transport=transport) as lora, lora.adapters(load.names):
        return model(ids, attention_mask=mask).logits[:, -1].float().cpu()


@servers("ep1-pp1", "ep2-pp2")
def test_every_transport_gives_the_same_bits(server, model, load):
    """A row's bits do not depend on how it came, nor on its neighbours."""
    found = [logits(model, load, server.address, name) for name in ("cuda_ipc", "shm", "tcp", "auto")]
    for one in found[1:]:
        assert torch.equal(one, found[0])


@servers("ep1-pp1")
@pytest.mark.parametrize("transport", ["cuda_ipc", "shm"])
def test_no_site_waits_for_the_gpu(server, model, load, transport):
    """From the first layer to the last: routing, pushes, the engine's own GEMMs, and the deltas' way back."""
    ids, mask = (tensor.cuda() for tensor in pad(load.batch, 0))
    layers = model.base_model.layers
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


@servers("ep1-pp1")
def test_a_shard_that_dies_is_an_error_and_the_next_request_is_served(server, model, load):
    ids, mask = (tensor.cuda() for tensor in pad(load.batch, 0))
    with attach(model, server=server.address, transport="cuda_ipc", timeout_seconds=HANG_SECONDS) as lora:
        with lora.adapters(load.names):
            before = model(ids, attention_mask=mask).logits
        kill_shard(server, 0)
        with lora.adapters(load.names):
            try:
                after = model(ids, attention_mask=mask).logits
            except StepError:
                after = model(ids, attention_mask=mask).logits
        assert torch.equal(before, after)


def test_a_mirror_begins_with_zeros_and_outlives_its_shard():
    """In one process here; between two in every test above."""
    from lora_server.device.client.cuda_ipc import ImportedMirror
    from lora_server.device.host.device_memory import GpuMemory
    from lora_server.device.protocol.virtual_memory import can_share_descriptors

    device = torch.device("cuda", 0)
    if not can_share_descriptors(device):
        pytest.skip("this driver shares no memory by descriptors")
    layout = RegionLayout(depth=2, request_bytes=8192, response_bytes=4096)
    used = torch.full((64 << 20,), 255, dtype=torch.uint8, device=device)
    del used
    torch.cuda.empty_cache()
    mirror = GpuMemory(device).mirror(layout, os.getpid())
    assert int(mirror.rows.memory.count_nonzero()) == 0 and mirror.rows.memory.nbytes % (2 << 20) == 0
    client = ImportedMirror(Welcome(2, 8192, 4096, mirror="fd"), mirror.fd, layout, device)
    client.rows.memory[5] = 7
    assert int(mirror.rows.memory[5]) == 7
    assert mirror.free()
    client.rows.memory[6] = 8
    assert client.rows.memory[5:7].tolist() == [7, 8]
    client.close()


def test_a_gpu_is_as_exact_as_the_host(tmp_path, load):
    """Every row goes to all experts: otherwise rounding, which is each processor's own, decides between them."""
    exact = []
    for dtype, device in ((torch.float32, "cpu"), (torch.bfloat16, "cpu"), (torch.bfloat16, "cuda")):
        model = tiny.make_model("mixtral", dtype=dtype, num_experts_per_tok=load.spec.experts).to(device)
        settings = ("--device", device, "--dtype", str(dtype).removeprefix("torch."))
        with running_server(tmp_path / f"log-{device}-{dtype}", flags(load, *settings)) as server:
            exact.append(logits(model, load, server.address, "auto"))
    by_host, by_device = [(answer - exact[0]).abs().mean() for answer in exact[1:]]
    assert by_device <= 1.5 * by_host + 1e-3
