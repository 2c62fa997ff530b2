"""Decode latency with and without somebody's long prefill beside it.

    python -m bench.prefill [--json] [--steps N]

One shard, two clients over shared memory: one decodes (8 rows, a step every 5 ms), the other pushes a
2048-token prompt over and over. With --max-step-rows the prompt arrives in pieces and decode steps go
between them; the last row lets the whole prompt through at once, to show what that is worth. Latency
counts from when a step was due, so steps that queue behind a stalled one count too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from client_connector.client import Client
from client_connector.packing import Activations, HostPacker
from client_connector.remote import RemoteServer
from client_connector.routing import Batch, route_experts
from lora_server import spec
from lora_server.demo import children, tiny
from lora_server.demo.launch import running_server
from lora_server.spec import Site

GEOMETRY = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 1, "num_local_experts": 4}
SITE = Site(0, "gate_up")
PROMPT, DECODE, RANK = 2048, 8, 32
PERIOD_SECONDS = 5e-3


class Caller:
    """A client that steps at one site with random rows, as an engine would."""

    def __init__(self, address: str, rows: int) -> None:
        self.client = Client(RemoteServer(address, "shm"), timeout_seconds=60)
        (held,) = self.client.acquire(["tenant"])
        model = self.client.terms.spec
        self.batch = Batch.of([held] * rows, None, decode=rows == DECODE)
        self.x = torch.randn(rows, model.hidden)
        self.experts = torch.rand(rows, model.experts).topk(model.top_k).indices
        self.owners = torch.tensor(self.client.placement.owners(SITE))

    def step(self) -> None:
        """One exchange; the deltas are not used."""
        messages = route_experts(self.batch, self.experts, self.owners, self.client.terms.max_step_rows)
        given = Activations(x=self.x, decode=self.batch.decode)
        exchange = self.client.start(HostPacker(self.client.terms, SITE, given), messages)
        exchange.finish(lambda message, delta: None)


def prefill_forever(address: str) -> None:
    """The neighbour: one line when its first prompt is through, then on until killed."""
    caller = Caller(address, PROMPT)
    caller.step()
    print("busy", flush=True)
    while True:
        caller.step()


def latencies_ms(address: str, steps: int) -> list[float]:
    """Of `steps` decode steps."""
    caller = Caller(address, DECODE)
    for _ in range(10):
        caller.step()
    times, began = [], time.perf_counter()
    for index in range(steps):
        due = began + index * PERIOD_SECONDS
        time.sleep(max(0.0, due - time.perf_counter()))
        caller.step()
        times.append((time.perf_counter() - due) * 1e3)
    caller.client.close()
    return times


def measure(steps: int) -> list[dict[str, Any]]:
    """One row per setting."""
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        model = tiny.make_model("mixtral", **GEOMETRY)
        tiny.save_model(model, work / "base")
        tiny.make_adapter(model, work / "adapters" / "tenant", lora_rank=RANK, seed=0, targets="experts")
        top_k = spec.load(work / "base").top_k
        for max_rows in track((64, 256, PROMPT * top_k), "stepping", console=Console(stderr=True)):
            flags = ["--base-model", str(work / "base"), "--adapters", str(work / "adapters")]
            with running_server(work / "log", [*flags, "--max-step-rows", str(max_rows)]) as server:
                alone = latencies_ms(server.address, steps)
                command = [sys.executable, "-c", f"import bench.prefill as b; b.prefill_forever({server.address!r})"]
                neighbour = subprocess.Popen(children.own(command), stdout=subprocess.PIPE)
                assert neighbour.stdout is not None
                neighbour.stdout.readline()
                beside = latencies_ms(server.address, steps)
                neighbour.kill()
                neighbour.communicate()
            rows.append({"max_step_rows": max_rows} | _summary("alone", alone) | _summary("beside", beside))
    return rows


def _summary(name: str, times: list[float]) -> dict[str, float]:
    quantiles = statistics.quantiles(times, n=100)
    return {f"{name}_p50_ms": quantiles[49], f"{name}_p95_ms": quantiles[94], f"{name}_p99_ms": quantiles[98]}


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=800)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    rows = measure(arguments.steps)
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    table = Table(title=f"Decode step ({DECODE} rows) beside a {PROMPT}-token prefill, ms", title_justify="left")
    for column in ("--max-step-rows", "alone p50", "p95", "p99", "beside p50", "p95", "p99"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(f"{row['max_step_rows']:,}", *(f"{v:.2f}" for k, v in row.items() if k.endswith("_ms")))
    Console().print(table)


if __name__ == "__main__":
    main()
