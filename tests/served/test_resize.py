"""`lora-server resize` under engines that check every answer: they move to other shards, and no request notices."""

import contextlib
import json
import signal
import threading

import psutil
import pytest

from lora_server.demo.launch import running_server
from tests.support.fleet import Fleet, now
from tests.support.serving import all_gone, cli, flags, status, stop, until

SLOWER = 20  # a pause may be so many times as long as the longest between two answers before; and a second


def resize(server, layout, *more):
    return cli("resize", "--layout", layout, "--server", server.address, "--json", *more)


def placed(server):
    reply = status(server.address)
    return reply.layout, reply.generation


def shards(server):
    return [psutil.Process(one.pid) for one in status(server.address).shards]


def longest_gap(fleet, since, until_then=float("inf")):
    return max(one["gap"] for engine in fleet.engines for one in engine.rounds if since < one["at"] < until_then)


@contextlib.contextmanager
def engines(load, tmp_path, *more):
    """A server with the adapters of the workload, and engines that hold them all, by shared memory and by TCP."""
    with running_server(tmp_path / "log", flags(load, *more)) as server:
        with Fleet(load, server.address, tmp_path, ("shm", "tcp")) as fleet:
            fleet.all_right_again(now())
            yield server, fleet
            fleet.all_right_again(now())
            assert set(fleet.check()) == {"right"}
        assert stop(server) == 0


def test_engines_go_on_through_resizes_and_a_restart_serves_the_last_layout(load, tmp_path, record_property):
    data = "--data-dir", str(tmp_path / "data")
    with engines(load, tmp_path, *data, "--layout", "ep2-pp1") as (server, fleet):
        began = now()
        fleet.all_right_again(began)
        quiet, begun = longest_gap(fleet, began), now()
        for generation, layout in enumerate(("ep2-pp2", "ep2-pp1", "ep1-pp2"), start=2):
            old, done = shards(server), resize(server, layout)
            assert done.returncode == 0, done.stderr
            reply = json.loads(done.stdout)
            assert (reply["layout"], reply["generation"]) == (layout, generation) == placed(server)
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
        assert placed(server) == ("ep1-pp2", 4)
    with running_server(tmp_path / "other", flags(load, *data, "--layout", "ep2-pp2")) as server:
        assert placed(server) == ("ep2-pp2", 1), "another --layout wins"


def test_a_layout_in_whose_pools_the_adapters_do_not_fit_is_refused(load, tmp_path):
    with engines(load, tmp_path, "--layout", "ep2-pp2", "--device-pool", "600KiB") as (server, _):
        serving = shards(server)
        done = resize(server, "ep1-pp1")
        assert done.returncode == 2 and "bytes are needed together on shard 0, and its pool has 614400" in done.stderr
        assert "ep1-pp1, in which there is no place for" in done.stderr
        assert placed(server) == ("ep2-pp2", 1) and shards(server) == serving
        until(lambda: len(children_of(server)) == len(serving), "the new shards ended")
        assert resize(server, "ep2-pp2").returncode == 2, "its own layout"
        assert resize(server, "ep9-pp1").returncode == 2, "shards would own nothing"


def children_of(server):
    """The shards' processes."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    found = []
    for one in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            if one.name().startswith("lora-shard") and one.status() != psutil.STATUS_ZOMBIE:
                found.append(one)
    return found


@pytest.mark.parametrize("dies", ["shard", "controller"])
def test_the_old_shards_serve_on_when_a_process_dies_before_the_new_ones_serve(load, tmp_path, dies):
    with engines(load, tmp_path, "--layout", "ep2-pp1") as (server, fleet):
        before, serving, answers = status(server.address), shards(server), []
        asking = threading.Thread(target=lambda: answers.append(resize(server, "ep2-pp2")))
        asking.start()
        until(lambda: set(children_of(server)) - set(serving), "a new shard")
        stopped = (set(children_of(server)) - set(serving)).pop()
        stopped.send_signal(signal.SIGSTOP)  # so that the others are up, and it never is
        until(lambda: status(server.address).resize.done == 3, "three new shards are up")
        new = set(children_of(server)) - set(serving)
        victim = psutil.Process(before.pid) if dies == "controller" else (new - {stopped}).pop()
        victim.kill()
        asking.join()
        stopped.kill()
        assert answers[0].returncode == 1, answers[0].stdout
        if dies == "shard":
            assert "were lost: see the node's log" in answers[0].stderr
        until(lambda: set(children_of(server)) == set(serving), "the new shards ended")
        server.wait_ready()
        assert placed(server) == ("ep2-pp1", 1) and shards(server) == serving
        fleet.all_right_again(now())
        assert resize(server, "ep1-pp1").returncode == 0, "another one is possible"


def test_stages_that_follow_a_leader_are_resized_as_well(load, tmp_path):
    with engines(load, tmp_path, "--layout", "ep2-pp1", "--coordination", "leader") as (server, fleet):
        for generation, layout in enumerate(("ep2-pp2", "ep2-pp1"), start=2):
            done = resize(server, layout)
            assert done.returncode == 0 and placed(server) == (layout, generation), done.stderr
            fleet.all_right_again(now())
