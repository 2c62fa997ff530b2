"""Compares the plan with the server: immediate admission measured on a live server, simulated, and modelled.

    python -m bench.admission [--json] [--out FILE] [--plot FILE] [--traces DIR] [--pools M ...] [--bytes-pools M ...]
                              [--workloads NAME ...] [--adapters N] [--load LB] [--hold S] [--seconds S] [--clients N]

For every pool size (`--pools`: --max-active-adapters; `--bytes-pools`: a --device-pool of so many adapters' bytes) a
`lora-server serve` is started, and for every workload clients hold its adapters as vLLM's connector does
(bench/admission_client.py). A workload is Poisson arrivals with Zipf 1.2, or a trace, stretched so that LB requests are
in flight on average if all are admitted; a request holds its adapter for a time that stands for its output: all times
are shorter by one factor than at 30 ms per token. Traces that are missing in --traces are left out. Columns:

    measured     admitted at once, as clients count; after a warm-up, with a 95 % interval by the means of 10 batches
    simulated    the same calls in provision's simulation, request by request; then the difference, paired
    as asked     likewise, with the times at which calls were really made and held: shows the driver's error
    long run     provision's simulation of 6,000 calls, over 5 seeds, with its interval
    offered, literal, queued   provision's models of the rate
    rule         the server's own rule in virtual time at 30 ms per token, on the same calls
    late         p95 of how late the clients asked; a cell that is later than a tenth of the mean hold is not counted

The clients' count of all calls has to be the server's (lora_server_admissions_total), or the bench fails.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import typing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from bench import admission_cells as cells
from bench import harness
from bench.admission_client import Call, Job, Seen
from bench.admission_report import BAR, draw, table
from bench.harness import Child, crew
from client_connector.remote import RemoteServer
from lora_server.demo.launch import RunningServer
from provisioning.iar.admissibility import Model, immediate_admissibility
from provisioning.simulation.measure import Estimate
from provisioning.workload.requests import Requests
from provisioning.workload.workload import Workload

MOST_LATE = 0.1  # of the mean hold
LOOK_SECONDS, PIPE_COLUMNS = 30.0, 140


def make(work: Path, adapters: int, lora_rank: int = 2, targets: str = "attention", **sizes: Any) -> Path:
    """Make a tiny model, of one layer unless `sizes` say otherwise, and `adapters` adapters, all of them links to one;
    return that one."""
    adapter = {"lora_rank": lora_rank, "targets": targets}
    harness.make(work, "mixtral", {"content": adapter}, **{"num_hidden_layers": 1, **sizes})
    content = (work / "adapters" / "content").rename(work / "content")
    for index in range(adapters):
        (work / "adapters" / name_of(index)).symlink_to(content)
    return content


def name_of(adapter: int) -> str:
    return f"tenant-{adapter}"


@contextmanager
def serving(work: Path, *flags: str) -> Iterator[RunningServer]:
    """Run a server until its shard has measured every adapter, then yield it."""
    with harness.serving(work, *flags) as server:
        session = RemoteServer(server.address, links=False).join()
        for one in harness.listed(server.address):
            (held,) = session.acquire([one.name], time.monotonic() + LOOK_SECONDS)
            session.release([held.handle])
        session.leave()
        yield server


def adapter_bytes(work: Path) -> int:
    with serving(work) as server:
        harness.until_loaded(server.address)
        time.sleep(1.5)  # the shard's next report
        (shard,) = harness.status(server.address).shards
        return math.ceil(shard.stats.weight_bytes / len(harness.listed(server.address)))


def admissions(server: RunningServer) -> tuple[int, int]:
    """Read (admitted at once, all: admitted or still waiting) from the server's metrics."""
    found = {}
    for line in server.get("/metrics")[1].splitlines():
        name, _, value = line.rpartition(" ")
        found[name] = value
    kinds = [int(float(found[f'lora_server_admissions_total{{kind="{kind}"}}'])) for kind in ("immediate", "queued")]
    return kinds[0], sum(kinds) + int(float(found["lora_server_admission_queue"]))


def calls_of(requests: Requests) -> list[Call]:
    """Make a live client's calls of these requests."""
    rows = zip(requests.arrival_s.tolist(), requests.adapter, requests.output_tokens, strict=True)
    return [Call(i, at, name_of(one), float(t) * cells.TICK_SECONDS) for i, (at, one, t) in enumerate(rows)]


def drive(server: RunningServer, requests: Requests, work: Path, clients: int) -> tuple[list[Seen], tuple[int, int]]:
    """Make all calls by live clients; return their outcomes in order, and the server's counts as in `admissions`."""
    harness.until(lambda: not (now := harness.status(server.address)).clients and not now.active, "no holder is left")
    before = admissions(server)
    every = calls_of(requests)
    jobs = [Job(server.address, every[number::clients]) for number in range(clients)]
    with asking(jobs, work) as running:
        after = admissions(server)
        seen = outcomes(running)
    return sorted(seen, key=lambda one: one.index), (after[0] - before[0], after[1] - before[1])


@contextmanager
def asking(jobs: Sequence[Job], work: Path) -> Iterator[list[Child]]:
    """Run a client for each job, and yield them once they have asked for all."""
    files = [work / f"job-{number}" for number in range(len(jobs))]
    for file, job in zip(files, jobs, strict=True):
        file.write_bytes(msgspec.json.encode(job))
    with crew("bench.admission_client", [(file,) for file in files]) as running:
        _hear(running, "ready")
        zero = time.monotonic() + 0.5
        for one in running:
            one.tell(zero)
        _hear(running, "asked")
        yield running


def outcomes(running: Sequence[Child]) -> list[Seen]:
    """End clients, and return what became of their calls."""
    said = [one.process.communicate(timeout=60)[0] for one in running]
    return [row for rows in said for row in msgspec.json.decode(rows, type=list[Seen])]


def _hear(running: Sequence[Child], word: str) -> None:
    for one in running:
        if one.said() != f"{word}\n":
            raise RuntimeError(f"a client ended before it was {word!r}; its error is above")


def measure(
    server: RunningServer, workload: Workload, slots: int, scale: cells.Scale, work: Path, clients: int, seed: int = 0
) -> dict[str, Any]:
    requests = cells.calls(workload, scale, scale.num_calls, seed)
    seen, counted = drive(server, requests, work, clients)
    errors = [one.error for one in seen if one.error]
    if errors or len(seen) != len(requests):
        raise RuntimeError(f"{len(errors)} of {len(seen)} calls failed, {len(requests)} were to come: {errors[:1]}")
    kept, immediate = cells.settled(requests, scale), np.array([one.immediate for one in seen])
    simulated, asked = cells.simulated(requests, slots), _as_asked(requests, seen, slots)
    late_s = np.array([one.asked for one in seen]) - requests.arrival_s
    slower = workload.lengths.mean_tokens * cells.TOKEN_SECONDS / scale.hold_seconds
    row: dict[str, Any] = {
        "slots": slots,
        "calls": len(seen),
        "seed": seed,
        "measured": _plain(cells.in_batches(immediate[kept])),
        "simulated": float(simulated[kept].mean()),
        "difference": _plain(cells.in_batches(immediate[kept].astype(float) - simulated[kept], lowest=-1.0)),
        "as_asked": float(asked[kept].mean()),
        "long_run": _plain(cells.long_run(workload, scale, slots)),
        "rule": float(cells.by_rule(requests, slots, slower)[kept].mean()),
        "late_p95_ms": float(np.percentile(late_s, 95)) * 1e3,
        "admitted": sum(one.admitted is not None for one in seen),  # the others still waited when the last one asked
        "client_count": [int(immediate.sum()), len(seen)],
        "server_count": list(counted),
    }
    places = min(slots, workload.num_adapters)
    for model in typing.get_args(Model):
        row[model] = immediate_admissibility(workload.popularity, scale.load, places, model)
    row["late"] = row["late_p95_ms"] > MOST_LATE * scale.hold_seconds * 1e3
    row["agrees"] = abs(row["difference"]["mean"]) <= BAR
    return row


def _as_asked(requests: Requests, seen: Sequence[Seen], slots: int) -> Any:
    """Simulate each call at the time it was really made, for as long as it really held its adapter."""
    asked_s = np.array([one.asked for one in seen])
    planned_s = (requests.output_tokens * cells.TICK_SECONDS).tolist()
    held_s = np.array([_held_s(one) or planned for one, planned in zip(seen, planned_s, strict=True)])
    ticks = np.maximum(np.rint(held_s / cells.TICK_SECONDS), 1)
    order = np.argsort(asked_s, kind="stable")
    done = Requests(
        arrival_s=asked_s[order],
        adapter=requests.adapter[order],
        output_tokens=ticks[order].astype(np.int64),
        num_adapters=requests.num_adapters,
    )
    immediate = np.empty(len(seen), dtype=bool)
    immediate[order] = cells.simulated(done, slots)
    return immediate


def _held_s(one: Seen) -> float | None:
    return None if one.admitted is None or one.released is None else one.released - one.admitted


def _plain(estimate: Estimate) -> dict[str, float]:
    return {"mean": estimate.mean, "low": estimate.low, "high": estimate.high}


def sweep(options: argparse.Namespace) -> list[dict[str, Any]]:
    scale = cells.Scale(load=options.load, hold_seconds=options.hold, seconds=options.seconds)
    found = cells.workloads(options.traces, options.adapters)
    chosen = {name: found[name] for name in options.workloads or found}
    rows = []
    with harness.scratch() as work:
        make(work, max(workload.num_adapters for workload in chosen.values()))
        pools = [(f"{m}", m, ["--max-active-adapters", str(m)]) for m in options.pools]
        if options.bytes_pools:
            nbytes = adapter_bytes(work)
            pools += [(f"{m}, bytes", m, ["--device-pool", str(m * nbytes)]) for m in options.bytes_pools]
        for pool, slots, flags in pools:
            with serving(work, *flags) as server:
                for name, workload in harness.progress(chosen.items(), f"pool {pool}"):
                    row = measure(server, workload, slots, scale, work, options.clients, options.seed)
                    rows.append({"workload": name, "pool": pool} | row)
    return rows


def main() -> None:
    """Run the bench; exit with 1 if the clients and the server count differently."""
    given = harness.flags(
        __doc__, out=Path, plot=Path, traces=Path("shared/traces"), workloads=[str], pools=[10, 12, 14, 16],
        bytes_pools=[int], adapters=64, load=24.0, hold=1.0, seconds=40.0, clients=4, seed=0,
    )  # fmt: skip
    torch.set_grad_enabled(False)
    rows = sweep(given)
    if given.out is not None:
        given.out.write_text(json.dumps(rows, indent=2))
    if given.plot is not None:
        draw(rows, given.plot)
    harness.show(given, rows, table(rows), width=None if sys.stdout.isatty() else PIPE_COLUMNS)
    if wrong := [row for row in rows if row["client_count"] != row["server_count"]]:
        sys.exit(f"clients and server count differently: {wrong}")


if __name__ == "__main__":
    main()
