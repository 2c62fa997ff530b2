"""A day, shortened, of a live server that `provision watch --act` resizes: `python -m bench.autoscale_day --day 1440`.

The server's shards have memory for eight adapters of a small model. Requests hold its adapters as vLLM's connector does
(bench/admission_client.py); their rate goes up and down by 60 % in the day, and wanders. The watch looks every ten
minutes of the day. An oracle knows the traffic, and has the smallest feasible layout of every ten minutes:

    GPU hours   of the server, as a share of the oracle's; both in units of the day's
    in time     share of the requests that had their adapter, loaded, within --ttft-ms, and at once
    admitted    share of the requests that `provision`'s simulation, in which a load takes no time, admits at once: with
                the layouts that the live server had, and with those of the oracle
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from bench import admission, harness
from bench import admission_cells as cells
from bench.admission_client import Job
from lora_server.demo import children
from lora_server.demo.launch import RunningServer, free_ports
from lora_server.placement import Layout
from provisioning.plan.candidates import Candidate, candidates, evaluate
from provisioning.plan.flags import PlanFlags
from provisioning.plan.scenario import scenario
from provisioning.watch.autoscale import Autoscaler, Bounds
from provisioning.watch.measured import Measured
from provisioning.workload.requests import Requests
from provisioning.workload.workload import zipf

WINDOWS = 144  # of ten minutes, in a day
CALM_WINDOWS = 2.5  # before the server shrinks
SWING, WANDER, SKEW = 0.6, 0.02, 1.2
SIZES = {"num_hidden_layers": 12, "hidden_size": 256, "intermediate_size": 512}
LORA_RANK, SLOTS = 56, 8  # an adapter has 12 pages of 2 MiB; a shard of all of them has memory for so many adapters
GPU_GIB = 0.212  # of which the plan leaves memory for SLOTS
MOST_GPUS = 4
LOOK_SECONDS = 0.25  # between two looks at the layout


class Capacity(NamedTuple):
    """GPUs and slots over the day, from each time `at` (s) until the next."""

    at: NDArray[np.float64]
    gpus: NDArray[np.int64]
    slots: NDArray[np.int64]

    def mean_gpus(self, day: float) -> float:
        """Return the GPUs, on average over time."""
        return float(self.gpus @ np.diff(self.at, append=day) / np.diff(self.at, append=day).sum())

    def by_window(self, day: float) -> list[int]:
        """Return the GPUs at the middle of each window."""
        return self.gpus[self._index((np.arange(WINDOWS) + 0.5) * day / WINDOWS)].tolist()

    def _index(self, at_s: NDArray[np.float64]) -> NDArray[np.int64]:
        return np.maximum(np.searchsorted(self.at, at_s, side="right") - 1, 0)

    def at_once(self, requests: Requests) -> float:
        """Return the share of the requests that `provision`'s simulation admits at once with these slots."""
        of_request = self.slots[self._index(requests.arrival_s)]
        immediate = np.zeros(len(requests), dtype=bool)
        for slots in np.unique(of_request):
            chosen = of_request == slots
            immediate[chosen] = cells.simulated(requests, int(slots))[chosen]
        return float(immediate.mean())


def calls_of_a_day(given: argparse.Namespace) -> Requests:
    """Draw Poisson arrivals; on average `load` requests are in flight, each for `hold` seconds."""
    rng = np.random.default_rng(given.seed)
    wander = np.zeros(WINDOWS)
    for index in range(1, WINDOWS):
        wander[index] = 0.95 * wander[index - 1] + rng.normal(0.0, WANDER)
    parts = np.arange(WINDOWS) / WINDOWS
    rate = given.load / given.hold * (1 + SWING * np.sin(2 * math.pi * parts - 1.0)) * np.exp(wander)
    counts = rng.poisson(rate * given.day / WINDOWS)
    arrival_s = np.sort(np.repeat(parts * given.day, counts) + rng.uniform(0, given.day / WINDOWS, counts.sum()))
    ticks = rng.exponential(given.hold, len(arrival_s)) / cells.TICK_SECONDS
    return Requests(
        arrival_s=arrival_s,
        adapter=rng.choice(given.adapters, len(arrival_s), p=zipf(SKEW, given.adapters)),
        output_tokens=np.maximum(np.rint(ticks), 1).astype(np.int64),
        num_adapters=given.adapters,
    )


def question(work: Path, adapters: int) -> dict[str, Any]:
    """Flags of `provision` for the server that `make` wrote."""
    return {
        "slo": "ttft_p95=250ms,tpot_avg=100ms", "model": str(work / "base"), "adapters": adapters, "zipf": SKEW,
        "gpu": "hopper-96", "gpu_memory_gib": GPU_GIB, "lora_rank": LORA_RANK, "instances": 4, "batch_size": 16.0,
        "max_gpus": MOST_GPUS,
    }  # fmt: skip


def make(work: Path, adapters: int) -> int:
    """Write the model, its adapters, which are links to one, and plan.yaml; return the bytes of an adapter."""
    content = admission.make(work, adapters, LORA_RANK, "experts", dtype=torch.bfloat16, **SIZES)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in question(work, adapters).items()]
    command = [sys.executable, "-m", "provisioning", *flags, "--no-simulate", "--out", str(work / "plan.yaml")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return (content / "adapter_model.safetensors").stat().st_size


def oracle(requests: Requests, day: float, plan: Candidate) -> tuple[Capacity, list[Layout]]:
    """Return the smallest feasible layouts of all windows, the traffic of each being known."""
    scaler = Autoscaler(plan, Bounds(least=1, most=MOST_GPUS, headroom=1.0))
    window = (requests.arrival_s / day * WINDOWS).astype(int)
    layouts, slots = list[Layout](), list[int]()
    for index in range(WINDOWS):
        mine = window == index
        num = np.bincount(requests.adapter[mine], minlength=requests.num_adapters)
        held_s = np.bincount(requests.adapter[mine], requests.output_tokens[mine] * cells.TICK_SECONDS)
        holds = {admission.name_of(one): (float(num[one]), float(held_s[one])) for one in np.flatnonzero(num)}
        total = float(num.sum())
        sums = {"admitted": total, "at_once": total, "waited_seconds": 0.0, "registered": requests.num_adapters}
        gpus = scaler.needed(Measured(seconds=day / WINDOWS, holds=holds, **sums))
        (best, *_) = candidates(plan.scenario, gpus)
        layouts.append(best.layout)
        slots.append(best.slots)
    starts = np.arange(WINDOWS) * day / WINDOWS
    return Capacity(starts, np.array([one.num_shards for one in layouts]), np.array(slots)), layouts


@contextmanager
def watching(server: RunningServer, plan: Path, day: float) -> Iterator[list[dict[str, Any]]]:
    """Run `provision watch --act` beside a server; yields what it says, as it says it."""
    command = [
        sys.executable, "-m", "provisioning", "watch", f"--server={server.http}", f"--plan={plan}", "--act",
        f"--serve={free_ports()}", f"--seconds={day / WINDOWS}", f"--calm={CALM_WINDOWS * day / WINDOWS}",
        f"--max-gpus={MOST_GPUS}", f"--listen={server.address}",
    ]  # fmt: skip
    said = list[dict[str, Any]]()
    process = children.start(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    reader = threading.Thread(target=lambda lines: said.extend(map(json.loads, lines)), args=(process.stdout,))
    reader.start()
    try:
        yield said
    finally:
        children.stop(process)
        reader.join()


class LayoutLooks:
    """Looks at a server's layout again and again, in a thread; `seen` has times and layouts.

    While a resize is under way the server has the GPUs of the larger layout.
    """

    def __init__(self, address: str) -> None:
        self.seen = list[tuple[float, str, int]]()
        self._address, self._over = address, threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> LayoutLooks:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        if self._failure is not None:
            raise RuntimeError(f"the server did not say its layout: {self._failure}")

    def _run(self) -> None:
        try:
            while not self._over.wait(LOOK_SECONDS):
                now = harness.status(self._address)
                layouts = [now.layout, *([now.resize.layout] if now.resize.state else [])]
                self.seen.append((time.monotonic(), now.layout, max(Layout.parse(one).num_shards for one in layouts)))
        except BaseException as error:
            self._failure = error

    def capacity(self, plan: Candidate, ended: float, day: float) -> Capacity:
        """Return what the server had in the day that `ended` then."""
        slots = {name: evaluate(plan.scenario, Layout.parse(name)).slots for _, name, _ in self.seen}
        rows = [(at - ended + day, gpus, slots[name]) for at, name, gpus in self.seen if ended - day <= at <= ended]
        at, gpus, slots_then = zip(*rows, strict=True)
        return Capacity(np.array(at), np.array(gpus), np.array(slots_then))


def measure(given: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Run a day; shares, GPU hours and resizes, and the GPUs of all windows."""
    size, day = make(work, given.adapters), given.day
    plan = evaluate(scenario(PlanFlags(**question(work, given.adapters))), Layout(1, 1))
    requests = calls_of_a_day(given)
    best, layouts = oracle(requests, day, plan)
    pool = f"--device-pool={SLOTS * size}"
    with (
        harness.serving(work, "--layout", str(layouts[0]), pool) as server,
        watching(server, work / "plan.yaml", day) as said,
        LayoutLooks(server.address) as looks,
        admission.asking([Job(server.address, admission.calls_of(requests))], work) as running,
    ):
        ended = time.monotonic()  # when the last was asked for
        seen = sorted(admission.outcomes(running), key=lambda one: one.index)
    live = looks.capacity(plan, ended - (seen[-1].asked - day), day)
    waits_s = np.array([math.inf if one.admitted is None else one.admitted - one.asked for one in seen])
    late_s = np.array([one.asked for one in seen]) - requests.arrival_s
    resizes = [one for one in said if one["event"] == "resize"]
    return {
        "requests": len(requests), "failed": sum(bool(one.error) for one in seen),
        "errors": sorted({one.error for one in seen if one.error})[:3],
        "resizes": len(resizes), "resizes that failed": [one["failure"] for one in resizes if "failure" in one],
        "looks that failed": [one["failure"] for one in said if one["event"] == "look" and "failure" in one],
        "gpus": live.mean_gpus(day), "oracle gpus": best.mean_gpus(day),
        "cost": live.mean_gpus(day) / best.mean_gpus(day),
        "in time": float(np.mean(waits_s <= given.ttft_ms / 1e3)),
        "at once": float(np.mean([one.immediate for one in seen])),
        "admitted, simulated": live.at_once(requests), "admitted, oracle": best.at_once(requests),
        "late p95 ms": float(np.percentile(late_s, 95)) * 1e3,
        "live": live.by_window(day), "oracle": best.by_window(day),
        "load": (np.bincount((requests.arrival_s / day * WINDOWS).astype(int), requests.output_tokens)
                 * cells.TICK_SECONDS * WINDOWS / day).tolist(),
    }  # fmt: skip


def draw(found: dict[str, Any], file: Path) -> None:
    """Draw the GPUs of the server and of the oracle over the day, above the requests in flight."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    gpus, load = figure.subplots(2, sharex=True)
    hours = np.arange(WINDOWS) * 24 / WINDOWS
    gpus.step(hours, found["oracle"], where="post", label="oracle, traffic known", color="0.6")
    gpus.step(hours, found["live"], where="post", label="provision watch --act", color="C0")
    gpus.set_ylabel("GPUs")
    gpus.set_ylim(bottom=0)
    gpus.legend(frameon=False)
    load.plot(hours, found["load"], color="C1")
    load.set_ylabel("requests in flight")
    load.set_xlabel("hour of the shortened day")
    load.set_ylim(bottom=0)
    figure.savefig(file, dpi=120)


def lines(found: dict[str, Any], given: argparse.Namespace) -> Sequence[str]:
    """Say what was found."""
    return [
        f"{found['requests']} requests in {given.day:g} s, {found['failed']} failed {found['errors'] or ''}; "
        f"asked for {found['late p95 ms']:.0f} ms late (p95)",
        f"resizes: {found['resizes']}, failed: {found['resizes that failed'] or 0}; "
        f"looks that failed: {found['looks that failed'] or 0}",
        f"GPU hours: {24 * found['gpus']:.1f}, the oracle's {24 * found['oracle gpus']:.1f}: {found['cost']:.3f} times",
        f"adapter loaded within {given.ttft_ms:g} ms: {found['in time']:.2%}, at once: {found['at once']:.2%}",
        f"admitted at once, simulated with the same layouts {found['admitted, simulated']:.2%}, with the oracle's "
        f"{found['admitted, oracle']:.2%}",
    ]


def main() -> None:
    given = harness.flags(__doc__, day=1440.0, load=40.0, hold=1.0, adapters=48, ttft_ms=250.0, seed=0, plot=Path)
    with harness.scratch() as work:
        found = measure(given, work)
    if given.plot is not None:
        draw(found, given.plot)
    harness.show(given, found, *lines(found, given))


if __name__ == "__main__":
    main()
