"""Latency of a resident adapter's steps, with and without loading beside it.

    python -m bench.loading [--json] [--windows N] [--seconds S]

One shard, with a pool for a quarter of the adapters. A client steps (8 rows of one resident adapter, one step after
the other) in three kinds of windows that take turns:

    alone    no other client is there
    loading  another client steps with one row of each of the others in turn, so that the shard's loader never rests
    apart    a process beside the server loads them, in a store of its own: what a busy core and the memory's traffic
             cost where no Python is shared

"MB/s beside steps": what the shard loads in the second kind of windows. "MB per CPU second": what a store of its own
loads per second of its process's CPU, from files that the system has in memory.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import subprocess
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import harness
from bench.memory_client import Caller
from lora_server import spec
from lora_server.adapters import open_adapter
from lora_server.memory.entry import Source
from lora_server.memory.mapped import MappedPool
from lora_server.memory.on_cpu import CpuTier
from lora_server.memory.store import WeightStore
from lora_server.placement import Layout, Placement
from lora_server.spec import Site
from lora_server.wire.terms import Held

GEOMETRIES = {
    "mixtral": {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8, "num_local_experts": 8},
    "qwen3_moe": {"hidden_size": 512, "moe_intermediate_size": 256, "num_hidden_layers": 4, "num_experts": 64},
}
ADAPTERS, RESIDENT, RANK, ROWS = 24, 6, 16, 8
SETTLE_SECONDS = 1.5  # until the shard has reported what it loaded
SITE = Site(0, "gate_up")
CPU_LOADS = 72


def load_forever(address: str) -> None:
    """The neighbour: a line once its first adapter is there, then on until killed."""
    caller = Caller(address, 1, 1)
    for index in itertools.cycle(range(1, ADAPTERS)):
        held = caller.hold(f"a{index}")
        caller.step(held, SITE)
        caller.client.release([held])
        print("loading", flush=True)


def loads(work: Path, pool: int) -> Generator[int, None, None]:
    """Load one adapter after the other into a store, as a shard does; yield the bytes loaded so far, after each."""
    model = spec.load(work / "base")
    placement = Placement(model, Layout(1, 1))
    store = WeightStore(placement, 0, CpuTier(placement, 0, torch.float32, MappedPool(pool)))
    paths = sorted((work / "adapters").iterdir())
    for handle, path in enumerate(paths, start=1):
        with open_adapter(path, model) as adapter:
            source = Source(path, adapter.version(), adapter.stamp)
        store.adapters.load(handle, source, lambda error: None, eager=False)
    try:
        for handle in itertools.cycle(range(1, len(paths) + 1)):
            while (pins := store.pin([handle], 0, "us", time.monotonic() + 60)) is None:
                time.sleep(1e-3)
            store.unpin(pins)
            yield store.report.use().loaded_bytes
    finally:
        store.close()


def load_apart(work: Path, pool: int) -> None:
    """The neighbour of its own: the same loads as a shard's, without the shard; a line after each."""
    for _ in loads(work, pool):
        print("loading", flush=True)


def cpu_rate(work: Path, pool: int) -> float:
    """Return the bytes that a second of this process's CPU loads."""
    with contextlib.closing(loads(work, pool)) as loading:
        first, began = [next(loading) for _ in range(ADAPTERS)][-1], time.process_time()
        last = [next(loading) for _ in range(CPU_LOADS)][-1]
        return (last - first) / (time.process_time() - began)


def window(caller: Caller, held: Held, seconds: float) -> list[float]:
    """Milliseconds of each step."""
    times, end = [], time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        caller.step(held, SITE)
        times.append((time.perf_counter() - began) * 1e3)
    return times


def loaded_bytes(address: str) -> int:
    (shard,) = harness.status(address).shards
    return int(shard.stats.loaded_bytes)


def measure(kind: str, windows: int, seconds: float) -> dict[str, Any]:
    """Percentiles of the three kinds of windows, in milliseconds, and rates of loading."""
    with harness.scratch() as work:
        adapter = {"lora_rank": RANK, "targets": "experts"}
        size = harness.make_alike(work, kind, ADAPTERS, adapter, **GEOMETRIES[kind])
        pool = round(size * (RESIDENT + 0.5))
        with harness.serving(work, "--device-pool", str(pool)) as server:
            caller = Caller(server.address, ROWS, 0)
            held = caller.hold("a0")
            window(caller, held, 2.0)
            neighbours = {
                "apart": _child(f"load_apart(pathlib.Path({str(work)!r}), {pool})"),
                "loading": _child(f"load_forever({server.address!r})"),
            }
            times: dict[str, list[float]] = {"alone": [], "loading": [], "apart": []}
            moved = 0
            for _ in harness.progress(range(windows), kind):
                for name, seen in times.items():
                    if name in neighbours:
                        neighbours[name].send_signal(signal.SIGCONT)
                    time.sleep(SETTLE_SECONDS)
                    before = loaded_bytes(server.address)
                    seen += window(caller, held, seconds)
                    if name in neighbours:
                        neighbours[name].send_signal(signal.SIGSTOP)
                    moved += (loaded_bytes(server.address) - before) * (name == "loading")
            for neighbour in neighbours.values():
                neighbour.kill()
                neighbour.communicate()
            caller.client.close()
        rate = cpu_rate(work, pool)
    row: dict[str, Any] = {"model": kind, "loaded_mb_per_s": moved / 1e6 / (windows * seconds)}
    row["loaded_mb_per_cpu_s"] = rate / 1e6
    for name, seen in times.items():
        p50, p90, p99 = np.percentile(seen, [50, 90, 99]).tolist()
        row |= {f"{name}_p50_ms": p50, f"{name}_p90_ms": p90, f"{name}_p99_ms": p99}
    return row | {f"{name}_ratio": row[f"{name}_p99_ms"] / row["alone_p99_ms"] for name in times}


def _child(call: str) -> subprocess.Popen[bytes]:
    """Stopped, once its first load is through."""
    process = harness.python(f"import pathlib; import bench.loading as b; b.{call}")
    assert process.stdout is not None
    threading.Thread(target=process.stdout.read, daemon=True).start()
    process.send_signal(signal.SIGSTOP)
    return process


COLUMNS = "model {model} | windows {name} | p50 {p50:.2f} | p90 {p90:.2f} | p99 {p99:.2f} | p99 / alone {ratio:.2f}"
RATES = "model {model} | MB/s beside steps {loaded_mb_per_s:.0f} | MB per CPU second {loaded_mb_per_cpu_s:.0f}"


def main() -> None:
    given = harness.flags(__doc__, windows=6, seconds=3.0)
    harness.one_thread()
    rows = [measure(kind, given.windows, given.seconds) for kind in GEOMETRIES]
    lines = [
        {"model": row["model"], "name": name, "ratio": row[f"{name}_ratio"]}
        | {quantile: row[f"{name}_{quantile}_ms"] for quantile in ("p50", "p90", "p99")}
        for row in rows
        for name in ("alone", "loading", "apart")
    ]
    tables = (
        harness.table(f"Steps of {ROWS} rows of a resident adapter, ms", lines, COLUMNS),
        harness.table("", rows, RATES),
    )
    harness.show(given, rows, *tables)


if __name__ == "__main__":
    main()
