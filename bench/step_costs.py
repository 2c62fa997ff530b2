"""The cost of a step to a shard: of checking it, of clients that are idle, and of adapters that no request uses.

    python -m bench.step_costs [--rounds N] [--json]

One thread is the shard's loop and a client of it, over shared memory: the client pushes 8 entries, and the loop serves
them. The ways take turns in each round, in random order, on one core. The measure is the CPU time of this thread, so
that other work on the machine affects all ways alike. A figure is the median over rounds of the ratio to the first way
in the same round, with its 95 % interval (of the median, by order). `again` measures the first way once more: its ratio
shows how far from 1 chance alone leads. Calls count the functions, Python's and C's, called in one step: they do not
depend on the machine at all.
"""

from __future__ import annotations

import os
import random
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from bench import harness
from bench.step_client import StepClient
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
from lora_server.spec import ModelSpec, Site, from_config
from lora_server.transport.base import Grant, Port
from lora_server.transport.shm import ShmLink
from lora_server.transport.shm_listener import ShmListener
from lora_server.wire.messages import Hello
from lora_server.wire.region import RegionLayout

ENTRIES, DEPTH, STEPS = 8, 2, 10  # STEPS: of one way in one round
HANDLE, SITE = 70_000, Site(0, "gate_up")
IDLE, REGISTERED = (0, 1, 16, 64, 256, 1000), (1, 5_000)
POOL_BYTES, LOAD_SECONDS = 64 << 20, 600.0
MODEL = {"hidden_size": 1024, "intermediate_size": 2048}  # its step takes longer than tiny-mixtral's

T = TypeVar("T")


class Case:
    """A shard with one client that pushes, and others that have had one answer and are idle."""

    def __init__(self, spec: ModelSpec, adapter: Path, idle: int = 0, registered: int = 1) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="lora-bench-")
        port = Port(RegionLayout.for_model(spec, 2 * ENTRIES, DEPTH))
        placement = Placement(spec, Layout(1, 1))
        self.store = WeightStore(placement, 0, CpuTier(placement, 0, torch.float32, MappedPool(POOL_BYTES)))
        self._register(spec, adapter, registered)
        self.listener = ShmListener(port, Path(self._directory.name) / "shard")
        kernel = HostCompute(cpu.lora_parts)
        self.shard = Shard(0, spec, 2 * ENTRIES, port, self.store, Independent(), kernel)
        self.client, *self._idle = (self._client(port, number + 1, spec) for number in range(idle + 1))
        for one in (*self._idle, self.client):
            self._step(one)

    def _register(self, spec: ModelSpec, path: Path, count: int) -> None:
        with open_adapter(path, spec) as opened:
            source = Source(path, opened.version(), opened.stamp)
        known, failed = threading.Semaphore(0), list[object]()
        for number in range(count):
            self.store.adapters.load(
                HANDLE + number, source, lambda error: (failed.append(error), known.release()), number == 0
            )
            if number == 0:
                known.acquire(timeout=LOAD_SECONDS)
        for _ in range(count - 1):
            known.acquire(timeout=LOAD_SECONDS)
        assert failed == [None] * count, failed

    def _client(self, port: Port, number: int, spec: ModelSpec) -> StepClient:
        port.grant(Grant(number, 1, b"key", "acme"))
        port.hold(number, [HANDLE])
        link = ShmLink(self.listener.address, Hello(number, 1, b"key"), 0)
        return StepClient(link, number, spec, SITE, ENTRIES, handle=HANDLE, depth=DEPTH)

    def _step(self, client: StepClient) -> None:
        client.push()
        while client.link.responded() < client.seq:
            self.shard.serve_once()

    def nanoseconds(self) -> float:
        """Measure the loop's CPU time for one step: to find it, to serve it, and to see that there is no other."""
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
        """Count the function calls in one step."""
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
    way: str
    microseconds: float
    ratio: float
    low: float
    high: float
    calls: int


class Way(NamedTuple):
    """A way to serve steps, by its measures: nanoseconds of one step, and calls in one."""

    nanoseconds: Callable[[], float]
    calls: Callable[[], int]


def measure(ways: dict[str, Way], rounds: int, dice: random.Random, what: str) -> list[Ratio]:
    """Measure the ways. The first is measured twice in each round, to show the ratio of equal work, too."""
    first = next(iter(ways))
    ways = {**ways, "again": ways[first]}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in harness.progress(range(rounds), what):
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
    """Return the way that leaves out the check whether the client may use the adapters that its step names."""
    receiver: Any = case.shard.receiver

    def without(work: Callable[[], T]) -> Callable[[], T]:
        def done() -> T:
            receiver._recheck = lambda step: pin(case.shard, step)
            try:
                return work()
            finally:
                del receiver._recheck

        return done

    return Way(without(case.nanoseconds), without(case.calls))


def pin(shard: Shard, step: PendingStep) -> None:
    try:
        client = step.connection.grant.client
        step.pin = shard.store.pin(step.handles, step.header.layer, client, step.expires_ns * 1e-9)
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
    found = {}
    for name, sizes in (("tiny", {}), ("larger", MODEL)):
        model = tiny.make_model("mixtral", **sizes)
        tiny.make_adapter(model, root / name, seed=1, lora_rank=16, targets="experts")
        found[name] = from_config(model.config.to_dict(), name=name), root / name
    return found


COLUMNS = (
    "what {what} | way {way} | µs of CPU per step {microseconds:.1f} | ratio {ratio:.3f} | "
    "95 % interval {low:.3f} to {high:.3f} | calls {calls:d}"
)


def main() -> None:
    given, dice = harness.flags(__doc__, rounds=1000), random.Random(20261122)
    harness.one_thread()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    found: dict[str, list[Ratio]] = {}
    with harness.scratch() as root:
        models = small_and_larger(root)
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        for name, (spec, adapter) in models.items():
            found[f"the check, {name} model"] = checks(spec, adapter, given.rounds, dice)
        spec, adapter = models["tiny"]
        idle = {f"{number} idle clients": Case(spec, adapter, idle=number) for number in IDLE}
        found["idle clients"] = cases(idle, given.rounds, dice, "idle clients")
        many = {f"{number:,} adapters": Case(spec, adapter, registered=number) for number in REGISTERED}
        found["adapters registered"] = cases(many, given.rounds, dice, "adapters")
    rows = {what: [one._asdict() for one in its] for what, its in found.items()}
    lines = [{"what": what, **one} for what, its in rows.items() for one in its]
    harness.show(given, rows, harness.table("", lines, COLUMNS), width=120)


if __name__ == "__main__":
    main()
