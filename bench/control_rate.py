"""Life cycles of requests per second at one controller: `python -m bench.control_rate --engines 1 4 16`.

An engine has so many requests at a time. Each knows its adapter's name, holds the adapter, and releases it. Compared in
alternating runs: two calls per request (Acquire, Release), and calls that make all that an engine wants meanwhile
(Hold). All adapters have room in the pool of the one shard. The controller's CPU depends less on a machine's other load
than the rate does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import psutil

from bench import harness
from bench.control_engines import Job, Load
from bench.harness import Child, answers, as_json, crew

WARM_SECONDS, PATIENCE = 1.0, 900.0
POOL = "2GiB"
DRAWN = 1 << 16  # adapters of each engine, before anything is measured
COLUMNS = (
    "calls {calls} | adapters {adapters:,d} | engines {engines:d} | life cycles/s {rate:,.0f} | p50 ms {p50_ms:.1f} | "
    "p99 ms {p99_ms:.1f} | controller's CPU s per 1,000 {controller_s:.3f} | shard's {shard_s:.3f}"
)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process so far."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def measure(address: str, started: Sequence[Child], load: Load) -> dict[str, Any]:
    status = harness.status(address)
    pids = {"controller_s": status.pid, "shard_s": status.shards[0].pid}
    before = {name: cpu_seconds(pid) for name, pid in pids.items()}
    found = answers(started, load)
    waited = np.array([ms for one in found for _, _, ms in one["held"]])
    spent = {name: 1e3 * (cpu_seconds(pid) - before[name]) / len(waited) for name, pid in pids.items()}
    return {
        "calls": "Acquire, Release" if load.single else "Hold",
        "rate": sum(len(one["held"]) / one["seconds"] for one in found),
        "p50_ms": float(np.percentile(waited, 50)),
        "p99_ms": float(np.percentile(waited, 99)),
        **spent,
    }


def compare(address: str, adapters: int, count: int, given: Any) -> Iterator[dict[str, Any]]:
    """Measure both kinds of calls by turns."""
    jobs = [(as_json(Job(address, adapters, seed, drawn=DRAWN)),) for seed in range(count)]
    with crew("bench.control_engines", jobs) as started:
        for one in started:
            one.said()
        for single in (True, False):
            answers(started, Load(WARM_SECONDS, requests=given.requests, single=single))
        for _ in range(given.rounds):
            for single in (True, False):
                row = measure(address, started, Load(given.seconds, requests=given.requests, single=single))
                yield {"adapters": adapters, "engines": count, **row}


def main() -> None:
    given = harness.flags(__doc__, adapters=[1000, 10_000], engines=[1, 4, 16], requests=32, seconds=5.0, rounds=2)
    rows = []
    for adapters in given.adapters:
        with harness.scratch() as work:
            harness.make_many(work, adapters)
            with harness.serving(work, "--layout", "ep1-pp1", "--device-pool", POOL) as server:
                harness.until_loaded(server.address, PATIENCE)
                for count in given.engines:
                    for row in compare(server.address, adapters, count, given):
                        rows.append(row)
                        print(row, file=sys.stderr, flush=True)
    harness.show(given, rows, harness.table(f"{given.requests} requests at a time per engine", rows, COLUMNS))


if __name__ == "__main__":
    main()
