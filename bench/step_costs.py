"""What a step costs a shard for checking it, for clients that are idle, and for adapters that nobody asks for.

    python -m bench.step_costs [--rounds N] [--json]

One thread is the shard's loop and a client of it, over shared memory: the client pushes 8 entries, and the loop serves
them. Ways take turns in each round, in an order of the dice, on one core, and what is counted is the CPU time of this
thread, so that what else runs on the machine costs all of them alike. A figure is the median over rounds of the ratio
to the first way in the same round, with its 95 % interval (of the median, by order). `again`: the first way once more,
which says how far a ratio may be from 1 for nothing. Calls are of functions, Python's and C's, in one step: they do not
depend on the machine at all.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from kernels_cuda import cpu
from lora_server.adapters import open_adapter
from lora_server.demo import tiny
from lora_server.errors import LoraServerError
from lora_server.memory.entry import Source
from lora_server.memory.mapped import MappedPool
from lora_server.memory.on_cpu import CpuTier
from lora_server.memory.store import WeightStore
from lora_server.placement import Layout, Placement
from lora_server.shard.compute import HostCompute
from lora_server.shard.coordination import Independent
from lora_server.shard.loop import Shard
from lora_server.shard.schedule import PendingStep
from lora_server.spec import PROJECTIONS, ModelSpec, Site, from_config
from lora_server.transport.base import Grant, Port
from lora_server.transport.shm import ShmLink
from lora_server.transport.shm_listener import ShmListener
from lora_server.wire import slot
from lora_server.wire.messages import Hello
from lora_server.wire.region import RegionLayout
from lora_server.wire.slot import RequestHeader

ENTRIES, DEPTH, STEPS = 8, 2, 10  # STEPS: of one way in one round
HANDLE, SITE = 70_000, Site(0, "gate_up")
IDLE, REGISTERED = (0, 1, 16, 64, 256, 1000), (1, 5_000)
POOL_BYTES, LOAD_SECONDS = 64 << 20, 600.0
MODEL = {"hidden_size": 1024, "intermediate_size": 2048}  # a step of which takes a while, beside tiny-mixtral's

T = TypeVar("T")


class Client:
    """`push` is a step of two experts, the same again and again."""

    def __init__(self, listener: ShmListener, port: Port, number: int, spec: ModelSpec) -> None:
        port.grant(Grant(number, 1, b"key", "acme"))
        port.hold(number, [HANDLE])
        self.link, self.seq = ShmLink(listener.address, Hello(number, 1, b"key"), 0), 0
        width, half = spec.in_width(SITE), ENTRIES // 2
        at = slot.request_offsets(2, ENTRIES, 0, ENTRIES * width * 4)
        for memory in (self.link.region.request(seq) for seq in range(DEPTH)):
            struct.pack_into("<8I", memory, at.segments, HANDLE, 0, 0, half, HANDLE, 1, half, half)
        self._header = RequestHeader(
            step_class=slot.DECODE, flags=0, client=number, epoch=1, seq=0, slot=0, layer=0,
            projection=PROJECTIONS.index(SITE.projection), dtype=0, num_rows=ENTRIES, num_entries=ENTRIES,
            num_segments=2, num_out_rows=ENTRIES, in_begin=0, in_end=width, windows=((0, spec.out_width(SITE)),),
            payload_bytes=at.end - slot.HEADER_BYTES, budget_us=60_000_000, pushed_ns=0,
        )  # fmt: skip
        self.nbytes = at.end

    def push(self) -> None:
        self.seq += 1
        self._header._replace(seq=self.seq, slot=self.seq % DEPTH).pack_into(self.link.region.request(self.seq))
        self.link.push(self.seq, self.nbytes)


class Case:
    """A shard of its own: one client that pushes, and others that have had one answer and are idle."""

    def __init__(self, spec: ModelSpec, adapter: Path, idle: int = 0, registered: int = 1) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="lora-bench-")
        port = Port(RegionLayout.for_model(spec, 2 * ENTRIES, DEPTH))
        placement = Placement(spec, Layout(1, 1))
        self.store = WeightStore(placement, 0, CpuTier(placement, 0, torch.float32, MappedPool(POOL_BYTES)))
        self._register(spec, adapter, registered)
        self.listener = ShmListener(port, Path(self._directory.name) / "shard")
        kernel = HostCompute(cpu.lora_parts)
        self.shard = Shard(0, spec, 2 * ENTRIES, port, self.store, Independent(), kernel)
        self.client = Client(self.listener, port, 1, spec)
        self._idle = [Client(self.listener, port, number + 2, spec) for number in range(idle)]
        for one in (*self._idle, self.client):
            self._step(one)

    def _register(self, spec: ModelSpec, path: Path, count: int) -> None:
        with open_adapter(path, spec) as opened:
            source = Source(path, opened.version(), opened.stamp)
        known, failed = threading.Semaphore(0), list[object]()
        for number in range(count):
            self.store.load(HANDLE + number, source, lambda error: (failed.append(error), known.release()), number == 0)
            if number == 0:
                known.acquire(timeout=LOAD_SECONDS)
        for _ in range(count - 1):
            known.acquire(timeout=LOAD_SECONDS)
        assert failed == [None] * count, failed

    def _step(self, client: Client) -> None:
        client.push()
        while client.link.responded() < client.seq:
            self.shard.serve_once()

    def nanoseconds(self) -> float:
        """Of the loop, for one step: to find it, to serve it, and to see that there is no other."""
        spent = 0
        for _ in range(STEPS):
            self.client.push()
            began = time.thread_time_ns()
            while self.shard.serve_once():
                pass
            spent += time.thread_time_ns() - began
        if self.shard.counters.failed or self.client.link.responded() != self.client.seq:
            raise SystemExit("a step failed: see above")
        return spent / STEPS

    def calls(self) -> int:
        """Of functions, in one step."""
        count = 0

        def profile(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        self.client.push()
        sys.setprofile(profile)
        while self.shard.serve_once():
            pass
        sys.setprofile(None)
        return count - 1  # setprofile itself

    def close(self) -> None:
        for client in (self.client, *self._idle):
            client.link.close()
        self.listener.close()
        self.store.close()
        self._directory.cleanup()


class Ratio(NamedTuple):
    """Of one way to the first."""

    way: str
    microseconds: float
    ratio: float
    low: float
    high: float
    calls: int


class Way(NamedTuple):
    """How to serve steps: nanoseconds of one, and calls in one."""

    nanoseconds: Callable[[], float]
    calls: Callable[[], int]


def measure(ways: dict[str, Way], rounds: int, dice: random.Random, what: str) -> list[Ratio]:
    """The first way is measured twice in each round, so that a ratio of nothing is seen, too."""
    first = next(iter(ways))
    ways = {**ways, "again": ways[first]}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in track(range(rounds), what, console=Console(stderr=True)):
        for way in dice.sample(sorted(ways), len(ways)):
            times[way].append(ways[way].nanoseconds())
    found = []
    for way, its in times.items():
        ratios = sorted(mine / base for mine, base in zip(its, times[first], strict=True))
        reach = round(0.98 * len(ratios) ** 0.5)  # of the median's 95 % interval, in ranks
        middle = len(ratios) // 2
        low, high = ratios[max(0, middle - reach)], ratios[min(len(ratios) - 1, middle + reach)]
        middle_us, calls = statistics.median(its) / 1e3, min(ways[way].calls() for _ in range(3))
        found.append(Ratio(way, middle_us, statistics.median(ratios), low, high, calls))
    return found


def without_check(case: Case) -> Way:
    """As it is, but that nobody looks whether the client may use what its step names."""
    shard: Any = case.shard

    def without(work: Callable[[], T]) -> Callable[[], T]:
        def done() -> T:
            shard._recheck = lambda step: pin(case.shard, step)
            try:
                return work()
            finally:
                del shard._recheck

        return done

    return Way(without(case.nanoseconds), without(case.calls))


def pin(shard: Shard, step: PendingStep) -> None:
    """What is left of Shard._recheck."""
    try:
        step.pin = shard.store.pin(step.handles, step.header.layer, step.connection.client, step.expires_ns * 1e-9)
    except LoraServerError as error:
        step.refusal = error


def checks(spec: ModelSpec, adapter: Path, rounds: int, dice: random.Random) -> list[Ratio]:
    case = Case(spec, adapter)
    ways = {"without the check": without_check(case), "as it is": Way(case.nanoseconds, case.calls)}
    found = measure(ways, rounds, dice, "checks")
    case.close()
    return found


def cases(made: dict[str, Case], rounds: int, dice: random.Random, what: str) -> list[Ratio]:
    found = measure({way: Way(case.nanoseconds, case.calls) for way, case in made.items()}, rounds, dice, what)
    for case in made.values():
        case.close()
    return found


def small_and_larger(root: Path) -> dict[str, tuple[ModelSpec, Path]]:
    """Two models, and an adapter of each."""
    found = {}
    for name, sizes in (("tiny", {}), ("larger", MODEL)):
        model = tiny.make_model("mixtral", **sizes)
        tiny.make_adapter(model, root / name, seed=1, lora_rank=16, targets="experts")
        found[name] = from_config(model.config.to_dict(), name=name), root / name
    return found


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--json", action="store_true")
    arguments, dice = parser.parse_args(), random.Random(20261122)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    found: dict[str, list[Ratio]] = {}
    with tempfile.TemporaryDirectory(prefix="lora-bench-") as root:
        models = small_and_larger(Path(root))
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        for name, (spec, adapter) in models.items():
            found[f"the check, {name} model"] = checks(spec, adapter, arguments.rounds, dice)
        spec, adapter = models["tiny"]
        idle = {f"{number} idle clients": Case(spec, adapter, idle=number) for number in IDLE}
        found["idle clients"] = cases(idle, arguments.rounds, dice, "idle clients")
        many = {f"{number:,} adapters": Case(spec, adapter, registered=number) for number in REGISTERED}
        found["adapters registered"] = cases(many, arguments.rounds, dice, "adapters")
    if arguments.json:
        print(json.dumps({what: [one._asdict() for one in its] for what, its in found.items()}, indent=2))
        return
    table = Table("what", "way", "µs of CPU per step", "ratio", "95 % interval", "calls")
    for what, its in found.items():
        for one in its:
            interval = f"{one.low:.3f} to {one.high:.3f}"
            table.add_row(what, one.way, f"{one.microseconds:.1f}", f"{one.ratio:.3f}", interval, str(one.calls))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
