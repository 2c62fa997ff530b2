"""The control plane at size: `python -m bench.control_scale --shards 256 --engines 1000 --adapters 2000`.

One `serve` with a controller and a real shard; all other shards and all engines are real connections without weights:
shards register, take every command and report that they have every adapter; engines join, beat, and hold and release
adapters, Zipf 1.0. Shards come after the adapters, as after a restart. Measured: seconds until all shards know all
adapters, until all engines have joined, an acquire of an engine among all of them, a list, the status, the page, and
what the controller's process takes.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from bench import harness
from bench.many_adapters import make
from lora_server.demo import children
from lora_server.demo.launch import RunningServer, launch

PATIENCE = 3600.0
SHARDS_EACH, ENGINES_EACH = 64, 125  # of a process
STAGES = 32
TOKEN = "control-scale-bench"
SIZES = {"num_hidden_layers": STAGES, "hidden_size": 32, "intermediate_size": 32}
COLUMNS = (
    "shards {shards:d} | engines {engines:d} | adapters {adapters:,d} | all known s {known_s:.1f}"
    " | joined s {joined_s:.1f}"
    " | acquire ms, p50 {p50_ms:.1f} | p99 {p99_ms:.1f} | per s {rate:.0f} | list s {list_s:.2f}"
    " | status s {status_s:.2f} | page s {page_s:.2f} | MB {mb:.0f} | CPU s {cpu_s:.0f}"
)


@contextlib.contextmanager
def processes(module: str, jobs: list[dict[str, Any]]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start one process per job. Each gets its job as JSON on its command line."""
    with contextlib.ExitStack() as stack:
        started = []
        for job in jobs:
            command = [sys.executable, "-m", module, json.dumps(job)]
            process = children.start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            stack.callback(children.stop, process)
            started.append(process)
        yield started


def lines(started: list[subprocess.Popen[bytes]]) -> list[bytes]:
    """Read one line of each process's stdout."""
    found = []
    for process in started:
        assert process.stdout is not None
        found.append(process.stdout.readline())
    return found


def page(http: str) -> bytes:
    """Fetch the page's data."""
    with urllib.request.urlopen(f"http://{http}/status.json", timeout=PATIENCE) as answer:
        return bytes(answer.read())


def split(count: int, each: int) -> list[range]:
    """Divide 0 to count-1 into ranges of at most `each`."""
    return [range(first, min(first + each, count)) for first in range(0, count, each)]


@dataclass(frozen=True)
class Size:
    """Numbers of shards, engines and adapters."""

    shards: int
    engines: int
    adapters: int


def measure(size: Size, seconds: float) -> dict[str, Any]:
    """Run one server of this size, and return its row of figures."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        make(root, size.adapters, 1, "qv", **SIZES)
        (root / "token").write_text(TOKEN)
        layout = f"ep{size.shards // STAGES}-pp{STAGES}"
        flags = ["--base-model", str(root / "base"), "--adapters", str(root / "adapters"), "--layout", layout]
        flags += ["--nodes", str(size.shards), "--node-rank", "0", "--join-token-file", str(root / "token")]
        server = launch(root / "log", *flags, "--device-pool", "256MiB")
        try:
            with fakes(server.address, root, layout, size.shards):
                known = wait_for_all(server)
                return {**asdict(size), "known_s": known, **with_engines(server, size, seconds)}
        except BaseException:
            print(server.tail(), file=sys.stderr)
            raise
        finally:
            server.stop()


def fakes(address: str, root: Path, layout: str, shards: int) -> contextlib.AbstractContextManager[object]:
    """Start all shards but the first, which is a real one."""
    about = {"address": address, "base": str(root / "base"), "layout": layout}
    runs = split(shards, SHARDS_EACH)
    return processes("bench.control_fakes", [about | {"shards": [one for one in run if one]} for run in runs])


def wait_for_all(server: RunningServer) -> float:
    """Wait until every shard has said that it has every adapter; return the seconds."""
    began = time.monotonic()
    harness.until(lambda: server.get("/readyz")[0] == 200, "the server is ready", PATIENCE)
    harness.until(lambda: all(one.state == "ready" for one in harness.listed(server.address)), "all loaded", PATIENCE)
    return time.monotonic() - began


def with_engines(server: RunningServer, size: Size, seconds: float) -> dict[str, Any]:
    """Have all engines join and work; measure their acquires, and a list, the status and the page afterwards."""
    controller, began = psutil.Process(harness.status(server.address).pid), time.monotonic()
    about = {"address": server.address, "adapters": size.adapters, "seconds": seconds}
    jobs = [about | {"engines": len(run)} for run in split(size.engines, ENGINES_EACH)]
    with processes("bench.control_engines", jobs) as started:
        lines(started)
        joined = time.monotonic() - began
        for process in started:
            assert process.stdin is not None
            process.stdin.write(b"go\n")
            process.stdin.flush()
        waited = np.concatenate([json.loads(line) for line in lines(started)])
        return {
            "joined_s": joined,
            "p50_ms": float(np.percentile(waited, 50)),
            "p99_ms": float(np.percentile(waited, 99)),
            "rate": len(waited) / seconds,
            "list_s": harness.least_s(1, lambda: harness.listed(server.address)),
            "status_s": harness.least_s(1, lambda: harness.status(server.address)),
            "page_s": harness.least_s(1, lambda: page(server.http)),
            "mb": controller.memory_info().rss / 1e6,
            "cpu_s": sum(controller.cpu_times()[:2]),
        }


def main() -> None:
    given = harness.flags(__doc__, shards=[32], engines=100, adapters=[1000], seconds=5.0)
    rows = []
    for shards in given.shards:
        for adapters in given.adapters:
            rows.append(measure(Size(shards, given.engines, adapters), given.seconds))
            print(rows[-1], file=sys.stderr, flush=True)
    harness.show(given, rows, harness.table("The control plane at size", rows, COLUMNS), width=160)


if __name__ == "__main__":
    main()
