"""A server with --wire e4m3 whose kernel serves by itself, in real processes, on a GPU that is this CPU."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch

from bench.gpu_run.passes import Layer, answers
from client_connector.client import Client
from client_connector.remote import RemoteServer
from client_connector.serving.launched import LaunchedPass
from client_connector.serving.planned import PlannedPass
from client_connector.transformers import attach
from kernels_cuda.routing import Route
from lora_server.demo import tiny
from lora_server.demo.engine import pad
from lora_server.demo.launch import running_server
from lora_server.errors import ConfigError, ProtocolError
from lora_server.transport.gpu.captured import Captured
from lora_server.wire import slot
from tests.support.gpu import emulated, emulated_gpu
from tests.support.gpu.gpu_host import Host
from tests.support.gpu.gpu_steps import ROWS
from tests.support.workload import workload

pytestmark = pytest.mark.skipif(bool(emulated.MISSING), reason=emulated.MISSING)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    emulated_gpu.compile_all(in_codes=True)
    emulated_gpu.use()
    load = workload("mixtral")
    flags = ["--base-model", str(load.base), "--adapters", str(load.adapters), "--dtype", "bfloat16"]
    flags += ["--max-step-rows", "32", "--data-dir", str(tmp_path_factory.mktemp("data")), "--wire", "e4m3"]
    with running_server(tmp_path_factory.mktemp("log") / "log", flags, module="tests.support.gpu.gpu_serve") as server:
        yield server.address
    del emulated_gpu.opened.openers["cpu"]


def test_every_transport_gives_the_bits_of_one_kernel(served):
    """Rows that a kernel quantises, and those that a host does; engines of two dtypes, since the wire has one."""
    load, names = workload("mixtral"), workload("mixtral").names[:6]
    ids, mask = pad(load.batch[:6], 0)
    oracles = [tiny.peft_model(load.model, load.paths[one.adapter]) for one in load.batch[:6]]
    prompts = [torch.tensor([one.prompt]) for one in load.batch[:6]]
    exact = torch.stack([oracle(prompt).logits[0, -1] for oracle, prompt in zip(oracles, prompts, strict=True)])
    for dtype in (torch.bfloat16, torch.float16):
        model, answers = tiny.make_model("mixtral", dtype=dtype), []
        for transport in ("gpu", "shm", "tcp"):
            with attach(model, server=served, transport=transport) as lora, lora.adapters(names):
                assert lora.client.described()["wire"] == "e4m3"
                assert lora.client.takes(torch.device("cpu")) == (transport == "gpu"), "routed by a kernel"
                answers.append(model(ids, attention_mask=mask).logits[:, -1].float())
        assert torch.equal(answers[0], answers[1]) and torch.equal(answers[0], answers[2])
        base = model(ids, attention_mask=mask).logits[:, -1].float()
        ours, without = (answers[0] - exact).abs().mean(), (base - exact).abs().mean()
        assert ours < 0.25 * without, f"{ours} from PEFT in float32, {without} without adapters"


def test_a_serving_engines_launches_give_a_hosts_bits(served):
    """Experts and dense sites; rows of nobody's among them."""
    spec, rows = workload("mixtral").spec, 12
    client = [Client(RemoteServer(served, transport), 20.0) for transport in ("gpu", "tcp")]
    launched = LaunchedPass(client[0], lambda: True, dtype=torch.bfloat16, max_rows=rows, max_adapters=3)
    by_host = PlannedPass(client[1], lambda: True)
    layers = [Layer(spec, forward, rows, "cpu") for forward in (launched, by_host)]
    for seed, names in enumerate([("fused", None, "experts"), ("qv",), (None,)]):
        ours, theirs = [answers(layer, names, seed, layer.run) for layer in layers]
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), names
    launched.close(), by_host.close()


def test_who_must_have_exact_rows_is_told_so(served):
    with pytest.raises(ConfigError, match="server's is e4m3, the engine takes exact"):
        attach(workload("mixtral").model, server=served, transport="gpu", wire="exact")


def test_captured_launches_add_what_the_host_reads(tmp_path, tiny_adapters):
    """Codes put by a kernel that routes nothing, the answer added by one; rows of zeros and of what is no number."""
    host = Host(tmp_path, wire="e4m3")
    steps = host.join(host.load(tiny_adapters["all"]))
    link, x = steps.link, steps.x
    x[1], x[2, 5] = 0, math.inf
    at = slot.request_offsets(1, ROWS, 0, x.numel(), ROWS)
    header = steps.header(1, at.end - slot.HEADER_BYTES)._replace(dtype=slot.E4M3)
    memory = link.region.request(1)
    header.pack_into(memory)
    np.frombuffer(memory, np.int32, 4, at.segments)[:] = [steps.handle, 0, 0, ROWS]
    link.put_rows(header, x, torch.arange(ROWS))
    link.push(1, at.end)
    link.wait(1, time.monotonic() + 60)
    deltas = link.rows.deltas(header, x)
    assert deltas[0].isfinite().all() and deltas[0].any() and not deltas[1].any() and deltas[2].isnan().all()
    other = host.join(steps.handle).link
    captured, route, y = Captured(other), Route.empty(ROWS, other.device, max_rows=ROWS), torch.zeros_like(deltas)
    ints = torch.arange(ROWS, dtype=torch.int32)
    route.counts.copy_(torch.tensor([1, ROWS, ROWS, ROWS]))
    route.segments[0].copy_(torch.tensor([steps.handle, 0, 0, ROWS]))
    assert route.token_M is not None and route.row_N is not None
    route.token_M.copy_(ints), route.pair_N.copy_(ints), route.row_N.copy_(ints)
    site = captured.site(steps.header(0, 0)._replace(flags=slot.HAS_IN_MAP, dtype=slot.E4M3), x, route, by_entry=False)
    captured.begin(60)
    site.put(), site.wait(), site.add(y)
    captured.finish()
    assert torch.equal(y.nan_to_num(7), deltas.nan_to_num(7))
    with pytest.raises(ProtocolError, match="got float32 rows for a GPU, expected bfloat16 or float16"):
        link.put_rows(header, x.float(), torch.arange(ROWS))
    other.close(), link.close(), host.close()
