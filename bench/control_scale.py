"""The control plane at size: `python -m bench.control_scale --shards 256 --engines 1000 --adapters 100000`.

One `serve` with a controller and a real shard; all other shards and all engines are real connections without weights:
shards register, take every command, and report that they measured an adapter, then that they loaded it; engines join,
beat, and hold and release adapters, Zipf 1.0, at these `--rates`, acquires a second of all engines together. Each rate
is measured with the adapters that shards know, then with all, if there are more; the controller has a core of its own
meanwhile, where there are two. Measured: seconds until the server is ready and shards know the adapters that they are
told of in advance, until all engines have joined; acquires of adapters that shards know, and the first one of each
other; the list's first page, all of it, the status, the page, a scrape of the metrics, and what the controller's
process takes; seconds until the real shard, killed, is back and knows all adapters, its CPU time for that, and until
the controller is, killed after it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil

from bench import harness
from bench.control_engines import Job, Load, name_of
from bench.harness import Child, answers, as_json, crew
from lora_server.control.sync.spread import MOST_IN_ADVANCE
from lora_server.demo.launch import RunningServer, launch
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire import lora_server_pb2_grpc as rpc
from lora_server.wire.rpc import open_channel

PATIENCE = 3600.0
SHARDS_EACH, ENGINES_EACH = 64, 125  # of a process
STAGES = 32
TOKEN = "control-scale-bench"
SIZES = {"num_hidden_layers": STAGES, "hidden_size": 32, "intermediate_size": 32}
COLUMNS = (
    "among {among:,d} | acquires a second {rate:.0f} | done {done:.1f} | known {known:d} | p50 ms {known_p50_ms:.1f}"
    " | p99 {known_p99_ms:.1f} | first {first:d} | p50 ms {first_p50_ms:.1f} | p99 {first_p99_ms:.1f}"
    " | all: p99 {all_p99_ms:.1f} | failed {failed:d}"
    " | controller's CPU % {cpu:.0f} | machine's {machine:.0f}"
)
FACTS = (
    "shards {shards:d} | engines {engines:d} | adapters {adapters:,d} | known {told:,d} | ready s {ready_s:.0f}"
    " | known s {known_s:.0f} | joined s {joined_s:.0f} | first page of list s {list_s:.2f} | all of it {all_s:.1f}"
    " | status {status_s:.2f} | page {page_s:.2f} | scrape {scrape_s:.2f} | MB {mb:.0f} | shard back s {shard_s:.1f}"
    " | knows all {shard_knows_s:.1f} | its CPU {shard_cpu_s:.1f} | controller back {controller_s:.1f}"
)


def fetch(http: str, path: str) -> bytes:
    """Fetch the page's data, or the metrics."""
    with urllib.request.urlopen(f"http://{http}{path}", timeout=PATIENCE) as answer:
        return bytes(answer.read())


def split(count: int, each: int) -> list[range]:
    """Divide 0 to count-1 into ranges of at most `each`."""
    return [range(first, min(first + each, count)) for first in range(0, count, each)]


@dataclass(frozen=True)
class Size:
    """Numbers of shards, engines and adapters; raises ValueError for shards that fill no layout."""

    shards: int
    engines: int
    adapters: int

    def __post_init__(self) -> None:
        if self.shards < 1 or (self.shards > STAGES and self.shards % STAGES):
            raise ValueError(f"--shards: got {self.shards}, expected 1 to {STAGES} or a multiple of {STAGES}")

    @property
    def layout(self) -> str:
        """One shard per stage, and experts divided once all stages have one."""
        stages = min(self.shards, STAGES)
        return f"ep{self.shards // stages}-pp{stages}"


def measure(size: Size, rates: list[float], seconds: float) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run one server of this size; return its figures, and a row per rate and number of adapters drawn among."""
    with harness.scratch() as root:
        harness.make_many(root, size.adapters, **SIZES)
        (root / "token").write_text(TOKEN)
        flags = ["--base-model", str(root / "base"), "--adapters", str(root / "adapters"), "--layout", size.layout]
        flags += ["--nodes", str(size.shards), "--node-rank", "0", "--join-token-file", str(root / "token")]
        server = launch(root / "log", *flags, "--device-pool", "256MiB")
        try:
            with fakes(server.address, root, size) as started:
                facts = {**asdict(size), **wait_for_all(server, size, started)}
                print(facts, file=sys.stderr, flush=True)
                a_core_for_the_controller(server.address, started)
                facts, rows = with_engines(server, size, rates, seconds, facts)
                return facts | restarts(server), rows
        except BaseException:
            print(server.tail(), file=sys.stderr)
            raise
        finally:
            server.stop()


def fakes(address: str, root: Path, size: Size) -> contextlib.AbstractContextManager[list[Child]]:
    """Start all shards but the first, which is a real one."""
    about = {"address": address, "base": str(root / "base"), "layout": size.layout}
    runs = split(size.shards, SHARDS_EACH)
    jobs = [as_json(about | {"shards": [one for one in run if one]}) for run in runs]
    return crew("bench.control_fakes", [(job,) for job in jobs])


def wait_for_all(server: RunningServer, size: Size, started: list[Child]) -> dict[str, float]:
    """Wait until the server is ready, and until the last adapter that shards are told of in advance is loaded.

    Raises RuntimeError when a process of the fake shards has ended.
    """
    told = min(size.adapters, MOST_IN_ADVANCE // size.shards)

    def is_ready() -> bool:
        if any(one.process.poll() is not None for one in started):
            raise RuntimeError("a process of the fake shards has ended; its reason is above")
        return server.get("/readyz")[0] == 200

    ready = harness.until(is_ready, "the server is ready", PATIENCE)
    with open_channel(server.address) as channel:
        stub, last = rpc.AdaptersStub(channel), pb.GetAdapterRequest(name=name_of(told - 1))
        known = harness.until(lambda: stub.Get(last, timeout=PATIENCE).state == "ready", "all are loaded", PATIENCE)
    return {"told": told, "ready_s": ready, "known_s": ready + known}


def a_core_for_the_controller(address: str, started: list[Child]) -> None:
    """Pin the controller to the first core, and shards and engines to the others: in production they run on other
    hosts. With a single core this changes nothing."""
    first, *others = sorted(os.sched_getaffinity(0))
    reply = harness.status(address)
    for pid in (os.getpid(), *(one.process.pid for one in started), reply.shards[0].pid):
        harness.run_on(pid, others or [first])
    harness.run_on(reply.pid, [first])


def with_engines(
    server: RunningServer, size: Size, rates: list[float], seconds: float, facts: dict[str, Any]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Have all engines join, and work at each rate; then measure what operators ask for."""
    controller, began = psutil.Process(harness.status(server.address).pid), time.monotonic()
    runs = split(size.engines, ENGINES_EACH)
    jobs = [(as_json(Job(server.address, size.adapters, run[0], engines=len(run))),) for run in runs]
    with crew("bench.control_engines", jobs) as started, open_channel(server.address) as channel:
        for one in started:
            one.said()
        facts["joined_s"] = time.monotonic() - began
        among, known = sorted({facts["told"], size.adapters}), set(range(facts["told"]))
        rows = [
            at_rate(started, controller, size, Load(seconds, most, size.engines / rate), known)
            for most in among
            for rate in rates
        ]
        stub = rpc.AdaptersStub(channel)
        calls: dict[str, Callable[[], object]] = {
            "list_s": lambda: stub.List(pb.ListAdaptersRequest(), timeout=PATIENCE),
            "all_s": lambda: harness.listed(server.address),
            "status_s": lambda: harness.status(server.address),
            "page_s": lambda: fetch(server.http, "/status.json"),
            "scrape_s": lambda: fetch(server.http, "/metrics"),
        }
        facts |= {name: harness.least_s(3, call) for name, call in calls.items()}
        return facts | {"mb": controller.memory_info().rss / 1e6}, rows


def restarts(server: RunningServer) -> dict[str, float]:
    """Kill the real shard, then the controller; return the seconds until each is back, and the new shard's CPU time."""
    before = harness.status(server.address)

    def answered(ask: Callable[[], bool]) -> bool:
        with contextlib.suppress(grpc.RpcError, OSError):  # it is away, or busy with the one that came back
            return ask()
        return False

    def shard_is_back() -> bool:
        shard = harness.status(server.address).shards[0]
        return shard.state == "up" and shard.pid not in (0, before.shards[0].pid)

    def knows_all() -> bool:
        return shard_is_back() and all(one.state != "loading" for one in harness.listed(server.address))

    def controller_is_back() -> bool:
        return server.get("/readyz")[0] == 200 and harness.status(server.address).pid != before.pid

    os.kill(before.shards[0].pid, signal.SIGKILL)
    up = harness.until(lambda: answered(shard_is_back), "the shard is back", PATIENCE)
    knows = up + harness.until(lambda: answered(knows_all), "the shard knows all adapters", PATIENCE)
    cpu = sum(psutil.Process(harness.status(server.address).shards[0].pid).cpu_times()[:2])
    os.kill(before.pid, signal.SIGKILL)
    controller = harness.until(lambda: answered(controller_is_back), "the controller is back", PATIENCE)
    return {"shard_s": up, "shard_knows_s": knows, "shard_cpu_s": cpu, "controller_s": controller}


def at_rate(
    started: list[Child], controller: psutil.Process, size: Size, load: Load, known: set[int]
) -> dict[str, Any]:
    """Have the engines acquire at a rate together, and return its row. Adds to `known` what all shards know by then."""
    before, began = sum(controller.cpu_times()[:2]), time.monotonic()
    psutil.cpu_percent()  # from now on
    found = answers(started, load)
    spent, seconds = sum(controller.cpu_times()[:2]) - before, time.monotonic() - began
    row: dict[str, Any] = {"among": load.among, "rate": size.engines / load.pause, "cpu": 100 * spent / seconds}
    row["machine"] = psutil.cpu_percent()
    row["failed"] = sum(len(one["failed"]) for one in found)
    waited: dict[str, list[float]] = {"known": [], "first": []}
    for adapter, _, ms in sorted((ask for one in found for ask in one["held"]), key=lambda ask: ask[1]):
        waited["known" if adapter in known else "first"].append(ms)
        known.add(adapter)
    for kind, its in (waited | {"all": waited["known"] + waited["first"]}).items():
        row[kind] = len(its)
        for percent in (50, 99):
            row[f"{kind}_p{percent}_ms"] = float(np.percentile(its, percent)) if its else float("nan")
    row["done"] = row["all"] / seconds
    print(row, file=sys.stderr, flush=True)
    return row


def main() -> None:
    given = harness.flags(__doc__, shards=32, engines=100, adapters=1000, rates=[20.0], seconds=10.0)
    facts, rows = measure(Size(given.shards, given.engines, given.adapters), given.rates, given.seconds)
    title = "The control plane at size"
    tables = harness.table(title, [facts], FACTS), harness.table("", rows, COLUMNS)
    harness.show(given, {**facts, "rows": rows}, *tables, width=180)


if __name__ == "__main__":
    main()
