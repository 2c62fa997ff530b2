"""The cost of replicas while all shards are up: steps of an engine at a server without them, and at one with two.

    python -m bench.replicas [--rounds N] [--json]

Two servers of one tiny model run on this machine, with two nodes each, so that both have as many processes per replica.
One engine is joined to each, over shared memory; it pushes one row to the shard of a dense site and waits for the
delta. The two take turns in each round, in random order, each twice: a server that was idle for longer answers later.
A figure is the median over rounds of the ratio to the first in the same round, with its 95 % interval; `again` is the
first once more: how far from 1 chance alone leads.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from bench import harness
from bench.step_costs import COLUMNS, Way, measure
from client_connector.client import Client
from client_connector.packing import Activations, HostPacker
from client_connector.remote import RemoteServer
from client_connector.routing import Message, probe_messages
from lora_server.demo.launch import launch
from lora_server.spec import Site

SITE, STEPS = Site(0, "qkv"), 20
COMMON = ("--device-pool", "64MiB", "--nodes", "2", "--insecure")
WAYS = {"one replica": ("--layout", "ep2-pp1"), "two replicas": ("--layout", "ep2-pp1", "--replicas", "2")}


class Engine:
    """An engine that is joined to a server and holds its adapter; a step of it has one row for each shard of a site."""

    def __init__(self, address: str, transport: str = "shm", site: Site = SITE) -> None:
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


def main() -> None:
    given = harness.flags(__doc__, rounds=500)
    harness.one_thread()
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lora-bench-")))
        harness.make(work, "mixtral", {"law": {"lora_rank": 16, "targets": "all"}}, hidden_size=1024)
        engines = {name: Engine(serve(stack, work, name, flags)) for name, flags in WAYS.items()}
        for engine in engines.values():
            stack.callback(engine.client.close)
            engine.nanoseconds()
        ways = {name: Way(engine.nanoseconds, lambda: 0) for name, engine in engines.items()}
        ways["two, again"] = ways["two replicas"]
        found = [one._asdict() for one in measure(ways, given.rounds, random.Random(7), "steps")]
    columns = COLUMNS.removeprefix("what {what} | ").removesuffix(" | calls {calls:d}").replace("of CPU ", "")
    harness.show(given, found, harness.table("", found, columns))


if __name__ == "__main__":
    main()
