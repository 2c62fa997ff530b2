"""A serving engine's worker in NVSHMEM's world, whose pass is recorded once, with nobody's rows; a session of its
scheduler's holds the adapters. Its GPU is this CPU: python -m tests.support.gpu.gpu_pass_engine SERVER ADAPTER...

JSON lines of stdin, one answer each:
{"do": "join"}                                -> "joined", once all are there
{"do": "play", "names": [...], "seed": n}     -> "played": what a replay left (a digest) or whose it failed, steps sent
{"do": "play", ..., "kill": pid}              -> likewise, and that shard dies while the replay waits for it
{"do": "play", ..., "stranger": true}         -> likewise, with another request, for an adapter that nobody has
{"do": "lose"}                                -> "lost": as after a step that broke the session
anything that fails                           -> "failed": the error's code and text
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import signal
import sys
import threading
from typing import Any

import torch

from bench.gpu_run.child import say
from bench.gpu_run.passes import Layer, Names
from client_connector.client import Client
from client_connector.remote import RemoteServer
from client_connector.serving.launched import LaunchedPass
from client_connector.serving.plan import Assigned, StepPlan
from client_connector.serving.planned import PlannedPass
from lora_server import logs
from lora_server.errors import LoraServerError, ShardUnavailableError
from lora_server.transport.session import Held
from tests.support.gpu import emulated_world
from tests.support.gpu.gpu_graph import Graph
from tests.support.serving import HANG_SECONDS, until

ROWS = 20  # more entries than a message holds: chunks
STRANGER = 700 | 1 << 16


def layer_of(forward: PlannedPass) -> Layer:
    """Without weights: a GEMM rounds as its process likes."""
    return Layer(forward.client.terms.spec, forward, ROWS, "cpu", scale=0.0)


def digest(layer: Layer) -> str:
    found = hashlib.sha256()
    for result in layer.results():
        found.update(result.view(torch.int16).numpy().tobytes())
    return found.hexdigest()


class Worker:
    def __init__(self, server: str, adapters: list[str]) -> None:
        self.server, self.adapters = server, adapters

    def join(self) -> dict[str, Any]:
        client = Client(RemoteServer(self.server, "nvshmem"), HANG_SECONDS)
        self.forward = LaunchedPass(client, lambda: True, dtype=torch.bfloat16, max_rows=2 * ROWS, max_adapters=3)
        self.layer = layer_of(self.forward)
        self.graph = Graph(self.forward)
        with self.graph.capture():
            self.layer.run()
        self.recorded = list(self.graph.launches)
        self.scheduler = RemoteServer(self.server, links=False).join()
        self.held = {one.name: one for one in self.scheduler.acquire(self.adapters, client.deadline())}
        return {"event": "joined", "sent": self.forward.sent()}

    def play(self, names: Names, seed: int, kill: int = 0, stranger: bool = False) -> dict[str, Any]:
        self.layer.feed(seed)
        self._begin(names, stranger)
        killer = threading.Thread(target=self._kill, args=(kill, self.forward.sent()))
        if kill:
            os.kill(kill, signal.SIGSTOP)  # it answers nothing any more
            killer.start()
        self.graph.replay()
        if kill:
            killer.join()
        failures = {name: list(failure) for name, failure in self.forward.end().items()}
        assert self.graph.launches == self.recorded
        return {"event": "played", "digest": digest(self.layer), "failures": failures, "sent": self.forward.sent()}

    def _begin(self, names: Names, stranger: bool) -> None:
        requests: dict[str, Held | None] = {f"{i}": name and self.held[name] for i, name in enumerate(names)}
        if stranger:
            requests["stranger"] = dataclasses.replace(self.held[self.adapters[0]], handle=STRANGER)
        held = {one.handle: one for one in requests.values() if one is not None}
        rows = {request: Assigned(one.handle, 0) for request, one in requests.items() if one is not None}
        plan = StepPlan(self.scheduler.terms.server, rows, tuple(held.values()), holder=self.scheduler.proof)
        self.forward.receive(plan)
        self.forward.begin(list(requests), [ROWS // len(requests)] * len(requests), [0] * len(requests))

    def _kill(self, pid: int, before: list[int]) -> None:
        until(lambda: self.forward.sent() != before, "the pass has sent something, and waits")
        os.kill(pid, signal.SIGKILL)

    def lose(self) -> dict[str, Any]:
        self.forward.client.give_up(ShardUnavailableError("a test says so"))
        return {"event": "lost"}

    def obey(self, do: str, **more: Any) -> dict[str, Any]:
        try:
            return getattr(self, do)(**more)
        except LoraServerError as error:
            return {"event": "failed", "code": error.code, "reason": str(error)}


def main() -> None:
    logs.configure()  # stdout is for the JSON
    emulated_world.use()
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    worker = Worker(sys.argv[1], sys.argv[2:])
    for line in sys.stdin:
        say(**worker.obey(**json.loads(line)))


if __name__ == "__main__":
    main()
