"""NVSHMEM's world in real processes: shards and engines whose GPUs are this CPU, their heaps side by side in a file.

One engine takes steps of a session, and one's passes are recorded launches. Either has the bits of TCP, whose host
routes, sends, waits and adds; nothing of another PE is mapped over a network, and rows may have 8 bits.
"""

import re

import pytest

from client_connector.remote import RemoteServer
from lora_server.demo.launch import RunningServer, launch
from tests.support.gpu import emulated_gpu, emulated_world
from tests.support.gpu.gpu_engine import Engine, EngineProcess, digest_by_host
from tests.support.serving import HANG_SECONDS, shard_processes, status, until
from tests.support.workload import workload

pytestmark = [pytest.mark.emulator, pytest.mark.usefixtures("forked"), pytest.mark.timeout(600)]  # it builds kernels
ADAPTERS = ("fused", "attention", "experts", "qv")
BATCHES = [("fused",), ("qv", None, "experts"), ("attention", "fused", "fused", None)]


class Place:
    """A server and its engines."""

    def __init__(self, server: RunningServer) -> None:
        self.server, self.engines = server, list[EngineProcess]()

    @property
    def address(self) -> str:
        return self.server.address

    def engine(self) -> EngineProcess:
        self.engines.append(EngineProcess(self.address, "nvshmem", *ADAPTERS))
        return self.engines[-1]

    def gather(self, *ways: str) -> list[EngineProcess]:
        """Two engines that join in these ways: the world is made."""
        until(lambda: "2 of 2 shards and 0 of" in self.server.get("/readyz")[1], "its shards are here", HANG_SECONDS)
        new = [self.engine() for _ in ways]
        for engine, way in zip(new, ways, strict=True):
            engine.tell(do=way)
        joined = [engine.answer() for engine in new]
        assert [one["event"] for one in joined] == [f"{way}ed" for way in ways], joined
        assert all(not any(one.get("sent", ())) for one in joined), "nothing is sent while it is recorded"
        self.server.wait_ready()
        return new

    def check(self, engine: EngineProcess, seed: int) -> list[int]:
        """A pass has the bits of a host's; how many steps were sent until then."""
        names = BATCHES[seed % len(BATCHES)]
        played = engine.ask("play", names=names, seed=seed)
        assert (played["failures"], played["digest"]) == ({}, digest_by_host(self.address, names, seed)), names
        return played["sent"]


@pytest.fixture
def place(request, tmp_path, monkeypatch):
    """Of the parameter's words: network, nothing of another PE is mapped; e4m3, rows have 8 bits."""
    network, in_codes = "network" in request.param, "e4m3" in request.param
    emulated_gpu.compile_all(nvshmem=True, in_codes=in_codes)
    models = workload("mixtral")
    flags = ["--base-model", str(models.base), "--adapters", str(models.adapters), "--device", "cuda"]
    flags += ["--gpu-transport", "nvshmem", "--nvshmem-clients", "2", "--layout", "ep2-pp1", "--slots", "2"]
    flags += ["--max-step-rows", "16", "--data-dir", str(tmp_path / "data"), "--wire", "e4m3" if in_codes else "exact"]
    monkeypatch.setenv(emulated_world.NETWORK, str(int(network)))
    emulated_world.use()
    place = Place(launch(tmp_path / "log", *flags, module="tests.support.gpu.gpu_serve"))
    try:
        yield place
    finally:
        for engine in place.engines:
            engine.end()
        place.server.stop()


def made(place: Place) -> tuple[EngineProcess, EngineProcess, str]:
    """An engine that plays passes, one that takes steps, and the bits that steps have over all transports."""
    plays, goes = place.gather("record", "join")
    for seed in range(len(BATCHES)):
        sent = place.check(plays, seed)
    assert all(sent), "both shards have experts"
    by_host = Engine(place.address, "tcp", list(ADAPTERS))
    by_host.join()
    bits = by_host.go()["digest"]
    by_host.leave()
    assert len(bits) == 64 and [goes.ask("go")["digest"] for _ in range(2)] == [bits] * 2
    return plays, goes, bits


def voided(place: Place, plays: EngineProcess) -> None:
    """A shard's death voids the pass that waits for it; from then on this process gets no deltas, and says why."""
    base = plays.ask("play", names=(None, None), seed=7)
    failures = plays.ask("play", names=("fused", None), seed=6, kill=shard_processes(place.address)[0].pid)["failures"]
    assert {name: code for name, (code, _) in failures.items()} == {"0": "shard_unavailable"}, failures
    (code, why) = plays.ask("play", names=("fused",), seed=6)["failures"]["0"]
    assert code == "world" and "start the engine anew" in why, (code, why)
    after = plays.ask("play", names=(None, None), seed=7)
    assert (after["digest"], after["failures"]) == (base["digest"], {}), "base rows are computed"


@pytest.mark.parametrize("place", ["network"], indirect=True)
def test_a_place_is_its_process_s(place):
    """Only asking for terms takes none. An engine that left, or lost its session, comes back to its own."""
    assert str(RemoteServer(place.address, "nvshmem").ask_terms().layout) == "ep2-pp1"
    plays, goes, bits = made(place)
    joined = [["nvshmem"]] * 2
    until(lambda: [list(one.transports) for one in status(place.address).joined[:2]] == joined, "its shards say so")
    assert goes.ask("leave")["event"] == "left"
    place.check(plays, 3)
    refused = place.engine().ask("join")
    assert re.match(r"NVSHMEM: world \d+ is complete, and no process joins it any more \(1 of 2 ", refused["reason"])
    assert goes.ask("join")["event"] == "joined" and goes.ask("go")["digest"] == bits, "it came back"
    stopped = [process.pid for process in shard_processes(place.address)]
    assert goes.ask("leave", stopped=stopped)["event"] == "left"
    until(lambda: "what it sent may still be on its way" in goes.ask("join", seconds=1.0)["reason"], "its place rests")
    plays.ask("lose")
    place.check(plays, 4)
    voided(place, plays)


@pytest.mark.parametrize("place", ["mapped"], indirect=True)
def test_a_world_outlives_an_engine_and_ends_with_a_shard(place):
    plays, goes, bits = made(place)
    before = plays.ask("play", names=BATCHES[0], seed=7)["sent"]
    base = plays.ask("play", names=(None, None), seed=7)
    assert (base["sent"], base["failures"]) == (before, {}), "a pass of base rows sends nothing"
    failures = plays.ask("play", names=("fused",), seed=1, stranger=True)["failures"]
    assert {name: code for name, (code, _) in failures.items()} == {"0": "retry", "stranger": "unknown_adapter"}
    other = shard_processes(place.address)[1]
    goes.end()
    place.check(plays, 3)
    voided(place, plays)
    successors = place.gather("join", "join")
    assert not other.is_running(), "it started anew, too"
    assert [engine.ask("go")["digest"] for engine in successors] == [bits] * 2
    assert "which is over, and a process is in one world in its life" in plays.ask("join")["reason"]


@pytest.mark.long
@pytest.mark.parametrize("place", ["network e4m3"], indirect=True)
def test_rows_of_8_bits_have_the_bits_of_tcp(place):
    """From kernels that put codes and one that serves them."""
    made(place)
