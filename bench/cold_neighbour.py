"""What an adapter that is not loaded costs the requests beside it, and its own.

    python -m bench.cold_neighbour [--json] [--rounds N] [--remote-rounds N] [--fetch-seconds S]

A server with --host-link-gbps, so slow that one layer takes 40 ms, and a model of 16 layers. An engine without a model
(bench/tick_engine.py) makes passes of 64 steps for eight requests of two loaded adapters, while a request of another
adapter comes. The engine has a core, and the shard another one. Two engines take turns:

    admitted   schedules a request once its adapter has a place; steps wait for weights (before: all engines)
    loaded     schedules it once its adapter is loaded, or will be within the pass (now: serving engines)

"disk": the adapter is on disk. "remote": its files are at a URL that answers after --fetch-seconds, and steps time
out after 2 s. "pass" is of the warm requests, from the cold request's arrival to its first token; "first" is the cold
request's time to its first token. Two references, as long as a load from disk: "alone", in which nothing arrives, and
"warm", in which the same request arrives once its adapter is loaded. A request that arrives slows a pass even then, by
its call, its prompt's rows and a third adapter. So "x alone" is what an arrival and its load cost, and "x warm" what
only the load costs. "joined" and "again" are the first passes of the cold and of the warm request. "void" are passes of
warm requests whose result was thrown away.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from bench import harness
from bench.tick_engine import Generation, TickEngine
from lora_server.sources.cache import DiskCache
from lora_server.units import Size
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire import lora_server_pb2_grpc as rpc
from lora_server.wire.rpc import call, open_channel

LAYERS, LAYER_SECONDS, ADAPTERS, WARM, ROOM, WARM_REQUESTS = 16, 0.04, 8, 2, 4, 8
LOAD_SECONDS = LAYERS * LAYER_SECONDS
PROMPT = 8  # rows of the cold request, which has one pass
LONG_SECONDS, SHORT_SECONDS = 10.0, 2.0  # that a step may take: vLLM's default, and one that a fetch exceeds
WAIT_SECONDS = 60.0
REMOTE, WAYS = "remote", ("admitted", "loaded")
GEOMETRY = {"num_hidden_layers": LAYERS, "hidden_size": 256, "intermediate_size": 256}


def make(work: Path, **sizes: Any) -> int:
    """A model and its adapters, which are alike; returns the bytes of one."""
    return harness.make_alike(work, "llama", ADAPTERS, {"lora_rank": 16, "targets": "all"}, **GEOMETRY, **sizes)


def cold_adapters() -> Iterator[str]:
    """Name one adapter after the other, for ever, each evicted by then; those that the server prewarmed come last."""
    return itertools.cycle([f"a{index}" for index in (*range(ROOM, ADAPTERS), *range(WARM, ROOM))])


class SlowFiles(SimpleHTTPRequestHandler):
    """Answers after `seconds` where weights are asked for, or once `opened` is set."""

    seconds, opened = 0.0, threading.Event()

    def do_GET(self) -> None:
        if self.path.endswith(".safetensors"):
            type(self).opened.wait(type(self).seconds)
        super().do_GET()

    def log_message(self, *ignored: object) -> None:
        """Say nothing."""


@contextlib.contextmanager
def slow_files(folder: Path) -> Iterator[str]:
    """The URL of a folder."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SlowFiles, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class Engines:
    """Both engines, of which one is going, with warm requests."""

    def __init__(self, address: str, step_seconds: float) -> None:
        self._engines = {way: TickEngine(address, step_seconds, waits=way == "admitted") for way in WAYS}
        self._requests = itertools.count()
        for engine in self._engines.values():
            engine.going.clear()
            for number in range(WARM_REQUESTS):
                engine.add(f"warm-{number}", Generation(f"a{number % WARM}"))

    @contextlib.contextmanager
    def going(self, way: str) -> Iterator[TickEngine]:
        engine = self._engines[way]
        engine.going.set()
        before = len(engine.passes)
        harness.until(lambda: len(engine.passes) > before + 20, f"passes of {way}")
        yield engine
        engine.going.clear()

    def close(self) -> None:
        for engine in self._engines.values():
            engine.going.set()
            engine.close()


def beside(engine: TickEngine, name: str, number: int) -> dict[str, Any]:
    """Passes from the arrival of a request of adapter `name` until its first token, and for LOAD_SECONDS at least."""
    first_pass = len(engine.passes)
    request = engine.add(f"cold-{number}", Generation(name, PROMPT, passes=1))
    if not request.ended.wait(WAIT_SECONDS):
        raise TimeoutError(f"{name}: no answer within {WAIT_SECONDS:g} s")
    time.sleep(max(0.0, request.began + LOAD_SECONDS - time.monotonic()))
    until = max(request.first, request.began + LOAD_SECONDS)
    passes = [one for one in engine.passes[first_pass:] if one.began < until]
    return {
        "seconds": [one.seconds for one in passes],
        "joined": next((one.seconds for one in passes if f"cold-{number}" in one.requests), float("nan")),
        "first": request.first - request.began if request.first else float("nan"),
        "void": sum(each.startswith("warm") for one in passes for each in one.failures),
        "failed": request.failure.code if request.failure else "",
    }


def alone(engine: TickEngine) -> list[float]:
    """Return the seconds of passes in LOAD_SECONDS without a cold request."""
    first_pass = len(engine.passes)
    time.sleep(LOAD_SECONDS)
    return [one.seconds for one in engine.passes[first_pass:]]


def beside_one(engine: TickEngine, name: str, numbers: Iterator[int]) -> dict[str, Any]:
    """Measure passes in which nothing arrives, then a request whose adapter is cold, then one whose adapter is warm."""
    lone, found = alone(engine), beside(engine, name, next(numbers))
    return found | {"alone": lone, "warm": beside(engine, name, next(numbers))}


def add_remote(address: str, url: str) -> str:
    """Add an adapter by URL; return its version."""
    with open_channel(address) as channel:
        request = pb.AddAdapterRequest(name=REMOTE, uri=url, wait_seconds=WAIT_SECONDS)
        added: pb.Adapter = call(rpc.AdaptersStub(channel).Add, request, server=address, seconds=WAIT_SECONDS)
    return added.version


def make_remote(address: str, cache: DiskCache, version: str) -> None:
    """Have the adapter evicted from memory, which others fill, and from the disk cache."""

    def state() -> str:
        return next(one.state for one in harness.listed(address) if one.name == REMOTE)

    def discarded() -> bool:
        cache.discard(version)
        return state() == REMOTE

    harness.until(discarded, "the adapter is remote")


def measure(rounds: int, remote_rounds: int, fetch_seconds: float) -> list[dict[str, Any]]:
    """Rows of the table: by case and engine."""
    seen: dict[tuple[str, str], list[dict[str, Any]]] = {}
    with harness.scratch() as work, slow_files(work / "adapters") as url:
        flags = [*harness.slow_link(make(work), LOAD_SECONDS, ROOM), "--host-pool", "0", "--allow-source", url]
        flags += ["--disk-cache", str(work / "cache")]
        with harness.serving(work, *flags) as server:
            harness.a_core_each(server.address)
            turn = cold_adapters()
            numbers = itertools.count()
            with contextlib.closing(Engines(server.address, LONG_SECONDS)) as engines:
                for _ in harness.progress(range(rounds), "disk"):
                    for way in WAYS:
                        with engines.going(way) as engine:
                            seen.setdefault(("disk", way), []).append(beside_one(engine, next(turn), numbers))
            version = add_remote(server.address, f"{url}/a{ADAPTERS - 1}") if remote_rounds else ""
            SlowFiles.seconds = fetch_seconds
            cache = DiskCache(work / "cache", Size(share=0.5))
            for way in WAYS if remote_rounds else ():
                for _ in harness.progress(range(remote_rounds), f"remote, {way}"):
                    closing = contextlib.closing(Engines(server.address, SHORT_SECONDS))
                    with closing as engines, engines.going(way) as engine:
                        for _ in range(ROOM):  # evict it
                            beside(engine, next(turn), next(numbers))
                        make_remote(server.address, cache, version)
                        seen.setdefault((REMOTE, way), []).append(beside_one(engine, REMOTE, numbers))
    return [row(case, way, found) for (case, way), found in seen.items()]


def row(case: str, way: str, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One line of the table."""
    return {
        "case": case,
        "engine": way,
        **figures("pass", found),
        "void": sum(one["void"] for one in found),
        "failed": ", ".join(sorted({one["failed"] for one in found if one["failed"]})) or "-",
        "passes": sum(len(one["seconds"]) for one in found),
    }


def figures(name: str, found: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the figures of rounds, each with the `seconds` of its passes, `alone` and `warm`; `name` is of a pass."""
    seconds, lone = ([one for each in found for one in each[key]] for key in ("seconds", "alone"))
    warm = [one for each in found for one in each["warm"]["seconds"]]
    row = percentiles(name, seconds, alone=lone, warm=warm)
    row |= {f"{key}_ms": statistics.median(each[key] for each in found) * 1e3 for key in ("joined", "first")}
    return row | {"again_ms": statistics.median(each["warm"]["joined"] for each in found) * 1e3}


def percentiles(name: str, seen: Sequence[float], **references: Sequence[float]) -> dict[str, float]:
    """Return p50 and p99 of these seconds and of the references, in ms, and their ratios to those of each reference;
    NaN where there are none, as on a slow machine in a short run."""
    found: dict[str, float] = {}
    for at, of in (("p50", statistics.median), ("p99", p99)):
        ms = {key: of(times) * 1e3 if times else math.nan for key, times in {name: seen, **references}.items()}
        found |= {f"{key}_{at}_ms": value for key, value in ms.items()}
        found |= {f"{at}_{key}": ms[name] / ms[key] for key in references}
    return found


def p99(seen: Sequence[float]) -> float:
    return statistics.quantiles(seen, n=100)[98] if len(seen) > 1 else seen[0]  # a slow machine has one pass in a while


FIGURES = (
    "alone p50, ms {alone_p50_ms:.1f} | p99 {alone_p99_ms:.1f} | warm p50 {warm_p50_ms:.1f} | p99 {warm_p99_ms:.1f} | "
    "pass p50 {pass_p50_ms:.1f} | p99 {pass_p99_ms:.1f} | x alone p50 {p50_alone:.2f} | p99 {p99_alone:.2f} | "
    "x warm p50 {p50_warm:.2f} | p99 {p99_warm:.2f} | joined ms {joined_ms:.1f} | again {again_ms:.1f} | "
    "first ms {first_ms:.0f}"
)
COLUMNS = (
    f"adapter {{case}} | engine {{engine}} | {FIGURES} | void {{void:d}} | cold failed {{failed}} | passes {{passes:d}}"
)


def main() -> None:
    given = harness.flags(__doc__, rounds=10, remote_rounds=2, fetch_seconds=5.0)
    harness.one_thread()
    rows = measure(given.rounds, given.remote_rounds, given.fetch_seconds)
    harness.show(given, rows, harness.table("A cold adapter beside warm requests", rows, COLUMNS), width=220)


if __name__ == "__main__":
    main()
