"""A server on this machine's GPU, and engines that can be killed, stopped and listened to."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from bench.gpu_run.record import Record
from bench.gpu_run.spoken import Spoken
from lora_server.demo import tiny
from lora_server.demo.launch import RunningServer, running_server
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire import lora_server_pb2_grpc as rpc
from lora_server.wire.rpc import call, open_channel

START_SECONDS = 90.0
NAMES = ("a", "b")
LEASE_SECONDS = 3.0
LARGEST_ERROR = 1e-2  # between two answers to the same batch; sums in another order differ by less


class Engine(Spoken):
    """An endless engine process."""

    def __init__(self, model: Path, server: str, device: str, transport: str) -> None:
        flags = ["--device", device, "--transport", transport]
        super().__init__("bench.gpu_run.endless", [str(model), server, *NAMES, *flags])

    def steps(self, count: int, seconds: float) -> None:
        """Wait for `count` steps from now on; raise RuntimeError for one that failed or had another answer."""
        self.heard()
        deadline = time.monotonic() + seconds
        for done in range(count):
            self.right(self.event(deadline, f"more than {done} of {count} steps within {seconds:g} s"))

    def right(self, event: dict[str, Any]) -> None:
        """Raises RuntimeError unless it is a step with the right answer."""
        if event["event"] != "step" or not event["error"] < LARGEST_ERROR:
            raise RuntimeError(f"engine {self.process.pid}: expected a step with the first answer, got {event}")


class Lab:
    """One server with one shard, and what is needed to start engines on it."""

    def __init__(self, server: RunningServer, model: Path, device: str, transport: str) -> None:
        self.server, self.model, self.device, self.transport = server, model, device, transport
        self.engines: list[Engine] = []

    def start(self) -> Engine:
        """An engine; its first step is not waited for."""
        self.engines.append(Engine(self.model, self.server.address, self.device, self.transport))
        return self.engines[-1]

    def status(self) -> pb.StatusReply:
        """Ask the server for its status."""
        with open_channel(self.server.address) as channel:
            found: pb.StatusReply = call(
                rpc.ServerStub(channel).Status, pb.StatusRequest(), server=self.server.address, seconds=10
            )
        return found

    def shard_pid(self) -> int:
        """Return the process id of the server's one shard."""
        (shard,) = self.status().shards
        return int(shard.pid)


def until(condition: Callable[[], object], what: str, seconds: float = 30.0) -> None:
    """Poll; raises TimeoutError."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:g} s: {what}")
        time.sleep(0.02)


def make_files(work: Path, width: int = 256) -> tuple[Path, Path]:
    """Make a small Mixtral with rows of `width` elements, and its adapters."""
    model = tiny.make_model("mixtral", hidden_size=width, intermediate_size=width)
    tiny.save_model(model, work / "base")
    for seed, name in enumerate(NAMES):
        tiny.make_adapter(model, work / "adapters" / name, lora_rank=8 + 8 * seed, targets="all", seed=seed)
    return work / "base", work / "adapters"


def record_starts(record: Record, log: Path) -> None:
    """Record how long each shard took to start, as the server's log says; restarts are lines of their own."""
    for line in log.read_text(errors="replace").splitlines():
        if line.startswith("{") and '"shard started"' in line:
            found = json.loads(line)
            record.add("start", shard=found["shard"], seconds=found["seconds"])


@contextlib.contextmanager
def open_lab(
    record: Record, work: Path, device: str, transport: str, wire: str = "exact", serve: str = "lora_server",
    width: int = 256,
) -> Iterator[Lab]:  # fmt: skip
    """Everything of it ends with the block. `serve`: the server's module; `width`: of the model."""
    torch.set_grad_enabled(False)
    base, adapters = make_files(work, width)
    flags = ["--base-model", str(base), "--adapters", str(adapters), "--lease-seconds", str(LEASE_SECONDS)]
    flags += ["--device", device, *(["--device-pool", "256MiB"] if device == "cuda" else [])]
    flags += ["--gpu-transport", "gpu"] if transport == "gpu" else []
    with running_server(work / "server.log", [*flags, "--wire", wire], module=serve) as server:
        lab = Lab(server, base, device, transport)
        try:
            yield lab
        finally:
            for engine in lab.engines:
                engine.end()
            record_starts(record, server.log)
