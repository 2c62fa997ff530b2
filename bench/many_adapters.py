"""The cost of having many adapters registered: `python -m bench.many_adapters --adapters 5000`.

The server has one shard with memory for a few of the adapters. Measured: the time until it serves, to list the
adapters, and until a killed shard and a killed controller are back; and the time of a step, to compare with a server
that has a single adapter registered.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from bench import harness
from client_connector.transformers import attach
from lora_server import logs
from lora_server.demo.launch import RunningServer

CONTENTS = 20
POOL = "1MiB"
PATIENCE = 600.0


def make(root: Path, count: int, lora_rank: int = 4, targets: str = "all", **sizes: int) -> torch.nn.Module:
    """Make a tiny model, of these sizes, and `count` adapters that are hard links to a few contents."""
    contents = {f"content-{seed}": {"lora_rank": lora_rank, "targets": targets} for seed in range(min(CONTENTS, count))}
    model = harness.make(root, "mixtral", contents, **sizes)
    (root / "adapters").rename(root / "contents")
    for number in range(count):
        target = root / "adapters" / f"a{number:05}"
        target.mkdir(parents=True)
        for file in (root / "contents" / f"content-{number % CONTENTS}").iterdir():
            (target / file.name).hardlink_to(file)
    return model


def seconds_until(condition: Callable[[], object]) -> float:
    """Wait until the condition holds and return the seconds it took; an error counts as "not yet"."""

    def holds() -> object:
        with contextlib.suppress(Exception):
            return condition()
        return False

    return harness.until(holds, "what is waited for", PATIENCE)


def step_ms(server: RunningServer, model: torch.nn.Module) -> float:
    """Return the median ms of a forward pass of two tokens."""
    taken = []
    with attach(model, server=server.address) as lora, lora.adapters(["a00000"]):
        for number in range(60):
            began = time.perf_counter()
            model(torch.tensor([[5, 6]]))
            if number >= 20:
                taken.append(time.perf_counter() - began)
    return statistics.median(taken) * 1e3


def measure(count: int) -> dict[str, float]:
    """Run one server with `count` adapters; return its times in seconds, and a step's in ms."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        model = make(root, count)
        began = time.monotonic()
        with harness.serving(root, "--layout", "ep1-pp1", "--device-pool", POOL) as server, torch.no_grad():

            def status() -> Any:
                return harness.status(server.address)

            def others() -> list[Any]:
                """Return the shards that are up in a new process."""
                return [one for one in status().shards if one.state == "up" and one.pid not in (0, shard)]

            found = {"ready": time.monotonic() - began, "step ms": step_ms(server, model)}
            began = time.monotonic()
            command = [sys.executable, "-m", "lora_server", "adapters", "list", "--server", server.address]
            subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
            found["list"] = time.monotonic() - began
            shard, controller = status().shards[0].pid, status().pid
            before = psutil.Process(controller).memory_info().rss
            os.kill(shard, signal.SIGKILL)
            found["shard up"] = seconds_until(others)
            found["shard knows all"] = found["shard up"] + seconds_until(
                lambda: others() and all(one.state != "loading" for one in harness.listed(server.address))
            )
            new = psutil.Process(status().shards[0].pid).cpu_times()
            found["its CPU"] = new.user + new.system
            os.kill(controller, signal.SIGKILL)
            found["controller back"] = seconds_until(
                lambda: server.get("/readyz")[0] == 200 and status().pid != controller
            )
            found["controller MB"] = before / 1e6
        return found


def main() -> None:
    given = harness.flags(__doc__, adapters=5000)
    logs.configure(logging.WARNING)
    few, many = measure(1), measure(given.adapters)
    lines = [f"{name:>18} {few[name]:8.2f} {value:8.2f}" for name, value in many.items()]
    harness.show(given, {"1": few, str(given.adapters): many}, *lines)


if __name__ == "__main__":
    main()
