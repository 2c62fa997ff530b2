"""Processes killed, and stopped for a second, under engines that check themselves against PEFT."""

from __future__ import annotations

import random
import time
from pathlib import Path

import psutil

from lora_server.demo.launch import RunningServer, running_server
from tests.chaos.floods import START_SECONDS, held
from tests.chaos.report import Held, Line
from tests.support.fleet import Engine, Fleet, checking, now
from tests.support.serving import all_gone, status, suspended, until
from tests.support.workload import Workload

VICTIMS = ("client", "first shard", "other shard", "controller")  # in leader mode the first leads, the other follows
PATIENCE = 120.0  # until all engines are right again
STOP_SECONDS = 1.0


def play(
    scratch: Path, load: Workload, transport: str, mode: str, times: int, dice: random.Random
) -> tuple[list[Line], Held]:
    """`times` of each fault, in a seeded order."""
    flags = ["--base-model", str(load.base), "--adapters", str(load.adapters), "--layout", "ep2-pp1"]
    events = [(victim, how) for victim in VICTIMS for how in ("killed", "stopped")] * times
    dice.shuffle(events)
    lines = {event: Line(f"{transport}, {mode}: {' '.join(event)}", times) for event in events}
    with (
        running_server(scratch / "log", [*flags, "--coordination", mode]) as server,
        Fleet(load, server.address, scratch, (transport, transport)) as fleet,
    ):
        before = held(server)
        for event in events:
            counted = fleet.outcomes()
            try:
                _harm(server, fleet, *event, scratch)
                until(lambda: server.get("/readyz")[0] == 200, "the server is complete", PATIENCE)
                fleet.all_right_again(now(), PATIENCE)
            except AssertionError:
                lines[event].late += 1
            lines[event].answers += fleet.outcomes() - counted
        return list(lines.values()), Held(f"faults, {transport}, {mode}", before, held(server))


def _harm(server: RunningServer, fleet: Fleet, victim: str, how: str, scratch: Path) -> None:
    if victim == "client":
        engine = fleet.engines[1]
        pid = engine.process.pid
    else:
        reply = status(server.address)
        shards = sorted(reply.shards, key=lambda shard: shard.shard)
        pid = reply.pid if victim == "controller" else shards[victim == "other shard"].pid
    if how == "killed":
        process = psutil.Process(pid)
        process.kill()
        all_gone([process])
        if victim == "client":
            engine.stop()
            anew = Engine(checking(scratch / "engine-1.json"))
            fleet.engines[1] = anew
            until(lambda: anew.rounds, "a new engine", START_SECONDS)
            anew.rounds[:0] = engine.rounds
        return
    with suspended(pid):
        time.sleep(STOP_SECONDS)  # the harm itself
