"""The delay of a step whose shard dies, or whose shards' host is cut off, where each shard has a twin on another host.

    python -m bench.failover [--kills N] [--cuts N] [--failover-ms N] [--json]

A server of one tiny model with two replicas: two nodes of two shards each, each node on a host of its own (network
namespaces of this machine, which take root; without them nothing is cut). An engine pushes a row to both shards of an
expert site, over and over. At a random moment a shard's process that it uses is killed, or the host of both is cut off.
A fault is detected when the engine gives a shard up for its twin: when its connection ends, or after --failover-ms of
silence. Figures are from the fault to its detection, and from there to the end of that step. Every delta has to be as
before. The next fault comes when all shards are up again, and the engine uses those that it prefers.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable, MutableMapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch

from bench import harness
from bench.replicas import Engine, Where, serve
from lora_server.spec import Site
from tests.support.hosts import MISSING, Host, switch
from tests.support.serving import reached

SITE, SHARDS = Site(0, "gate_up"), 2  # of a replica
GIVEN_UP = "steps go to a shard's twin"  # what the connector logs then
PAUSE_SECONDS, CUT_SECONDS, HEAL_SECONDS = 0.05, 0.5, 120.0
COLUMNS = (
    "fault {fault} | transport {transport} | faults {faults:d} | detected after, ms: median {detected:.1f} | "
    "added then, ms: median {median:.1f} | p99 {p99:.1f} | most {most:.1f}"
)
detections: list[float] = []  # time.perf_counter()


def note(logger: object, method: str, line: MutableMapping[str, Any]) -> str:
    """Note when a shard is given up, and log nothing."""
    if line["event"] == GIVEN_UP:
        detections.append(time.perf_counter())
    raise structlog.DropEvent


class Checked:
    """An engine whose every delta has to be the first step's."""

    def __init__(self, address: str, transport: str) -> None:
        self.address, self.engine = address, Engine(address, transport, SITE)
        self._expected = self._deltas()

    def _deltas(self) -> torch.Tensor:
        found = dict[int, torch.Tensor]()
        self.engine.step(lambda message, delta: found.update({message.shard: delta.clone()}))
        return torch.stack([found[shard] for shard in sorted(found)])

    def step(self) -> None:
        if not torch.equal(self._deltas(), self._expected):
            raise SystemExit("a delta is not that of the step before the fault")

    def used(self) -> list[int]:
        return [self.engine.client.lanes[shard].shard for shard in range(SHARDS)]

    def struck(self, fault: Callable[[], object], shards: set[int], dice: random.Random) -> tuple[float, float]:
        """Push steps until none goes to the shards that a fault strikes; return the ms until it was detected, and from
        there to the end of that step."""
        began, ended = list[float](), 0.0
        detections.clear()
        timer = threading.Timer(dice.uniform(0, PAUSE_SECONDS), lambda: (began.append(time.perf_counter()), fault()))
        timer.start()
        until = time.monotonic() + HEAL_SECONDS
        while shards & set(self.used()):
            if time.monotonic() > until:
                raise TimeoutError(f"not within {HEAL_SECONDS:g} s: no step goes to {shards} any more")
            self.step()
            if detections and not ended:
                ended = time.perf_counter()
        timer.join()
        return 1e3 * (detections[0] - began[0]), 1e3 * (ended - detections[0])

    def heal(self, used: list[int]) -> None:
        """Push steps until all shards are up, and the engine uses those that it did."""

        def healed() -> bool:
            self.step()
            reply = reached(self.address)
            return reply is not None and reply.ready and not reply.degraded and self.used() == used

        harness.until(healed, "all shards are up and used", HEAL_SECONDS)


Strike = Callable[[Checked, random.Random], tuple[float, float]]


def kill(engine: Checked, dice: random.Random) -> tuple[float, float]:
    used, shards = engine.used(), harness.status(engine.address).shards
    victim = dice.choice(used)
    found = engine.struck(partial(os.kill, shards[victim].pid, signal.SIGKILL), {victim}, dice)
    engine.heal(used)
    return found


def cut(engine: Checked, dice: random.Random, hosts: list[Host]) -> tuple[float, float]:
    used = engine.used()
    node = harness.status(engine.address).shards[used[0]].node
    with ExitStack() as stack:
        found = engine.struck(lambda: stack.enter_context(hosts[node].is_cut()), set(used), dice)
        time.sleep(CUT_SECONDS)  # the outage goes on
    engine.heal(used)
    return found


def measure(fault: str, times: int, address: str, transport: str, strike: Strike) -> dict[str, Any]:
    engine, dice = Checked(address, transport), random.Random(7)
    try:
        found = np.array([strike(engine, dice) for _ in harness.progress(range(times), f"{fault}, {transport}")])
    finally:
        engine.engine.client.close()
    median, p99, most = np.percentile(found[:, 1], (50, 99, 100))
    row = {"detected": np.median(found[:, 0]), "median": median, "p99": p99, "most": most}
    return {"fault": fault, "transport": transport, "faults": times, **{name: float(it) for name, it in row.items()}}


def main() -> None:
    given = harness.flags(__doc__, kills=100, cuts=100, failover_ms=1000)
    harness.one_thread()
    structlog.configure(processors=[note])
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lora-bench-")))
        harness.make(work, "mixtral", {"law": {"lora_rank": 16, "targets": "all"}}, hidden_size=1024)
        hosts, wheres = list[Host](), list[Where]([{}, {}])
        if not MISSING:
            wires = stack.enter_context(switch())
            hosts = [wires.host() for _ in wheres]
            wheres = [{"host": host.address, "prefix": host.prefix} for host in hosts]
        flags = ("--layout", "ep2-pp1", "--replicas", "2", "--failover-ms", str(given.failover_ms))
        address = serve(stack, work, "server", flags, wheres)
        found = [measure("a shard is killed", given.kills, address, transport, kill) for transport in ("shm", "tcp")]
        if hosts:
            found.append(measure("a host is cut off", given.cuts, address, "tcp", partial(cut, hosts=hosts)))
    harness.show(given, found, harness.table(f"nothing is cut: {MISSING}" if MISSING else "", found, COLUMNS))


if __name__ == "__main__":
    main()
