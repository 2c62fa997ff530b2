"""What it costs to have many adapters registered: `python -m bench.many_adapters --adapters 5000`.

A server of one shard with room for a few of them, then without and with an engine that asks for one: how long it takes
until it serves, to list them, until a killed shard and a killed controller are back; and what a step takes beside one
with a single adapter registered.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import torch

from client_connector.transformers import attach
from lora_server import logs
from lora_server.demo import tiny
from lora_server.demo.launch import RunningServer, running_server
from lora_server.errors import LoraServerError
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire import lora_server_pb2_grpc as rpc
from lora_server.wire.listing import all_pages
from lora_server.wire.rpc import open_channel

CONTENTS = 20
POOL = "1MiB"
PATIENCE = 600.0


def make(root: Path, count: int) -> torch.nn.Module:
    """A tiny model, and adapters of a few contents, linked."""
    model = tiny.make_model("mixtral")
    tiny.save_model(model, root / "base")
    for seed in range(min(CONTENTS, count)):
        tiny.make_adapter(model, root / "contents" / str(seed), lora_rank=4, seed=seed, targets="all")
    for number in range(count):
        target = root / "adapters" / f"a{number:05}"
        target.mkdir(parents=True)
        for file in (root / "contents" / str(number % CONTENTS)).iterdir():
            os.link(file, target / file.name)
    return model


def status(server: RunningServer) -> pb.StatusReply:
    """As the controller says it."""
    with open_channel(server.address) as channel:
        return rpc.ServerStub(channel).Status(pb.StatusRequest(), timeout=60)


def seconds_until(condition: Callable[[], bool]) -> float:
    """How long it took."""
    began = time.monotonic()
    while True:
        try:
            if condition():
                return time.monotonic() - began
        except Exception as error:
            if isinstance(error, KeyboardInterrupt):
                raise
        if time.monotonic() - began > PATIENCE:
            raise LoraServerError(f"bench: not within {PATIENCE:g} s")
        time.sleep(0.05)


def is_up(shard: pb.ShardStatus, before: int) -> bool:
    """In another process than before."""
    return shard.state == "up" and shard.pid not in (0, before)


def is_known(server: RunningServer, pid: int) -> Callable[[], bool]:
    """Whether another process is the shard, and has heard of all adapters: none is loading."""

    def known() -> bool:
        if status(server).shards[0].pid in (0, pid):
            return False
        with open_channel(server.address) as channel:
            listed = all_pages(partial(rpc.AdaptersStub(channel).List, timeout=60))
        return all(one.state != "loading" for one in listed.adapters)

    return known


def step_ms(server: RunningServer, model: torch.nn.Module) -> float:
    """The median of a forward pass of two tokens."""
    taken = []
    with attach(model, server=server.address) as lora, lora.adapters(["a00000"]):
        for number in range(60):
            began = time.perf_counter()
            model(torch.tensor([[5, 6]]))
            if number >= 20:
                taken.append(time.perf_counter() - began)
    return statistics.median(taken) * 1e3


def measure(count: int) -> dict[str, float]:
    """What one server of so many adapters takes, in seconds; a step in ms."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        model = make(root, count)
        flags = ["--base-model", str(root / "base"), "--adapters", str(root / "adapters"), "--layout", "ep1-pp1"]
        began = time.monotonic()
        with running_server(root / "log", [*flags, "--device-pool", POOL]) as server, torch.no_grad():
            found = {"ready": time.monotonic() - began}
            found["step ms"] = step_ms(server, model)
            began = time.monotonic()
            subprocess.run(
                [sys.executable, "-m", "lora_server", "adapters", "list", "--server", server.address],
                stdout=subprocess.DEVNULL,
                check=True,
            )
            found["list"] = time.monotonic() - began
            shard = status(server).shards[0].pid
            before = psutil.Process(status(server).pid).memory_info().rss
            os.kill(shard, signal.SIGKILL)
            found["shard up"] = seconds_until(lambda: is_up(status(server).shards[0], shard))
            found["shard knows all"] = found["shard up"] + seconds_until(is_known(server, shard))
            new = psutil.Process(status(server).shards[0].pid).cpu_times()
            found["its CPU"] = new.user + new.system
            controller = status(server).pid
            os.kill(controller, signal.SIGKILL)
            found["controller back"] = seconds_until(
                lambda: server.get("/readyz")[0] == 200 and status(server).pid != controller
            )
            found["controller MB"] = before / 1e6
        return found


def main() -> None:
    """Both, beside each other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--adapters", type=int, default=5000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    logs.configure(logging.WARNING)
    few, many = measure(1), measure(options.adapters)
    if options.json:
        print(json.dumps({"1": few, str(options.adapters): many}, indent=2))
        return
    for name, value in many.items():
        print(f"{name:>18} {few[name]:8.2f} {value:8.2f}")


if __name__ == "__main__":
    main()
