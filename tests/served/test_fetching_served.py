"""A server of adapters from far, in real processes: what is asked for is answered right, or refused with the reason."""

from __future__ import annotations

import pytest

from client_connector.transformers import attach
from lora_server.demo.engine import generate
from lora_server.demo.launch import running_server
from lora_server.errors import LoraServerError
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire import lora_server_pb2_grpc as rpc
from lora_server.wire.rpc import open_channel
from tests.support.far import SECONDS, far_server, left, size_of
from tests.support.serving import HANG_SECONDS, cli, shard_processes, status, until
from tests.support.workload import NEW_TOKENS, workload

NAMES = ("fused", "experts", "qv")
POOL = 490_000  # bytes; "fused" takes all but 7 kB


class Far:
    """A server whose disk cache holds one adapter or two, and a client of it."""

    def __init__(self, server, lora, work, cache):
        self.server, self.lora, self.work, self.cache = server, lora, work, cache

    def answers(self, name):
        """Whether as PEFT does."""
        index = self.work.names.index(name)
        with self.lora.adapters([name]):
            return generate(self.work.model, [self.work.batch[index]], NEW_TOKENS)[0].tokens == (
                self.work.expected[index].tokens
            )

    def ask(self, method, request):
        with open_channel(self.server.address) as channel:
            return getattr(rpc.AdaptersStub(channel), method)(request, timeout=HANG_SECONDS)

    def push_out(self, name):
        """Of all memory, by use of the others."""
        for other in (one for one in NAMES if one != name):
            assert self.answers(other)
        get = pb.GetAdapterRequest(name=name)
        until(lambda: self.ask("Get", get).state == "remote", f"{name} is away", HANG_SECONDS)


def test_a_server_of_adapters_from_far(tmp_path):
    work, cache = workload("mixtral"), tmp_path / "cache"
    cap = max(size_of(work.paths[name]) for name in NAMES) + 1000
    flags = ["--base-model", str(work.base), "--disk-cache", str(cache), "--disk-cache-size", str(cap)]
    flags += ["--max-active-adapters", "1", "--device-pool", str(POOL)]
    with far_server(tmp_path / "far") as far, running_server(tmp_path / "log", flags) as server:
        with attach(work.model, server=server.address, timeout_seconds=HANG_SECONDS) as lora:
            it = Far(server, lora, work, cache)
            for name in NAMES:
                it.ask("Add", pb.AddAdapterRequest(name=name, uri=far.put(name, work.paths[name])))
            for name in (*NAMES, *NAMES):
                assert it.answers(name)
                assert sum(int(one.split(".")[1]) for one in left(cache)) <= cap
            it.push_out("qv")
            shown = cli("adapters", "show", "qv", "--server", server.address).stdout
            assert f"{far.url}/qv" in shown and "remote 4/4" in shown, shown

            far.stalled.clear()
            far.open.clear()
            (shard,) = shard_processes(server.address)
            with lora.adapters(["qv"]):  # it begins to come
                assert far.stalled.wait(SECONDS)
                shard.kill()
                far.open.set()
            until(lambda: status(server.address).shards[0].restarts == 1, "another shard", HANG_SECONDS)
            server.wait_ready()
            until(lambda: it.answers("qv"), "right again", HANG_SECONDS)

            it.push_out("qv")
            far.put("qv", work.paths["attention"])
            with pytest.raises(LoraServerError, match="content changed since it was registered"):
                it.answers("qv")
            far.put("qv", work.paths["qv"])
            until(lambda: right_now(it), "it is what was registered again", HANG_SECONDS)
        metrics = server.get("/metrics")[1]
    assert f'lora_server_disk_cache_capacity_bytes{{node="0"}} {float(cap)}' in metrics
    assert 'lora_server_fetches_total{process="controller"} 3.0' in metrics
    assert 'lora_server_fetch_failures_total{process="shard 0"} 0.0' not in metrics


def right_now(it):
    """A failure is remembered for a second."""
    try:
        return it.answers("qv")
    except LoraServerError:
        return False
