"""A pool for two of six adapters in real processes: clients take turns without a wrong answer or an error."""

import json
import time
from collections import Counter

import msgspec
import pytest
import torch

from client_connector.remote import Queued, RemoteServer
from client_connector.retry import while_away
from lora_server.demo.launch import running_server
from lora_server.errors import AdapterLoadError, AdmissionError
from lora_server.placement import Layout, Placement
from tests.support.checking_engine import CheckingJob
from tests.support.fleet import Engine, checking
from tests.support.serving import (
    HANG_SECONDS,
    cli,
    flags,
    kill_controller,
    kill_shard,
    listed,
    start_engine,
    status,
    until,
)
from tests.support.stores import cpu_store, load
from tests.support.workload import Workload, workload

LAYOUT = "ep2-pp1"
PAIRS = (("fused", "experts"), ("gate-up", "attention"), ("qv", "per-expert"))


def two_largest(work: Workload) -> tuple[int, list[str]]:
    """A pool, per shard, in which any two adapters fit, and whose names fill it."""
    found = []
    for shard in range(2):
        store = cpu_store(Placement(work.spec, Layout.parse(LAYOUT)), shard, torch.float32)
        for handle, path in enumerate(work.paths.values(), start=1):
            assert load(store, handle, path).result() is None
        sizes = sorted((one.nbytes, list(work.paths)[one.handle - 1]) for one in store.moved())[-2:]
        found.append((sum(nbytes for nbytes, _ in sizes), [name for _, name in sizes]))
        store.close()
    return max(found)


def turns(work: Workload, server: str, pair: tuple[str, ...], file) -> Engine:
    """An engine that holds its pair for a round, releases it, and asks again."""
    chosen = [(s, a) for s, a in zip(work.batch, work.expected, strict=True) if s.adapter in pair]
    batch, expected = zip(*chosen, strict=True)
    job = CheckingJob(str(work.base), server, "auto", HANG_SECONDS, list(batch), list(expected))
    file.write_bytes(msgspec.json.encode(job))
    return Engine(checking(file))


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
    engines = [turns(work, server.address, pair, tmp_path / pair[0]) for pair in PAIRS]
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
    engine = start_engine(str(work.base), server.address, *largest)
    session = RemoteServer(server.address, links=False).join(HANG_SECONDS)
    try:
        with pytest.raises(AdapterLoadError, match="put fewer adapters into a batch"):
            session.acquire(sorted(work.paths))
        first, second = session.ticket(), session.ticket()
        assert isinstance(session.ask(first, others[:1]), Queued)
        assert session.ask(second, others[1:3]).position == 2
        session.cancel(first)
        assert session.ask(second, others[1:3]).position == 1 and status(server.address).queued == 1
        with pytest.raises(AdmissionError, match=r"adapters \['attention'\]: still queued, at position 2: .*in use"):
            session.acquire(others[:1], time.monotonic() + 2.0)
        kill_controller(server)
        again = while_away(HANG_SECONDS)(session.ask, second, others[1:3])  # its channel connects again
        assert isinstance(again, Queued), "the engine's places are the engine's, also for a new controller"
        engine.kill()
        until(lambda: session.wait([second], 1.0), "the dead engine's places")
        held = session.ask(second, others[1:3])
        assert [one.name for one in held] == others[1:3] and not status(server.address).queued
        until(lambda: status(server.address).active == 2, "no other's")
    finally:
        engine.kill()
        engine.communicate(timeout=HANG_SECONDS)
        session.leave()


def test_a_pool_for_half_of_the_adapters_loads_the_same_ones_on_every_shard(tmp_path):
    """None stays `loading`, none is on a few shards alone, and a shard that dies changes nothing of it."""
    served = workload("mixtral")
    with running_server(tmp_path / "log", flags(served, "--layout", "ep2-pp2", "--device-pool", "256KiB")) as server:
        expected = dict.fromkeys(served.paths, "ready") | {"per-expert": "disk"}  # the one after it still fits
        states = lambda: {name: one.state for name, one in listed(server.address).items()}  # noqa: E731
        until(lambda: states() == expected, "all that fit together are there")
        shown = json.loads(cli("adapters", "show", "per-expert", "--server", server.address, "--json").stdout)
        assert [one["device_layers"] for one in shown["shards"]] == [0] * 4
        kill_shard(server, 2)
        until(lambda: states() == expected, "it has what its peers have")
