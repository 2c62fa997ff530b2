"""Decode latency of one client with and without another client's long prefill beside it.

    python -m bench.prefill [--json] [--steps N]

One shard, two clients over shared memory: one decodes (8 rows, a step every 5 ms), the other pushes a
2048-token prompt over and over. With --max-step-rows the prompt arrives in pieces and decode steps go
between them; the last row lets the whole prompt through at once, to show what that is worth. Latency
counts from when a step was due, so steps that queue behind a stalled one count too.
"""

from __future__ import annotations

import itertools
import statistics
import time
from typing import Any

from bench import harness
from bench.memory_client import Caller
from lora_server import spec
from lora_server.spec import Site

GEOMETRY = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 1, "num_local_experts": 4}
SITE = Site(0, "gate_up")
PROMPT, DECODE, RANK = 2048, 8, 32
PERIOD_SECONDS = 5e-3


def prefill_forever(address: str) -> None:
    """The neighbour: one line when its first prompt is through, then on until killed."""
    caller = Caller(address, PROMPT, 0)
    drawn = caller.draw(caller.hold("tenant"), SITE, decode=False)
    for done in itertools.count():
        caller.exchange(drawn)
        if not done:
            print("busy", flush=True)


def latencies_ms(address: str, steps: int) -> list[float]:
    caller = Caller(address, DECODE, 0)
    drawn = caller.draw(caller.hold("tenant"), SITE)
    for _ in range(10):
        caller.exchange(drawn)
    times, began = [], time.perf_counter()
    for index in range(steps):
        due = began + index * PERIOD_SECONDS
        time.sleep(max(0.0, due - time.perf_counter()))
        caller.exchange(drawn)
        times.append((time.perf_counter() - due) * 1e3)
    caller.client.close()
    return times


def measure(steps: int) -> list[dict[str, Any]]:
    rows = []
    with harness.scratch() as work:
        harness.make(work, "mixtral", {"tenant": {"lora_rank": RANK, "targets": "experts"}}, **GEOMETRY)
        top_k = spec.load(work / "base").top_k
        for max_rows in harness.progress((64, 256, PROMPT * top_k), "stepping"):
            with harness.serving(work, "--max-step-rows", str(max_rows)) as server:
                alone = latencies_ms(server.address, steps)
                neighbour = harness.python(f"import bench.prefill as b; b.prefill_forever({server.address!r})")
                beside = latencies_ms(server.address, steps)
                neighbour.kill()
                neighbour.communicate()
            rows.append({"max_step_rows": max_rows} | _summary("alone", alone) | _summary("beside", beside))
    return rows


def _summary(name: str, times: list[float]) -> dict[str, float]:
    quantiles = statistics.quantiles(times, n=100)
    return {f"{name}_p50_ms": quantiles[49], f"{name}_p95_ms": quantiles[94], f"{name}_p99_ms": quantiles[98]}


COLUMNS = (
    "--max-step-rows {max_step_rows:,} | alone p50 {alone_p50_ms:.2f} | p95 {alone_p95_ms:.2f} | p99 {alone_p99_ms:.2f}"
    " | beside p50 {beside_p50_ms:.2f} | p95 {beside_p95_ms:.2f} | p99 {beside_p99_ms:.2f}"
)


def main() -> None:
    given = harness.flags(__doc__, steps=800)
    harness.one_thread()
    rows = measure(given.steps)
    title = f"Decode step ({DECODE} rows) beside a {PROMPT}-token prefill, ms"
    harness.show(given, rows, harness.table(title, rows, COLUMNS))


if __name__ == "__main__":
    main()
