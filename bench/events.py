"""Events for many readers: what they cost the publisher, how late they come, and what a reader that stalls changes.

The publisher is a process of its own: its share of a core is its CPU time, libzmq's threads included, without the
thread that makes the events. Readers are sockets of other processes. A delay is from an event until a reader has
decoded it.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from pathlib import Path
from typing import Any

from bench import harness
from bench.harness import answers, crew


def measure(
    work: Path, transport: str, readers: int, rate: float, seconds: float, stalled: int, processes: int
) -> dict[str, Any]:
    """Publish for so long to `readers`, and to `stalled` ones that stop reading after their first message."""
    each = [readers // processes + (number < readers % processes) for number in range(processes)]
    jobs = [("read", count) for count in each if count]
    where = f"ipc://{work}/{time.monotonic_ns()}" if transport == "ipc" else ""
    with contextlib.ExitStack() as stack:
        children = stack.enter_context(crew("bench.events_child", [*jobs, *[("stall", stalled)] * bool(stalled)]))
        keys = [key for one in children for key in json.loads(one.said())]
        (publisher,) = stack.enter_context(crew("bench.events_child", [("publish", where, rate, len(keys))]))
        endpoint = publisher.said()
        for key in keys:
            publisher.tell(key)
        for one in children:
            one.tell(endpoint.strip())
        for one in children:
            assert one.said() == "reading\n"
        publisher.tell()
        time.sleep(seconds)
        publisher.tell()
        time.sleep(3.0)  # several heartbeats, also on a busy machine: whatever is missing at the end is seen
        found = answers(children[: len(jobs)])
        (published,) = answers([publisher])
    delays = sorted(1e3 * delay for one in found for delay in one["delays"])
    missing, received = (sum(one[name] for one in found) for name in ("missing", "received"))
    return {
        "transport": transport, "readers": readers, "stalled": stalled, "rate": rate,
        "share": 100 * published["share"], "p50_ms": statistics.median(delays),
        "p99_ms": delays[int(0.99 * (len(delays) - 1))], "batches": published["batches"],
        "missing": missing, "unnoticed": published["batches"] * readers - received - missing,
    }  # fmt: skip


COLUMNS = (
    "by {transport} | readers {readers} | stalled {stalled} | events/s {rate:.0f} | % of a core {share:.2f} | "
    "p50 ms {p50_ms:.1f} | p99 ms {p99_ms:.1f} | batches {batches:,} | missing {missing:,} | unnoticed {unnoticed:,}"
)


def main() -> None:
    given = harness.flags(__doc__, readers=200, rate=1000.0, seconds=10.0, stalled=10, processes=4)
    cells = [(transport, stalled) for transport in ("ipc", "tcp") for stalled in (0, given.stalled)]
    with harness.scratch() as work:
        rows = [
            measure(work, transport, given.readers, given.rate, given.seconds, stalled, given.processes)
            for transport, stalled in harness.progress(cells, "publishing")
        ]
    harness.show(given, rows, harness.table("Events", rows, COLUMNS), width=140)


if __name__ == "__main__":
    main()
