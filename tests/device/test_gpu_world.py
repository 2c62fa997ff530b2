"""NVSHMEM's world in real processes: shards and engines whose GPUs are this CPU, their heaps side by side in a file."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch

from lora_server.demo import children
from lora_server.demo.launch import RunningServer, launch
from tests.support.gpu import emulated, emulated_gpu, emulated_world
from tests.support.gpu.gpu_engine import Engine
from tests.support.serving import shard_processes, status, until
from tests.support.workload import workload

pytestmark = pytest.mark.skipif(bool(emulated.MISSING), reason=emulated.MISSING)
ENGINES, ADAPTER = 2, "fused"


class Told:
    """An engine process, as tests.support.gpu.gpu_engine says."""

    def __init__(self, address: str, network: bool) -> None:
        environment = {**os.environ, emulated_world.NETWORK: str(int(network))}
        command = children.own([sys.executable, "-m", "tests.support.gpu.gpu_engine", address, ADAPTER])
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, env=environment, text=True, **pipes)

    def tell(self, line: str) -> None:
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def heard(self) -> str:
        return self.process.stdout.readline().strip()

    def ask(self, line: str) -> str:
        self.tell(line)
        return self.heard()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


class Place:
    """A server and its engines."""

    def __init__(self, server: RunningServer, network: bool) -> None:
        self.server, self.network = server, network
        self.engines = list[Told]()

    @property
    def address(self) -> str:
        return self.server.address

    def engine(self) -> Told:
        self.engines.append(Told(self.address, self.network))
        return self.engines[-1]

    def gather(self) -> None:
        """Engines, until the world is made."""
        until(lambda: "2 of 2 shards and 0 of" in self.server.get("/readyz")[1], "its shards are here")
        new = [self.engine() for _ in range(ENGINES)]
        for engine in new:
            engine.tell("join")
        assert [engine.heard() for engine in new] == ["joined"] * ENGINES
        self.server.wait_ready()


@pytest.fixture
def place(request, tmp_path, monkeypatch):
    """Of the parameter's words: network, nothing of another PE is mapped; e4m3, rows have 8 bits."""
    network, in_codes = "network" in request.param, "e4m3" in request.param
    emulated_gpu.compile_all(nvshmem=True, in_codes=in_codes)
    load = workload("mixtral")
    flags = ["--base-model", str(load.base), "--adapters", str(load.adapters), "--device", "cuda"]
    flags += ["--gpu-transport", "nvshmem", "--nvshmem-clients", str(ENGINES), "--layout", "ep1-pp2", "--slots", "2"]
    flags += ["--max-step-rows", "32", "--data-dir", str(tmp_path / "data"), "--wire", "e4m3" if in_codes else "exact"]
    monkeypatch.setenv(emulated_world.NETWORK, str(int(network)))
    torch.set_grad_enabled(False)
    place = Place(launch(tmp_path / "log", *flags, module="tests.support.gpu.gpu_serve"), network)
    try:
        yield place
    finally:
        for engine in place.engines:
            engine.end()
        place.server.stop()


def made(place: Place) -> tuple[Told, Told, str]:
    """Two engines, and the bits that all transports have."""
    place.gather()
    first, second = place.engines
    bits = first.ask("go")
    assert len(bits) == 64 and second.ask("go") == bits
    beside = Engine(place.address, ADAPTER, "tcp")
    assert beside.join() == "joined" and beside.go() == bits, "the same kernel, with steps that a host carries"
    beside.leave()
    return first, second, bits


@pytest.mark.parametrize("place", ["network"], indirect=True)
def test_a_place_is_its_process_s(place):
    first, second, bits = made(place)
    until(
        lambda: [list(one.transports) for one in status(place.address).joined] == [["nvshmem"]] * ENGINES,
        "its shards say so",
    )
    assert first.ask("leave") == "left"
    assert second.ask("go") == bits
    stranger = place.engine()
    assert re.match(
        r"world: NVSHMEM: world \d+ is complete, and no process joins it any more \(1 of 2 ", stranger.ask("join")
    )
    assert first.ask("join") == "joined" and first.ask("go") == bits, "it came back"
    assert first.ask("abandon") == "left"
    assert "what it sent may still be on its way" in first.ask("hurry")


@pytest.mark.parametrize("place", ["mapped"], indirect=True)
def test_a_world_outlives_an_engine_and_ends_with_a_shard(place):
    first, second, bits = made(place)
    second.end()
    assert first.ask("go") == bits
    killed, other = shard_processes(place.address)
    killed.kill()
    assert first.ask("go").startswith("shard_unavailable: shard 0 ")
    place.gather()
    assert not other.is_running(), "it started anew, too"
    assert [engine.ask("go") for engine in place.engines[ENGINES:]] == [bits] * ENGINES
    assert first.ask("leave") == "left"
    assert "which is over, and a process is in one world in its life: start the engine anew" in first.ask("join")


@pytest.mark.parametrize("place", ["network e4m3"], indirect=True)
def test_rows_of_8_bits_have_the_bits_of_tcp(place):
    """From kernels that put codes and one that serves them; another engine's are the same, and a second time."""
    first, second, bits = made(place)
    assert second.ask("go") == bits == first.ask("go")
