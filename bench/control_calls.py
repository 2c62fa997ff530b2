"""CPU time of a controller's calls at size: `python -m bench.control_calls [--shards 256] [--adapters 100000]`.

A controller in this process, with shards and engines that have no connections: each shard answers what it is told as
soon as it is asked to, by the messages that a shard sends. Read what a call costs the controller, in CPU time of this
thread, which other work on the machine moves little; `bench.control_scale` has the sockets, and latencies.
"""

from __future__ import annotations

import gc
import logging
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil

from bench import harness
from lora_server import logs
from lora_server.control.adapters.records import Record
from lora_server.control.controller import Controller
from lora_server.control.members.agreement import Agreement
from lora_server.control.members.shards import ShardHandle
from lora_server.control.reports import listing
from lora_server.control.reports.metrics import ControllerCollector
from lora_server.control.reports.overview import overview
from lora_server.control.reports.status import status
from lora_server.control.sync.spread import MOST_IN_ADVANCE
from lora_server.placement import Layout
from lora_server.spec import PRESETS, Site
from lora_server.wire import lora_server_pb2 as pb

SPEC, POOL, BYTES = PRESETS["mixtral-8x7b"], 1 << 40, 1 << 20
TENANTS = 10_000


class AnsweringShard:
    """A shard's side of its stream: measures what it is told of, and loads what is used."""

    def __init__(self, controller: Controller, shard: int) -> None:
        digest = controller.agreement.digest()
        registration = pb.Registration(shard=shard, instance=str(shard), agreement_digest=digest, pool_bytes=POOL)
        self._controller = controller
        self._layers = len(controller.agreement.placement.layers(shard))
        self.handle: ShardHandle = controller.arrivals.arrive(registration, [])

    def answer(self) -> int:
        """Carry out what was sent since the last call; return the number of commands and reports."""
        sent, taken = 0, list[pb.ShardCommand]()
        for data in self.handle.commands.take():
            assert data is not None, "the queue is open"
            taken += pb.ShardCommands.FromString(data).commands
        for command in taken:
            kind = command.WhichOneof("command") or ""
            handles = {"load": [command.load.handle], "bring": [command.bring], "uses": command.uses.active.more}
            has = {"layers": 0 if kind == "load" else self._layers, "bytes": BYTES, "measured": True}
            moved = [pb.Residency(handle=one, **has) for one in handles.get(kind, ())]
            reports = [pb.ShardReport(residencies=pb.Residencies(moved=moved))] if moved else []
            reports += [pb.ShardReport(done=pb.Done(command=command.id))] if command.id else []
            for report in reports:
                self._controller.hear(self.handle, report)
            sent += len(reports)
        return len(taken) + sent


def records(adapters: int) -> Iterator[Record]:
    """Make records of adapters on attention sites, of as many tenants as there may be."""
    sites = tuple(Site(layer, projection) for layer in range(SPEC.layers) for projection in ("qkv", "o"))
    for number in range(adapters):
        name = f"t{number % TENANTS:05}/a{number:06}"
        yield Record(
            handle=0, name=name, version=f"{number:064x}", path=f"/srv/adapters/{name}", stamp=f"{number:032x}",
            lora_rank=16, nbytes=BYTES, sites=sites, warnings=(), uri=f"file:///srv/adapters/{name}", of_directory=True,
        )  # fmt: skip


def cpu_ms(call: Callable[[], object], rounds: int) -> float:
    """Return the median CPU time of a call, in ms of this thread."""
    times = []
    for _ in range(rounds):
        began = time.thread_time_ns()
        call()
        times.append((time.thread_time_ns() - began) * 1e-6)
    return statistics.median(times)


def measure(num_shards: int, adapters: int, engines: int, rounds: int) -> dict[str, Any]:
    """Build a controller of this size, and return its figures."""
    process, layout = psutil.Process(), Layout(num_shards // SPEC.layers, SPEC.layers)
    controller = Controller(Agreement(SPEC, layout, "bfloat16", "independent", 256))
    shards = [AnsweringShard(controller, number) for number in range(num_shards)]

    def settle() -> int:
        return sum(one.answer() for one in shards)

    before, began = process.memory_info().rss, time.thread_time()
    for number, record in enumerate(records(adapters)):
        with controller.adapters.changes.lock:
            controller.adapters.changes.offer(controller.adapters.changes.numbered(record), eager=False)
        if number * num_shards <= MOST_IN_ADVANCE or number % 1000 == 0:
            settle()
        if number % 5000 == 0:
            gc.freeze()  # as the server does when it registers a directory
    settle()
    gc.freeze()
    controller.start.registered.set()
    found: dict[str, Any] = {"register ms": 1e3 * (time.thread_time() - began) / adapters}
    leases = [controller.clients.leases.grant(f"engine-{number}") for number in range(engines)]
    names = [record.name for record in controller.adapters.catalog.records()]
    told = len(controller.adapters.sync.spread.on_all)
    dice, admission = random.Random(1), controller.adapters.admission

    def hold(name: str) -> None:
        lease = dice.choice(leases)
        answer = controller.requests.acquire(lease.proof, [name], ticket=dice.getrandbits(40))
        if answer.queued is None:
            controller.requests.release(lease.proof, [one.handle for one in answer.records])

    found["warm ms"] = cpu_ms(lambda: hold(dice.choice(names[:told])), 20 * rounds)
    found["messages of a batch"] = settle()
    untold = iter(names[told:])
    if told < adapters:
        cold = [cpu_ms(lambda: (hold(next(untold)), settle()), 1) for _ in range(rounds)]
        found["cold ms, all messages"] = statistics.median(cold)
    for name in names[: told : max(1, told // engines)]:
        admission.acquire(dice.choice(leases).client, [name])
    own = controller.adapters.listings
    collector = ControllerCollector(controller)
    found["first page of the list ms"] = cpu_ms(lambda: listing.page(own, ""), rounds)
    found["a page in the middle ms"] = cpu_ms(lambda: listing.page(own, f"0:t{TENANTS // 2:05}"), rounds)
    found["status ms"] = cpu_ms(lambda: status(controller), rounds)
    found["web page ms"] = cpu_ms(lambda: overview(controller, lambda name: name.partition("/")[0]), rounds)
    found["scrape ms"] = cpu_ms(lambda: list(collector.collect()), rounds)
    found["MB of all adapters"] = (process.memory_info().rss - before) / 1e6
    return {"shards": num_shards, "adapters": adapters, "engines": engines, "told": told, **found}


def main() -> None:
    logs.configure(logging.WARNING)
    given = harness.flags(__doc__, shards=256, adapters=100_000, engines=1000, rounds=10)
    found = measure(given.shards, given.adapters, given.engines, given.rounds)
    harness.show(given, found, *(f"{name:>28} {value:12,.2f}" for name, value in found.items()))


if __name__ == "__main__":
    main()
