"""`lora-server resize` under engines that check every answer: they move to other shards, and no request notices."""

import contextlib
import json
import re
import signal
import threading

import psutil
import pytest

from client_connector.transformers import attach
from lora_server.demo.launch import running_server
from tests.support.fleet import Fleet, now
from tests.support.relay import Relay
from tests.support.resizing import children_of, placed, resize
from tests.support.serving import HANG_SECONDS, all_gone, answers, flags, shard_processes, status, stop, until

SLOWER = 20  # a pause may be so many times as long as the longest between two answers before; and a second


def longest_gap(fleet, since, until_then=float("inf")):
    return max(one["gap"] for engine in fleet.engines for one in engine.rounds if since < one["at"] < until_then)


@contextlib.contextmanager
def engines(load, tmp_path, *more):
    """A server with the adapters of the workload, and engines that hold them all, by shared memory and by TCP."""
    with running_server(tmp_path / "log", flags(load, *more)) as server:
        with Fleet(load, server.address, tmp_path, ("shm", "tcp")) as fleet:
            yield server, fleet
            fleet.check_all_right()
        assert stop(server) == 0


def test_engines_go_on_through_resizes_and_a_restart_serves_the_last_layout(load, tmp_path, record_property):
    data = "--data-dir", str(tmp_path / "data")
    with engines(load, tmp_path, *data, "--layout", "ep2-pp1") as (server, fleet):
        began = now()
        fleet.all_right_again(began)
        quiet, begun = longest_gap(fleet, began), now()
        for generation, layout in enumerate(("ep2-pp2", "ep2-pp1", "ep1-pp2"), start=2):
            old, done = shard_processes(server.address), resize(server.address, layout)
            assert done.returncode == 0, done.stderr
            reply = json.loads(done.stdout)
            assert (reply["layout"], reply["generation"]) == (layout, generation) == placed(server.address)
            assert (reply["moved"], reply["ended"]) == (2, 0), "all under the lease that they have"
            all_gone(old)
            fleet.all_right_again(now())
        pause = longest_gap(fleet, begun)
        record_property("longest pause, quiet and resized", (quiet, pause))
        print(f"longest pause: {quiet:.3f} s quiet, {pause:.3f} s resized")
        assert pause < 1.0 + SLOWER * quiet
        assert (
            status(server.address).resize.state == "" and 'resizes_total{outcome="done"} 3' in server.get("/metrics")[1]
        )
    with running_server(tmp_path / "again", flags(load, *data, "--layout", "ep2-pp1")) as server:
        assert placed(server.address) == ("ep1-pp2", 4)
    with running_server(tmp_path / "other", flags(load, *data, "--layout", "ep2-pp2")) as server:
        assert placed(server.address) == ("ep2-pp2", 1), "another --layout wins"


def test_a_layout_in_whose_pools_the_adapters_do_not_fit_is_refused(load, tmp_path):
    with engines(load, tmp_path, "--layout", "ep2-pp2", "--device-pool", "600KiB") as (server, _):
        serving = shard_processes(server.address)
        done = resize(server.address, "ep1-pp1")
        assert done.returncode == 2 and "bytes are needed together on shard 0, and its pool has 614400" in done.stderr
        assert "ep1-pp1, in which there is no place for" in done.stderr
        assert placed(server.address) == ("ep2-pp2", 1) and shard_processes(server.address) == serving
        until(lambda: len(children_of(server)) == len(serving), "the new shards ended")
        assert resize(server.address, "ep2-pp2").returncode == 2, "its own layout"
        assert resize(server.address, "ep9-pp1").returncode == 2, "shards would own nothing"


@pytest.mark.parametrize("dies", ["shard", "controller"])
def test_the_old_shards_serve_on_when_a_process_dies_before_the_new_ones_serve(load, tmp_path, dies):
    with engines(load, tmp_path, "--layout", "ep2-pp1") as (server, fleet):
        before, serving, said = status(server.address), shard_processes(server.address), []
        asking = threading.Thread(target=lambda: said.append(resize(server.address, "ep2-pp2")))
        asking.start()
        until(lambda: set(children_of(server)) - set(serving), "a new shard")
        stopped = (set(children_of(server)) - set(serving)).pop()
        stopped.send_signal(signal.SIGSTOP)  # so that the others are up, and it never is
        until(lambda: status(server.address).resize.done == 3, "three new shards are up")
        with attach(load.model, server.address, transport="shm", timeout_seconds=HANG_SECONDS) as lora:
            assert answers(lora, load, "qv"), "an engine can still join the old shards"
        new = set(children_of(server)) - set(serving)
        victim = psutil.Process(before.pid) if dies == "controller" else (new - {stopped}).pop()
        victim.kill()
        asking.join()
        stopped.kill()
        assert said[0].returncode == 1, said[0].stdout
        why = {
            "shard": r"ep2-pp2: lost shards \[\d\] on node 0: see the node's log",
            "controller": "another controller has taken over, and serves on as ep2-pp1: not resized, try again",
        }
        assert re.search(why[dies], said[0].stderr), said[0].stderr
        until(lambda: set(children_of(server)) == set(serving), "the new shards ended")
        server.wait_ready()
        assert placed(server.address) == ("ep2-pp1", 1) and shard_processes(server.address) == serving
        fleet.all_right_again(now())
        assert resize(server.address, "ep1-pp1").returncode == 0, "another one is possible"


def test_stages_that_follow_a_leader_are_resized_as_well(load, tmp_path):
    with engines(load, tmp_path, "--layout", "ep2-pp1", "--coordination", "leader") as (server, fleet):
        for generation, layout in enumerate(("ep2-pp2", "ep2-pp1"), start=2):
            done = resize(server.address, layout)
            assert done.returncode == 0 and placed(server.address) == (layout, generation), done.stderr
            fleet.all_right_again(now())


def test_engines_that_are_away_during_the_whole_resize_join_again(load, tmp_path):
    """One is stopped, the other does not reach the controller. Until it does, what it gets are typed errors."""
    with (
        running_server(tmp_path / "log", flags(load, "--layout", "ep2-pp1", "--lease-seconds", "2")) as server,
        Relay(server.address) as relay,
        Fleet(load, server.address, tmp_path / "stopped", ("shm",)) as stopped,
        Fleet(load, relay.address, tmp_path / "cut off", ("tcp",), timeout=5.0) as cut_off,
    ):
        (engine,) = stopped.engines
        engine.process.send_signal(signal.SIGSTOP)
        relay.cut()
        old, done = shard_processes(server.address), resize(server.address, "ep2-pp2")
        assert done.returncode == 0, done.stderr
        all_gone(old)
        assert not status(server.address).clients, "their leases are over"
        engine.process.send_signal(signal.SIGCONT)
        relay.mend()
        for fleet in (stopped, cut_off):
            fleet.all_right_again(now())
            assert fleet.check()["right"]
