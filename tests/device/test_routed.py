"""An engine on a device, from attach to shards: routed and put by kernels, which run on this CPU (emulated_link)."""

from __future__ import annotations

import pytest
import torch

from client_connector.transformers import attach
from lora_server.daemon.inproc import InprocServer
from lora_server.demo import tiny
from lora_server.demo.engine import generate, pad
from lora_server.errors import AdapterError
from lora_server.transport.shm import ShmLink
from tests.support.gpu import emulated
from tests.support.gpu.emulated_link import EmulatedLink
from tests.support.gpu.emulated_server import EmulatedServer
from tests.support.workload import NEW_TOKENS, workload

pytestmark = pytest.mark.skipif(bool(emulated.MISSING), reason=emulated.MISSING)


SHORT = {"mixtral": "ep3-pp2", "qwen3_moe": "ep1-pp1", "gpt_oss": "ep1-pp1", "llama": "ep3-pp2"}
SERVED = [
    pytest.param(kind, layout, marks=() if SHORT[kind] == layout else pytest.mark.long)
    for kind in tiny.KINDS
    for layout in ("ep1-pp1", "ep3-pp2")
]


@pytest.mark.parametrize(("kind", "layout"), SERVED)
def test_tokens_equal_peft(kind, layout, tmp_path):
    """Rows in the slots, prompts in several chunks, and more of them than a lane has slots."""
    load = workload(kind)
    server = EmulatedServer(tmp_path, load.spec, load.paths, twin="no", layout=layout, max_step_rows=24, slots=2)
    with attach(load.model, server) as lora, lora.adapters(load.names):
        assert lora.client.takes(torch.device("cpu"))
        load.check(generate(load.model, load.batch, NEW_TOKENS))
    server.close()


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_the_device_routes_as_the_host_does(kind, tmp_path):
    """To the bit: the same entries in the same order, whoever sorted them, and wherever rows lie."""
    load = workload(kind)
    model = tiny.make_model(kind, dtype=torch.bfloat16)
    logits = logits_by_server(load, model, pad(load.batch, 0), tmp_path)
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])


def logits_by_server(load, model, tokens, directory, wire="exact"):
    """Of a model whose rows a host routes, and of one whose device does, with rows in slots and in device memory."""
    options = {"layout": "ep2-pp2", "dtype": torch.bfloat16, "max_step_rows": 512, "wire": wire}
    servers = [InprocServer(load.spec, load.paths, **options)]
    for twin in ("no", "must"):
        (directory / twin).mkdir()
        servers.append(EmulatedServer(directory / twin, load.spec, load.paths, twin=twin, **options))
    (ids, mask), logits = tokens, []
    for server in servers:
        with attach(model, server) as lora, lora.adapters(load.names):
            assert lora.client.described()["wire"] == wire
            logits.append(model(ids, attention_mask=mask).logits)
        server.close()
    return logits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_codes_go_to_the_device_as_a_host_makes_them(dtype, tmp_path):
    """To the bit, with routes of the device's, wherever rows lie; engines of two dtypes, since the wire has one."""
    load = workload("mixtral")
    model, (ids, mask) = tiny.make_model("mixtral", dtype=dtype), pad(load.batch, 0)
    logits = logits_by_server(load, model, (ids, mask), tmp_path, wire="e4m3")
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])
    assert not torch.equal(logits[0], model(ids, attention_mask=mask).logits)


def test_times_and_failures_are_told_as_on_the_host(tmp_path):
    load = workload("mixtral")
    server = EmulatedServer(tmp_path, load.spec, load.paths, twin="no", layout="ep2-pp1")
    seen = []
    ids, mask = pad(load.batch, 0)
    with attach(load.model, server) as lora:
        lora.observe(seen.append)
        with lora.adapters(load.names):
            load.model(ids, attention_mask=mask)
        rows = int(mask.sum()) - sum(len(one.prompt) for one in load.batch if one.adapter is None)
        by_site = {}
        for times in seen:
            by_site[times.site] = by_site.get(times.site, 0) + times.entries
            assert times.pushed_ns <= times.received_ns <= times.started_ns <= times.done_ns <= times.arrived_ns
        experts = [count for site, count in by_site.items() if site.projection == "gate_up"]
        assert experts and all(0 < count <= 2 * rows for count in experts)
        with lora.adapters(["fused"]):
            for shard in server.shards:
                shard.store.drop(server.held["fused"].handle)
            with pytest.raises(AdapterError):
                load.model(ids[:1], attention_mask=mask[:1])
    server.close()


def test_links_of_both_kinds_are_given_the_hosts_rows(tmp_path):
    """One shard near and one far: nothing is routed here, and the near one's link still puts what it is given."""
    load = workload("mixtral")

    class Mixed(EmulatedServer):
        def connect(self, hello):
            near, far = self.listeners
            link = EmulatedLink(near.address, hello, 0, twin="no")
            return [link, ShmLink(far.address, hello, 1)]

    server = Mixed(tmp_path, load.spec, load.paths, twin="no", layout="ep2-pp1", max_step_rows=24)
    with attach(load.model, server) as lora, lora.adapters(load.names):
        assert not lora.client.takes(torch.device("cpu"))
        load.check(generate(load.model, load.batch, NEW_TOKENS))
    server.close()
