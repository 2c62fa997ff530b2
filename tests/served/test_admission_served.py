"""Admission in real processes: clients take turns in a pool for two of six adapters, and a drain admits nobody."""

import json
import math
import os
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from client_connector.holds import QueuedAnswer
from client_connector.reconnect import while_away
from client_connector.remote import RemoteServer
from client_connector.serving.leases import AdapterLeases
from client_connector.serving.request_state import Phase
from client_connector.serving.settings import Settings
from client_connector.transformers import attach
from lora_server.demo.launch import running_server
from lora_server.errors import AdapterLoadError, AdmissionError, ServerUnavailableError
from lora_server.placement import Layout, Placement
from tests.support import serving, stores
from tests.support.fleet import start_checking
from tests.support.provision import SLO, provision, typed
from tests.support.serving import HANG_SECONDS, cli, flags, kill_controller, status, until
from tests.support.workload import Workload, workload

LAYOUT = "ep2-pp1"
PAIRS = (("fused", "experts"), ("gate-up", "attention"), ("qv", "per-expert"))


def two_largest(work: Workload) -> tuple[int, list[str]]:
    """A pool, per shard, in which any two adapters fit, and whose names fill it."""
    found = []
    for shard in range(2):
        store = stores.cpu_store(Placement(work.spec, Layout.parse(LAYOUT)), shard, torch.float32)
        for handle, path in enumerate(work.paths.values(), start=1):
            assert stores.load(store, handle, path).result() is None
        sizes = sorted((one.nbytes, list(work.paths)[one.handle - 1]) for one in store.report.take_changes())[-2:]
        found.append((sum(nbytes for nbytes, _ in sizes), [name for _, name in sizes]))
        store.close()
    return max(found)


def metric(server, name: str) -> float:
    lines = (line.rsplit(maxsplit=1) for line in server.get("/metrics")[1].splitlines() if not line.startswith("#"))
    return next(float(value) for found, value in lines if found == name)


@pytest.fixture(scope="module")
def crowded(tmp_path_factory):
    work = workload("mixtral")
    log = tmp_path_factory.mktemp("crowded") / "log"
    nbytes, largest = two_largest(work)
    with running_server(log, flags(work, "--layout", LAYOUT, "--device-pool", str(nbytes))) as server:
        yield work, server, largest


def test_three_clients_take_turns_and_all_are_served_right(crowded, tmp_path):
    work, server, _ = crowded
    engines = [start_checking(work, server.address, tmp_path / pair[0], names=pair) for pair in PAIRS]
    try:
        until(lambda: all(len(one.rounds) >= 4 for one in engines), "four rounds of each")
        outcomes = Counter(one["outcome"] for engine in engines for one in list(engine.rounds))
        assert set(outcomes) == {"right"}, outcomes
        until(lambda: status(server.address).queued, "a request waits now")
        until(lambda: metric(server, 'lora_server_admissions_total{kind="queued"}') >= 6, "six waited")
        until(lambda: metric(server, "lora_server_admission_wait_seconds_count") >= 6, "and were admitted")
        assert metric(server, "lora_server_active_adapters") >= 2
        log = server.log.read_text()
        assert "step failed" not in log, "no adapter was evicted under a step"
    finally:
        for engine in engines:
            engine.stop()
    until(lambda: not status(server.address).active, "the places of the dead")


def test_a_waiting_request_is_told_when_a_client_dies_and_may_give_up(crowded):
    work, server, largest = crowded
    others = sorted({*work.paths} - {*largest})
    engine = serving.start_engine(str(work.base), server.address, *largest)
    session = RemoteServer(server.address, links=False).join(HANG_SECONDS)
    try:
        with pytest.raises(AdapterLoadError, match="put fewer adapters into a batch"):
            session.acquire(sorted(work.paths))
        first, second = session.ticket(), session.ticket()
        assert isinstance(session.ask(first, others[:1]), QueuedAnswer)
        assert session.ask(second, others[1:3]).position == 2
        session.cancel(first)
        assert session.ask(second, others[1:3]).position == 1 and status(server.address).queued == 1
        with pytest.raises(AdmissionError, match=r"adapters \['attention'\]: still queued, at position 2: .*in use"):
            session.acquire(others[:1], time.monotonic() + 2.0)
        kill_controller(server)
        again = while_away(HANG_SECONDS)(session.ask, second, others[1:3])  # its channel connects again
        assert isinstance(again, QueuedAnswer), "the engine's places are the engine's, also for a new controller"
        engine.kill()
        until(lambda: session.wait([second], math.inf), "the dead engine's places")
        held = session.ask(second, others[1:3])
        assert [one.name for one in held] == others[1:3] and not status(server.address).queued
        until(lambda: status(server.address).active == 2, "no other's")
    finally:
        engine.kill()
        engine.communicate(timeout=HANG_SECONDS)
        session.leave()


def test_a_request_that_ends_before_its_answer_holds_nothing(crowded):
    """An engine does not wait for the answer: the request is in ASKING until it comes."""
    _, server, largest = crowded
    until(lambda: status(server.address).ready, "its controller is up")
    leases, controller = AdapterLeases(Settings(server.address), lambda text: ()), status(server.address).pid
    try:
        with serving.suspended(controller):
            states = [leases.hold(request, largest[0], ()) for request in ("ended", "goes on")]
            assert [one.phase for one in states] == [Phase.ASKING] * 2 and not leases.is_ready("goes on")
            assert leases.num_waiting == 2
            leases.release("ended")
        until(lambda: leases.is_ready("goes on"), "its answer")
        until(lambda: serving.listed(server.address)[largest[0]].holders == 1, "the other's hold is released")
        leases.release("goes on")
        until(lambda: not status(server.address).active, "the last one's")
    finally:
        leases.close()


def test_a_pool_for_half_of_the_adapters_loads_the_same_ones_on_every_shard(load, tmp_path):
    """None stays `loading`, none is on a few shards alone, and a shard that dies changes nothing of it."""
    with running_server(tmp_path / "log", flags(load, "--layout", "ep2-pp2", "--device-pool", "256KiB")) as server:
        expected = dict.fromkeys(load.paths, "ready") | {"per-expert": "disk"}  # the one after it still fits
        states = lambda: {name: one.state for name, one in serving.listed(server.address).items()}  # noqa: E731
        until(lambda: states() == expected, "all that fit together are there")
        shown = json.loads(cli("adapters", "show", "per-expert", "--server", server.address, "--json").stdout)
        assert [one["device_layers"] for one in shown["shards"]] == [0] * 4
        serving.kill_shard(server, 2)
        until(lambda: states() == expected, "it has what its peers have")


def test_the_classes_of_a_plan_order_the_requests_of_its_server(load, tmp_path):
    """`provision --classes --emit`, then `serve --config` with what it wrote."""
    (tmp_path / "classes.yaml").write_text("gold: {slo: 'ttft_p99=1s,tpot_avg=100ms', adapters: [qv]}")
    asked = typed(slo=SLO, model=load.base, instances=2, batch_size=8, instance_gpus=2, from_adapters=load.adapters)
    done = provision(*asked, "--classes", tmp_path / "classes.yaml", "--no-simulate", "--emit", tmp_path / "plan")
    assert done.exit_code == 0, done.output
    here = ("--device", "cpu", "--device-pool", "64MiB", "--host-pool", "0", "--max-active-adapters", "1")
    config = ("--config", str(tmp_path / "plan" / "plan.yaml"))
    with running_server(tmp_path / "log", flags(load, *config, *here)) as server:
        session = RemoteServer(server.address, links=False).join(HANG_SECONDS)
        (held,) = session.acquire(["fused"], time.monotonic() + HANG_SECONDS)
        earlier, gold = session.ticket(), session.ticket()
        assert session.ask(earlier, ["attention"]).position == 1
        assert session.ask(gold, ["qv"]).position == 1 and session.ask(earlier, ["attention"]).position == 2
        session.release([held.handle])
        until(lambda: session.wait([earlier, gold], 1.0) == [gold], "the strict class has the place")
        session.leave()


NAME = "fused"


def drain(server, *arguments):
    return cli("drain", "--server", server.address, *arguments)


def admit_again(server):
    done = drain(server, "--undo")
    assert (done.returncode, done.stdout) == (0, "requests are admitted again\n"), done.stderr


def test_a_drained_server_admits_no_request_until_that_is_taken_back(load, server):
    assert drain(server).returncode == 0
    with pytest.raises(ServerUnavailableError, match="draining"):
        attach(load.model, server=server.address, timeout_seconds=5)
    admit_again(server)
    with attach(load.model, server=server.address, timeout_seconds=HANG_SECONDS) as lora:
        with lora.adapters([NAME]):
            done = drain(server, "--seconds", "0.2")
            assert (done.returncode, "1 adapters are still in use" in done.stderr) == (1, True), done.stderr
        assert drain(server).returncode == 0
        assert server.get("/readyz") == (503, "draining\n")
        again = drain(server, "--shard", "0")
        assert (again.returncode, "--undo" in again.stderr) == (1, True)
        admitted = threading.Event()

        def ask():
            with lora.adapters([NAME]):
                admitted.set()

        waiting = threading.Thread(target=ask, daemon=True)
        waiting.start()
        until(lambda: status(server.address).queued == 1, "it waits")
        assert not admitted.is_set()
        admit_again(server)
        assert admitted.wait(HANG_SECONDS)
        waiting.join(HANG_SECONDS)
    assert server.get("/readyz")[0] == 200


def test_a_drain_goes_on_when_the_controller_is_killed(load, server):
    joined = attach(load.model, server=server.address, timeout_seconds=HANG_SECONDS)
    with joined as lora, ThreadPoolExecutor(1) as threads:
        with lora.adapters([NAME]):
            draining = threads.submit(drain, server, "--seconds", str(HANG_SECONDS))
            until(lambda: server.get("/readyz") == (503, "draining\n"), "it drains")
            before = status(server.address).pid
            os.kill(before, signal.SIGKILL)
            until(lambda: (reply := serving.reached(server.address)) and reply.pid != before, "it has a successor")
            until(lambda: server.get("/readyz") == (503, "draining\n"), "which drains")
            assert not draining.done()
        done = draining.result(HANG_SECONDS)
        assert (done.returncode, "no request runs" in done.stdout) == (0, True), done.stderr
    admit_again(server)
    until(lambda: server.get("/readyz")[0] == 200, "requests are admitted again")


def test_a_shard_in_use_is_left_alone(load, server):
    before = [one.pid for one in status(server.address).shards]
    with attach(load.model, server=server.address, timeout_seconds=HANG_SECONDS) as lora, lora.adapters([NAME]):
        done = drain(server, "--shard", "1", "--seconds", "0.2")
        assert (done.returncode, "1 adapters were still in use" in done.stderr) == (1, True), done.stderr
    assert [one.pid for one in status(server.address).shards] == before
    until(lambda: server.get("/readyz")[0] == 200, "requests are admitted again")
    for wrong, words in ((["--shard", "7"], "expected one of 0 to 1"), (["--seconds", "-1"], "expected 0 to")):
        done = drain(server, *wrong)
        assert done.returncode == 2 and words in done.stderr
