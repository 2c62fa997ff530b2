"""The delay of a step whose shard dies, or whose shards' host is cut off, where each shard has a twin on another host.

    python -m bench.failover [--kills N] [--cuts N] [--failover-ms N] [--json]

A server of one tiny model with two replicas: two nodes of two shards each, each node on a host of its own (network
namespaces of this machine, which take root; without them nothing is cut). An engine pushes a row to both shards of an
expert site, over and over. At a random moment a shard's process that it uses is killed, or the host of both is cut off.
The delay is that of the longest step until the engine uses their twins, without the median of the steps before; for a
cut also without --failover-ms, after which a silent shard is given up. Every delta has to be as before. A fault is the
next one's only when all shards are up again, and the engine uses those that it prefers.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import harness
from bench.replicas import Engine, Where, serve
from lora_server.spec import Site
from tests.support.hosts import MISSING, Host, switch
from tests.support.serving import reached

SITE, SHARDS = Site(0, "gate_up"), 2  # of a replica
HEALTHY_STEPS, PAUSE_SECONDS, CUT_SECONDS, HEAL_SECONDS = 50, 0.05, 0.5, 120.0
COLUMNS = (
    "fault {fault} | transport {transport} | faults {faults:d} | step before, ms {healthy:.2f} | "
    "added, ms: median {median:.1f} | p99 {p99:.1f} | most {most:.1f}"
)
Fault = Callable[[], None]


class Checked:
    """An engine whose every delta has to be the first step's."""

    def __init__(self, address: str, transport: str) -> None:
        self.address, self.engine = address, Engine(address, transport, SITE)
        self._expected = self._deltas()

    def _deltas(self) -> torch.Tensor:
        found = dict[int, torch.Tensor]()
        self.engine.step(lambda message, delta: found.update({message.shard: delta.clone()}))
        return torch.stack([found[shard] for shard in sorted(found)])

    def milliseconds(self) -> float:
        began = time.perf_counter()
        deltas = self._deltas()
        spent = 1e3 * (time.perf_counter() - began)
        if not torch.equal(deltas, self._expected):
            raise SystemExit("a delta is not that of the step before the fault")
        return spent

    def used(self) -> list[int]:
        return [self.engine.client.lanes[shard].shard for shard in range(SHARDS)]

    def added(self, fault: Fault, struck: set[int], dice: random.Random) -> tuple[float, float]:
        """Push steps until none goes to the shards that a fault struck; return the median before, and what the longest
        took more, ms."""
        healthy, longest = statistics.median(self.milliseconds() for _ in range(HEALTHY_STEPS)), 0.0
        timer = threading.Timer(dice.uniform(0, PAUSE_SECONDS), fault)
        timer.start()
        while struck & set(self.used()):
            longest = max(longest, self.milliseconds())
        timer.join()
        return healthy, longest - healthy

    def heal(self, used: list[int]) -> None:
        """Push steps until all shards are up, and the engine uses those that it did."""

        def healed() -> bool:
            self.milliseconds()
            reply = reached(self.address)
            return reply is not None and reply.ready and not reply.degraded and self.used() == used

        harness.until(healed, "all shards are up and used", HEAL_SECONDS)


def kill(engine: Checked, dice: random.Random) -> tuple[float, float]:
    used, shards = engine.used(), harness.status(engine.address).shards
    victim = dice.choice(used)
    found = engine.added(partial(os.kill, shards[victim].pid, signal.SIGKILL), {victim}, dice)
    engine.heal(used)
    return found


def cut(engine: Checked, dice: random.Random, hosts: list[Host], failover_ms: float) -> tuple[float, float]:
    used = engine.used()
    node = harness.status(engine.address).shards[used[0]].node
    with ExitStack() as stack:
        healthy, more = engine.added(lambda: stack.enter_context(hosts[node].is_cut()), set(used), dice)
        time.sleep(CUT_SECONDS)  # the outage goes on
    engine.heal(used)
    return healthy, more - failover_ms


def measure(
    fault: str,
    times: int,
    address: str,
    transport: str,
    strike: Callable[[Checked, random.Random], tuple[float, float]],
) -> dict[str, Any]:
    engine, dice = Checked(address, transport), random.Random(7)
    try:
        found = np.array([strike(engine, dice) for _ in harness.progress(range(times), f"{fault}, {transport}")])
    finally:
        engine.engine.client.close()
    healthy, (median, p99, most) = np.median(found[:, 0]), np.percentile(found[:, 1], (50, 99, 100))
    row = {"healthy": healthy, "median": median, "p99": p99, "most": most}
    return {"fault": fault, "transport": transport, "faults": times, **{name: float(it) for name, it in row.items()}}


def main() -> None:
    given = harness.flags(__doc__, kills=100, cuts=100, failover_ms=1000)
    harness.one_thread()
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
            strike = partial(cut, hosts=hosts, failover_ms=given.failover_ms)
            found.append(measure("a host is cut off", given.cuts, address, "tcp", strike))
    harness.show(given, found, harness.table(f"nothing is cut: {MISSING}" if MISSING else "", found, COLUMNS))


if __name__ == "__main__":
    main()
