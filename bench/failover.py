"""What replicas cost while all shards are up, and what a step waits for when a shard with a twin fails.

    python -m bench.failover [--rounds N] [--kills N] [--cuts N] [--failover-ms N] [--json]

Cost: two servers of one tiny model, without replicas and with two, run on this machine, with two nodes each, so that
both have as many processes per replica. One engine is joined to each, over shared memory; it pushes one row to the
shard of a dense site and waits for the delta. The two take turns in each of --rounds, in random order, each twice: a
server that was idle for longer answers later. A figure is the median over rounds of the ratio to the first in the same
round, with its 95 % interval; `again` is the first once more: how far from 1 chance alone leads.

Faults: a server of one tiny model with two replicas: two nodes of two shards each, each node on a host of its own
(network namespaces of this machine, which take root; without them nothing is cut). An engine pushes a row to both
shards of an expert site, over and over. At a random moment a shard's process that it uses is killed, or the host of
both is cut off. A fault is detected when the engine gives a shard up for its twin: when its connection ends, or after
--failover-ms of silence. Figures are from the fault to its detection, and from there to the end of that step. Every
delta has to be as before. The next fault comes when all shards are up again, and the engine uses those that it prefers.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import threading
import time
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch

from bench import harness
from bench.step_costs import COLUMNS as COSTS
from bench.step_costs import Way
from bench.step_costs import measure as compare
from client_connector.client import Client
from client_connector.packing import Activations, HostPacker
from client_connector.remote import RemoteServer
from client_connector.routing import Message, probe_messages
from lora_server.demo.launch import launch
from lora_server.spec import Site
from tests.support.hosts import MISSING, Host, switch
from tests.support.serving import reached

SITE, SHARDS = Site(0, "gate_up"), 2  # of a replica
DENSE, STEPS = Site(0, "qkv"), 20
COMMON = ("--device-pool", "64MiB", "--nodes", "2", "--insecure", "--layout", "ep2-pp1")
WAYS = {"one replica": (), "two replicas": ("--replicas", "2")}
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


class Engine:
    """An engine that is joined to a server and holds its adapter; a step of it has one row for each shard of a site."""

    def __init__(self, address: str, transport: str = "shm", site: Site = DENSE) -> None:
        self.client = Client(RemoteServer(address, transport))
        (held,) = self.client.acquire(["law"], loaded=True)
        terms = self.client.terms
        self._messages = probe_messages(terms.placement, site, held.handle)
        self._packer = HostPacker(terms, site, Activations(x=torch.randn(1, terms.spec.hidden), decode=True))

    def step(self, add: Callable[[Message, torch.Tensor], None] = lambda message, delta: None) -> None:
        self.client.start(self._packer, self._messages).finish(add)

    def nanoseconds(self, steps: int = STEPS) -> float:
        began = time.perf_counter_ns()
        for _ in range(steps):
            self.step()
        return (time.perf_counter_ns() - began) / steps


Where = dict[str, Any]  # `host` and `prefix` of demo.launch.launch


def serve(stack: ExitStack, work: Path, name: str, flags: tuple[str, ...], wheres: Sequence[Where] = ({}, {})) -> str:
    """Start a server's two nodes; return its address once both are up."""
    base = ("--base-model", str(work / "base"), "--adapters", str(work / "adapters"), *COMMON, *flags)
    first = launch(work / f"{name} 0", *base, **wheres[0])
    stack.callback(first.stop)
    second = launch(work / f"{name} 1", *base, "--node-rank", "1", "--controller", first.address, **wheres[1])
    stack.callback(second.stop)
    first.wait_ready()
    harness.until(lambda: all(one.state == "up" for one in harness.status(first.address).shards), "all shards are up")
    return first.address


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


def costs(work: Path, rounds: int) -> list[dict[str, Any]]:
    """Compare the steps of engines at servers without replicas and with two."""
    with ExitStack() as stack:
        engines = {name: Engine(serve(stack, work, name, flags)) for name, flags in WAYS.items()}
        for engine in engines.values():
            stack.callback(engine.client.close)
            engine.nanoseconds()
        ways = {name: Way(engine.nanoseconds, lambda: 0) for name, engine in engines.items()}
        ways["two, again"] = ways["two replicas"]
        return [one._asdict() for one in compare(ways, rounds, random.Random(7), "steps")]


def faults(work: Path, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Kill shards and cut off hosts."""
    with ExitStack() as stack:
        hosts, wheres = list[Host](), list[Where]([{}, {}])
        if not MISSING:
            wires = stack.enter_context(switch())
            hosts = [wires.host() for _ in wheres]
            wheres = [{"host": host.address, "prefix": host.prefix} for host in hosts]
        flags = ("--replicas", "2", "--failover-ms", str(given.failover_ms))
        address = serve(stack, work, "server", flags, wheres)
        found = [
            measure("a shard is killed", given.kills, address, transport, kill)
            for transport in ("shm", "tcp")
            if given.kills
        ]
        if hosts and given.cuts:
            found.append(measure("a host is cut off", given.cuts, address, "tcp", partial(cut, hosts=hosts)))
        return found


def main() -> None:
    given = harness.flags(__doc__, rounds=500, kills=100, cuts=100, failover_ms=1000)
    harness.one_thread()
    structlog.configure(processors=[note])
    with harness.scratch() as work:
        harness.make(work, "mixtral", {"law": {"lora_rank": 16, "targets": "all"}}, hidden_size=1024)
        found = {
            "costs": costs(work, given.rounds) if given.rounds else [],
            "faults": faults(work, given) if given.kills or given.cuts else [],
        }
    columns = COSTS.removeprefix("what {what} | ").removesuffix(" | calls {calls:d}").replace("of CPU ", "")
    of_faults = harness.table(f"nothing is cut: {MISSING}" if MISSING else "", found["faults"], COLUMNS)
    harness.show(given, found, harness.table("", found["costs"], columns), of_faults)


if __name__ == "__main__":
    main()
