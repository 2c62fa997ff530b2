"""A cold adapter delays no other request: not one that loads slowly, nor one from a slow source, nor one that fails."""

import contextlib
import shutil
import statistics
from itertools import count
from pathlib import Path

import pytest

from bench import cold_neighbour
from bench.cold_neighbour import REMOTE, SlowFiles, add_remote, make_remote, slow_files
from bench.tick_engine import Generation, TickEngine
from client_connector.transformers import attach
from lora_server.demo.engine import load_model
from lora_server.demo.launch import running_server
from lora_server.sources.cache import DiskCache
from lora_server.units import Size
from tests.support.serving import HANG_SECONDS, listed, until

LAYERS, LAYER_SECONDS, ROOM = cold_neighbour.LAYERS, cold_neighbour.LAYER_SECONDS, 3
FETCH_SECONDS, STEP_SECONDS = 5.0, 2.0


class Served:
    """A server with a slow link and room for three adapters, and the source of a fourth."""

    def __init__(self, work: Path, stack: contextlib.ExitStack) -> None:
        size = cold_neighbour.make(work)
        self.work, self.source = work, stack.enter_context(slow_files(work / "adapters"))
        gbps = size * 8e-9 / (LAYER_SECONDS * LAYERS)
        flags = ["--base-model", str(work / "base"), "--adapters", str(work / "adapters"), "--dtype", "float32"]
        flags += ["--device-pool", str(round(size * (ROOM + 0.5))), "--host-pool", "0", "--allow-source", self.source]
        flags += ["--host-link-gbps", f"{gbps:.6f}", "--disk-cache", str(work / "cache")]
        self.server = stack.enter_context(running_server(work / "log", flags))
        self.cold = (f"a{number % 4 + 2}" for number in count(1))  # a2 was loaded at the start
        self.version = add_remote(self.server.address, f"{self.source}/a7")

    @contextlib.contextmanager
    def remote(self, engine: TickEngine, seconds: float = HANG_SECONDS):
        """Have the adapter that was added by URL nowhere but there; its source answers after so many seconds."""
        for _ in range(ROOM):
            beside(engine, next(self.cold))
        make_remote(self.server.address, DiskCache(self.work / "cache", Size(share=0.5)), self.version)
        SlowFiles.seconds = seconds
        SlowFiles.opened.clear()
        try:
            yield
        finally:
            SlowFiles.seconds = 0.0


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with contextlib.ExitStack() as stack:
        yield Served(tmp_path_factory.mktemp("slow"), stack)


@pytest.fixture
def engine(served):
    """An engine with four requests of two adapters under way."""
    engine = TickEngine(served.server.address, STEP_SECONDS)
    warm = [engine.add(f"warm-{number}", Generation(f"a{number % 2}")) for number in range(4)]
    until(lambda: all(one.done > 20 for one in warm), "the warm requests generate")
    yield engine
    engine.close()
    assert not any(one.failure for one in warm)


def beside(engine: TickEngine, name: str):
    """A request of a cold adapter, and the passes from its arrival to its first token or its end."""
    first = len(engine.passes)
    cold = engine.add("cold", Generation(name, prompt=8, passes=2))
    assert cold.ended.wait(HANG_SECONDS)
    return cold, [one for one in engine.passes[first:] if not cold.first or one.began < cold.first]


def usual(engine: TickEngine) -> float:
    """The seconds of a pass without a cold adapter, on this machine as busy as it is now."""
    return statistics.median(one.seconds for one in engine.passes[-20:])


def void(passes) -> list[str]:
    return [request for one in passes for request in one.failures if request.startswith("warm")]


def test_warm_rows_do_not_wait_for_an_adapter_that_loads_layer_by_layer(served, engine):
    before, whole = usual(engine), LAYERS * LAYER_SECONDS
    cold, passes = beside(engine, next(served.cold))
    assert cold.failure is None and not void(passes)
    assert cold.first - cold.began > 0.8 * whole, "it was cold"
    limit = max(whole / 4, 5 * before)
    assert statistics.median(one.seconds for one in passes) < limit, "a pass that waits takes as long as the load"
    assert all("cold" not in one.requests for one in passes[:-2])


def test_a_block_of_transformers_that_waits_begins_when_its_adapters_are_loaded(served):
    address, name = served.server.address, next(served.cold)
    assert not listed(address)[name].resident_layers
    with attach(load_model(served.work / "base"), server=address) as lora, lora.adapters([name], wait="loaded"):
        assert listed(address)[name].resident_layers == LAYERS


def test_warm_rows_do_not_wait_for_a_fetch_that_takes_longer_than_a_step_may(served, engine):
    with served.remote(engine, FETCH_SECONDS):
        before = served.server.log.read_text()
        cold, passes = beside(engine, REMOTE)
    assert cold.failure is None and cold.void == 0 and not void(passes)
    assert cold.first - cold.began > FETCH_SECONDS and len(passes) > 10
    assert "joined" not in served.server.log.read_text()[len(before) :], "no engine joined anew"


def test_a_load_that_fails_ends_its_own_request_by_name(served, engine):
    for _ in range(ROOM):
        beside(engine, next(served.cold))
    files = served.work / "adapters" / "a6"
    until(lambda: listed(served.server.address)["a6"].state == "disk", "it is on disk alone")
    shutil.move(files, served.work / "gone")
    try:
        cold, passes = beside(engine, "a6")
    finally:
        shutil.move(served.work / "gone", files)
    assert cold.failure is not None and "adapter 'a6': " in cold.failure.message and str(files) in cold.failure.message
    assert cold.failure.code in ("adapter_load", "adapter_format", "adapter_source", "adapter") and not void(passes)


def test_a_step_that_meets_missing_weights_fails_for_its_adapter_alone(served, engine):
    """As when an adapter was evicted just now: its request waits until it is loaded, the others' rows come again.

    The fetch ends only after a step has failed for it, so no step waited for it.
    """
    leases, fail_step = engine.leases, engine.leases.fail_step

    def failed(request, failure):
        if request == "cold":
            leases._requests[request].pace = 0.0
            SlowFiles.opened.set()
        return fail_step(request, failure)

    with served.remote(engine):
        leases.pace.of, leases.fail_step = lambda tokens: None, failed  # scheduled as soon as it is admitted
        cold, passes = beside(engine, REMOTE)
    assert cold.failure is None and cold.first
    failures = [one.failures for one in passes if "cold" in one.failures]
    assert [one["cold"].code for one in failures] == ["adapter_not_loaded"]
    assert all(one.code == "retry" for each in failures for request, one in each.items() if request != "cold")
