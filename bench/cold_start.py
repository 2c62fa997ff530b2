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

import contextlib
import itertools
import statistics
import time
from collections.abc import Iterator

from bench import harness
from bench.memory_client import Caller
from lora_server.spec import Site
from lora_server.wire.terms import Held

LAYERS, LAYER_SECONDS, ADAPTERS, ROOM = 32, 0.02, 6, 2
GEOMETRY = {"num_hidden_layers": LAYERS, "hidden_size": 256, "intermediate_size": 256}
QUIET_SECONDS = 6.0
SITES = [Site(layer, "qkv") for layer in range(LAYERS)]
BAR, SHORTER = 1.2, 5.0


def timed(caller: Caller, held: Held, sites: list[Site], began: float = 0.0) -> float:
    """Seconds of a step at each site, since `began` if it is given."""
    began = began or time.perf_counter()
    for site in sites:
        caller.step(held, site)
    return time.perf_counter() - began


@contextlib.contextmanager
def cold(caller: Caller, name: str) -> Iterator[tuple[Held, float]]:
    began = time.perf_counter()
    held = caller.hold(name)
    try:
        yield held, began
    finally:
        caller.client.release([held])


def measure(rounds: int) -> dict[str, float]:
    """Medians in milliseconds, and the bars' ratios."""
    times: dict[str, list[float]] = {"acquire": [], "first": [], "pass": [], "ahead": [], "warm": [], "step": []}
    with harness.scratch() as work:
        size = harness.make_alike(work, "llama", ADAPTERS, {"lora_rank": 16, "targets": "all"}, **GEOMETRY)
        with harness.serving(work, *harness.slow_link(size, LAYER_SECONDS * LAYERS, ROOM)) as server:
            caller = Caller(server.address, 4, 0)
            time.sleep(LAYER_SECONDS * LAYERS * (ROOM + 1))  # what there is room for comes by itself
            turn = itertools.cycle([f"a{index % ADAPTERS}" for index in range(ROOM, ROOM + ADAPTERS)])
            for _ in harness.progress(range(rounds), "stepping"):
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


ROWS = (  # what, its template, the bar
    *(
        (f"{name}, ms", f"{{{name}_ms:.1f}}", "")
        for name in ["layer", "whole", "step", "acquire", "first", "pass", "ahead", "warm"]
    ),
    ("first / (layer + step)", "{first_ratio:.2f}", f"at most {BAR}"),
    ("whole / first", "{whole_by_first:.1f}", f"at least {SHORTER:g}"),
    ("pass / (whole + warm)", "{pass_ratio:.2f}", "at most 1: they overlap"),
    ("ahead / warm", "{ahead_ratio:.2f}", "about 1: no wait"),
)


def main() -> None:
    given = harness.flags(__doc__, rounds=8)
    harness.one_thread()
    found = measure(given.rounds)
    lines = [{"what": what, "seen": form.format_map(found), "bar": bar} for what, form, bar in ROWS]
    harness.show(
        given, found, harness.table(f"Cold start, {LAYERS} layers", lines, "what {what} | seen {seen} | bar {bar}")
    )


if __name__ == "__main__":
    main()
