"""A serving engine whose steps are launches, as a PE of NVSHMEM's world: mapped, and reached by puts alone.

Real processes and a server of two shards; GPUs are this CPU, kernels their own source, NvshmemGpu alone is another. The
oracle is an engine that reaches the same shards over TCP, whose host routes, sends, waits and adds at every site.
"""

from __future__ import annotations

import os
import time

import pytest
import torch

from bench.gpu_run.passes import begin
from bench.gpu_run.spoken import Spoken
from client_connector.client import Client
from client_connector.remote import RemoteServer
from client_connector.serving.planned import PlannedPass
from lora_server.demo.launch import launch
from tests.support.gpu import emulated, emulated_gpu, emulated_world
from tests.support.gpu.gpu_pass_engine import ROWS, digest, layer_of
from tests.support.serving import HANG_SECONDS, shard_processes, until
from tests.support.workload import workload

pytestmark = pytest.mark.skipif(bool(emulated.MISSING), reason=emulated.MISSING)
ADAPTERS = ("attention", "experts", "fused", "qv")
BATCHES = [("fused",), ("qv", None, "experts"), ("attention", "fused", "fused", None)]


class Worker(Spoken):
    """tests.support.gpu.gpu_pass_engine; each call is one command, and its answer."""

    def ask(self, event: str, **command) -> dict:
        self.tell(**command)
        found = self.event(time.monotonic() + HANG_SECONDS, f"{event!r} in time")
        assert found["event"] == event, found
        return found

    def play(self, names, seed: int, **more) -> dict:
        return self.ask("played", do="play", names=names, seed=seed, **more)


@pytest.fixture(params=["mapped", "network"])
def server(request, tmp_path, monkeypatch):
    """Whose shards are here; its world is not complete yet."""
    emulated_gpu.compile_all(nvshmem=True)
    load = workload("mixtral")
    flags = [
        "--base-model",
        str(load.base),
        "--adapters",
        str(load.adapters),
        "--device",
        "cuda",
        "--dtype",
        "bfloat16",
    ]
    flags += ["--gpu-transport", "nvshmem", "--nvshmem-clients", "1", "--layout", "ep2-pp1", "--slots", "2"]
    flags += ["--max-step-rows", "16", "--data-dir", str(tmp_path / "data")]
    monkeypatch.setenv(emulated_world.NETWORK, str(int(request.param == "network")))
    torch.set_grad_enabled(False)
    emulated_world.use()
    server = launch(tmp_path / "log", *flags, module="tests.support.gpu.gpu_serve")
    try:
        until(lambda: "2 of 2 shards and 0 of 1" in server.get("/readyz")[1], "its shards are here", HANG_SECONDS)
        yield server
    finally:
        server.stop()


def expected(address: str, names, seed: int) -> str:
    """By way of the host, over TCP."""
    forward = PlannedPass(Client(RemoteServer(address, "tcp"), HANG_SECONDS), lambda: True)
    layer = layer_of(forward)
    layer.feed(seed)
    begin(forward, names, ROWS)
    layer.run()
    assert forward.end() == {}
    forward.close()
    return digest(layer)


def check(worker: Worker, address: str, names, seed: int) -> None:
    played = worker.play(names, seed)
    assert (played["failures"], played["digest"]) == ({}, expected(address, names, seed)), names


def test_recorded_launches_serve_every_pass_until_the_world_ends(server):
    """Who asks for terms takes no place. A session that broke comes back to its own; a shard's death voids
    the pass that waits for it, and from then on this process gets no deltas, and says why; base rows are computed."""
    assert str(RemoteServer(server.address, "nvshmem").ask_terms().layout) == "ep2-pp1"
    worker = Worker("tests.support.gpu.gpu_pass_engine", [server.address, *ADAPTERS], os.environ)
    try:
        assert worker.ask("joined", do="join")["sent"] == [0, 0], "nothing is sent while it is recorded"
        server.wait_ready()
        for seed, names in enumerate(BATCHES):
            check(worker, server.address, names, seed)
        before = worker.play(BATCHES[0], 7)["sent"]
        assert all(before), "both shards have experts"
        base = worker.play((None, None), 7)
        assert (base["sent"], base["failures"]) == (before, {}), "a pass of base rows sends nothing"

        failures = worker.play(("fused",), 1, stranger=True)["failures"]
        assert {name: code for name, (code, _) in failures.items()} == {"0": "retry", "stranger": "unknown_adapter"}
        check(worker, server.address, BATCHES[1], 3)

        worker.ask("lost", do="lose")
        check(worker, server.address, BATCHES[2], 5)

        victim = shard_processes(server.address)[0]
        failures = worker.play(("fused", None), 6, kill=victim.pid)["failures"]
        assert {name: code for name, (code, _) in failures.items()} == {"0": "shard_unavailable"}, failures
        (code, why) = worker.play(("fused",), 6)["failures"]["0"]
        assert code == "world" and "start the engine anew" in why, (code, why)
        after = worker.play((None, None), 7)
        assert (after["digest"], after["failures"]) == (base["digest"], {})
    finally:
        worker.end()
