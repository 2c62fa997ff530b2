"""The first result of an adapter that is not there, over a simulated link.

    python -m bench.cold_start [--json] [--rounds N]

A server with --host-link-gbps, so slow that one layer takes 20 ms, and a model of 32 layers. Each round takes an
adapter that is not in memory and times, from before it is acquired (which begins its load):

    first    a step at layer 0 alone; the bar is 1.2 x (the load of one layer + a step), and a fifth of `whole`
    pass     a step at each layer, one after the other: each waits for its own layer only
    ahead    a pass with the adapter acquired by the time of its load before: nothing is waited for
    whole    what the link alone takes for the adapter; `warm` is a pass when all of it is there

Others make room all the time: the pool holds two adapters of six. A round begins when nothing is loaded any more.
Medians of all rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.memory_client import Caller
from lora_server.demo import tiny
from lora_server.demo.launch import running_server
from lora_server.spec import Site
from lora_server.transport.session import Held

LAYERS, LAYER_SECONDS, ADAPTERS, ROOM = 32, 0.02, 6, 2
GEOMETRY = {"num_hidden_layers": LAYERS, "hidden_size": 256, "intermediate_size": 256}
QUIET_SECONDS = 6.0
SITES = [Site(layer, "qkv") for layer in range(LAYERS)]
BAR, SHORTER = 1.2, 5.0


def make(work: Path) -> int:
    """A model and its adapters, which are alike; returns the bytes of one."""
    model = tiny.make_model("llama", **GEOMETRY)
    tiny.save_model(model, work / "base")
    for seed in range(ADAPTERS):
        tiny.make_adapter(model, work / "adapters" / f"a{seed}", lora_rank=16, seed=seed, targets="all")
    return 4 * 16 * LAYERS * _elements_per_rank(work / "base")


def _elements_per_rank(base: Path) -> int:
    from lora_server import spec

    model = spec.load(base)
    widths = {site: model.in_width(site) + model.out_width(site) for site in model.sites() if site.layer == 0}
    parts = {"qkv": 3, "gate_up": 2}  # A matrices of a site
    return sum(width + model.in_width(site) * (parts.get(site.projection, 1) - 1) for site, width in widths.items())


def timed(caller: Caller, held: Held, sites: list[Site], began: float = 0.0) -> float:
    """Seconds of a step at each site, since `began` if it is given."""
    began = began or time.perf_counter()
    for site in sites:
        caller.step(held, site)
    return time.perf_counter() - began


@contextlib.contextmanager
def cold(caller: Caller, name: str) -> Iterator[tuple[Held, float]]:
    """Acquired now, and since when."""
    began = time.perf_counter()
    held = caller.hold(name)
    try:
        yield held, began
    finally:
        caller.client.release([held])


def measure(rounds: int) -> dict[str, float]:
    """Medians in milliseconds, and the bars' ratios."""
    times: dict[str, list[float]] = {"acquire": [], "first": [], "pass": [], "ahead": [], "warm": [], "step": []}
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        size = make(work)
        gbps = size * 8e-9 / (LAYER_SECONDS * LAYERS)
        flags = ["--base-model", str(work / "base"), "--adapters", str(work / "adapters")]
        flags += ["--device-pool", str(round(size * (ROOM + 0.5))), "--host-link-gbps", f"{gbps:.6f}"]
        with running_server(work / "log", flags) as server:
            caller = Caller(server.address, 4, 0)
            time.sleep(LAYER_SECONDS * LAYERS * (ROOM + 1))  # what there is room for comes by itself
            turn = itertools.cycle([f"a{index % ADAPTERS}" for index in range(ROOM, ROOM + ADAPTERS)])
            for _ in track(range(rounds), "stepping", console=Console(stderr=True)):
                time.sleep(QUIET_SECONDS)
                with cold(caller, next(turn)) as (held, began):
                    times["acquire"].append(time.perf_counter() - began)
                    times["first"].append(timed(caller, held, SITES[:1], began))
                    timed(caller, held, SITES)
                    times["step"].append(timed(caller, held, SITES[:1]))
                with cold(caller, next(turn)) as (held, began):
                    times["pass"].append(timed(caller, held, SITES, began))
                    times["warm"].append(timed(caller, held, SITES))
                with cold(caller, next(turn)) as (held, began):
                    time.sleep(LAYER_SECONDS * LAYERS * 1.5)
                    times["ahead"].append(timed(caller, held, SITES))
            caller.client.close()
    found = {f"{name}_ms": statistics.median(seen) * 1e3 for name, seen in times.items()}
    layer, whole = LAYER_SECONDS * 1e3, LAYER_SECONDS * LAYERS * 1e3
    return found | {
        "layer_ms": layer,
        "whole_ms": whole,
        "first_ratio": found["first_ms"] / (layer + found["step_ms"]),
        "whole_by_first": whole / found["first_ms"],
        "pass_ratio": found["pass_ms"] / (whole + found["warm_ms"]),
        "ahead_ratio": found["ahead_ms"] / found["warm_ms"],
    }


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    found: dict[str, Any] = measure(options.rounds)
    if options.json:
        print(json.dumps(found, indent=2))
        return
    table = Table("what", "seen", "bar", title=f"Cold start, {LAYERS} layers", title_justify="left")
    for name in ("layer", "whole", "step", "acquire", "first", "pass", "ahead", "warm"):
        table.add_row(f"{name}, ms", f"{found[f'{name}_ms']:.1f}", "")
    table.add_row("first / (layer + step)", f"{found['first_ratio']:.2f}", f"at most {BAR}")
    table.add_row("whole / first", f"{found['whole_by_first']:.1f}", f"at least {SHORTER:g}")
    table.add_row("pass / (whole + warm)", f"{found['pass_ratio']:.2f}", "at most 1: they overlap")
    table.add_row("ahead / warm", f"{found['ahead_ratio']:.2f}", "about 1: no wait")
    Console().print(table)


if __name__ == "__main__":
    main()
