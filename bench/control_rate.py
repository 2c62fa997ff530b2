"""Life cycles of requests per second at one controller: `python -m bench.control_rate --engines 1 4 16`.

An engine has so many requests at a time. Each knows its adapter's name, holds the adapter, and releases it. Compared in
alternating runs: two calls per request (Acquire, Release), and calls that make all that an engine wants meanwhile
(Hold). All adapters have room in the pool of the one shard. The controller's CPU depends less on a machine's other load
than the rate does.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil

from bench import harness
from bench.control_engine import Found, Job
from bench.many_adapters import make
from lora_server.demo import children

WARM_SECONDS, PATIENCE = 1.0, 900.0
POOL = "2GiB"
COLUMNS = (
    "calls {calls} | adapters {adapters:,d} | engines {engines:d} | life cycles/s {rate:,.0f} | p50 ms {p50_ms:.1f} | "
    "p99 ms {p99_ms:.1f} | controller's CPU s per 1,000 {controller_s:.3f} | shard's {shard_s:.3f}"
)


@contextlib.contextmanager
def engines(address: str, count: int, adapters: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Engines that have joined, each a process."""
    with contextlib.ExitStack() as stack:
        started = []
        for seed in range(count):
            command = [sys.executable, "-m", "bench.control_engine", address, str(adapters), str(seed)]
            process = children.start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            stack.callback(children.stop, process)
            started.append(process)
        for process in started:
            assert process.stdout is not None
            process.stdout.readline()
        yield started


def run(started: Sequence[subprocess.Popen[bytes]], job: Job) -> list[Found]:
    """Give every engine the same job."""
    for process in started:
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(job) + b"\n")
        process.stdin.flush()
    found = []
    for process in started:
        assert process.stdout is not None
        found.append(msgspec.json.decode(process.stdout.readline(), type=Found))
    return found


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process so far."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def measure(address: str, started: Sequence[subprocess.Popen[bytes]], job: Job) -> dict[str, Any]:
    status = harness.status(address)
    pids = {"controller_s": status.pid, "shard_s": status.shards[0].pid}
    before = {name: cpu_seconds(pid) for name, pid in pids.items()}
    found = run(started, job)
    waited = np.concatenate([one.waited_ms for one in found])
    spent = {name: 1e3 * (cpu_seconds(pid) - before[name]) / len(waited) for name, pid in pids.items()}
    return {
        "calls": "Acquire, Release" if job.single else "Hold",
        "rate": sum(len(one.waited_ms) / one.seconds for one in found),
        "p50_ms": float(np.percentile(waited, 50)),
        "p99_ms": float(np.percentile(waited, 99)),
        **spent,
    }


def compare(address: str, adapters: int, count: int, given: Any) -> Iterator[dict[str, Any]]:
    """Measure both kinds of calls by turns."""
    with engines(address, count, adapters) as started:
        for single in (True, False):
            run(started, Job(single, given.requests, WARM_SECONDS))
        for _ in range(given.rounds):
            for single in (True, False):
                row = measure(address, started, Job(single, given.requests, given.seconds))
                yield {"adapters": adapters, "engines": count, **row}


def main() -> None:
    given = harness.flags(__doc__, adapters=[1000, 10_000], engines=[1, 4, 16], requests=32, seconds=5.0, rounds=2)
    rows = []
    for adapters in given.adapters:
        with tempfile.TemporaryDirectory() as scratch:
            make(Path(scratch), adapters, lora_rank=1, targets="qv")
            with harness.serving(Path(scratch), "--layout", "ep1-pp1", "--device-pool", POOL) as server:
                harness.until(
                    lambda server=server: all(one.state == "ready" for one in harness.listed(server.address)),
                    "every adapter is loaded",
                    PATIENCE,
                )
                for count in given.engines:
                    for row in compare(server.address, adapters, count, given):
                        rows.append(row)
                        print(row, file=sys.stderr, flush=True)
    harness.show(given, rows, harness.table(f"{given.requests} requests at a time per engine", rows, COLUMNS))


if __name__ == "__main__":
    main()
