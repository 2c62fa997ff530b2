"""An engine process with this CPU as its GPU: python -m tests.support.gpu.gpu_engine SERVER TRANSPORT ADAPTER...

JSON lines of stdin, one answer each:
{"do": "join"}              -> "joined": a session, for steps of the first adapter at each shard
{"do": "go"}                -> "went": a digest of such steps' rows, or the code that one was refused with
{"do": "leave"}             -> "left"; with "stopped": pids, a step to these shards, which stand still, is on its way
{"do": "halt", "rounds": n} -> "halted": it has put a step as far as n of its kernel's turns, and does no more
{"do": "record"}            -> "recorded": a serving engine's pass, without adapter rows; a scheduler has the adapters
{"do": "play", "names": [...], "seed": n}  -> "played": a digest of the replay's result or its failures, and steps sent;
    "kill": pid: that shard dies meanwhile; "stranger": true: with another request, for an adapter that is not held
{"do": "lose"}              -> "lost": the session of the pass is broken, as after a failed step
anything that fails         -> "failed": the error's code and text
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import psutil
import torch

from bench.gpu_run.child import say
from bench.gpu_run.passes import Layer, Names, begin
from bench.gpu_run.spoken import Spoken
from client_connector.client import Client
from client_connector.remote import RemoteServer
from client_connector.serving.launched import LaunchedPass
from client_connector.serving.plan import Assigned, StepPlan
from client_connector.serving.planned import PlannedPass
from lora_server import logs
from lora_server.errors import LoraServerError, ShardUnavailableError
from lora_server.placement import Placement
from lora_server.spec import Site
from lora_server.wire.terms import Held
from tests.support.gpu import emulated_gpu, emulated_world
from tests.support.gpu.gpu_graph import Graph
from tests.support.gpu.gpu_steps import SITE, Steps
from tests.support.serving import HANG_SECONDS, suspended, until

ROWS = 20  # more entries than a message holds: chunks
STEPS = 3  # more than there are slots
STRANGER = 700 | 1 << 16


def digest_of(tensors: Iterable[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.contiguous().view(torch.int16).numpy().tobytes())
    return found.hexdigest()


def layer_of(forward: PlannedPass) -> Layer:
    """Without weights: a GEMM rounds as its process likes."""
    return Layer(forward.client.terms.spec, forward, ROWS, "cpu", scale=0.0)


def killed_meanwhile(forward: LaunchedPass, pid: int) -> threading.Thread:
    """The shard answers nothing from now on, and dies once the pass has sent something."""
    before = forward.sent()
    os.kill(pid, signal.SIGSTOP)

    def kill() -> None:
        until(lambda: forward.sent() != before, "the pass has sent something, and waits")
        os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    return killer


@contextlib.contextmanager
def all_stopped(pids: Sequence[int]) -> Iterator[None]:
    """No thread of these processes runs meanwhile."""
    with suspended(*pids):
        for process in map(psutil.Process, pids):
            threads = [psutil.Process(thread.id) for thread in process.threads()]
            until(lambda its=threads: all(one.status() == psutil.STATUS_STOPPED for one in its), "it is stopped")
        yield


class Engine:
    def __init__(self, server: str, transport: str, adapters: list[str]) -> None:
        self.server, self.transport, self.adapters = server, transport, adapters

    def join(self, seconds: float = HANG_SECONDS) -> dict[str, Any]:
        self.session = RemoteServer(self.server, self.transport).join(seconds)
        (held,) = self.session.acquire(self.adapters[:1], time.monotonic() + HANG_SECONDS)
        terms = self.session.terms
        placement, sites = Placement(terms.spec, terms.layout), (SITE, Site(SITE.layer, "o"))
        owners = {placement.owners(site)[0]: site for site in sites}
        self.steps = [Steps(self.session, held.handle, shard, site) for shard, site in owners.items()]
        return {"event": "joined"}

    def go(self) -> dict[str, Any]:
        answers = [one.step() for _ in range(STEPS) for one in self.steps]
        refused = [answer for answer in answers if isinstance(answer, str)]
        return {"event": "went", "digest": refused[0] if refused else digest_of(answers)}

    def leave(self, stopped: Iterable[int] = ()) -> dict[str, Any]:
        with all_stopped(stopped):
            if stopped:
                self.steps[0].push()
            self.session.leave()
        return {"event": "left"}

    def halt(self, rounds: int) -> dict[str, Any]:
        emulated_gpu.EmulatedQueue.stop_after = rounds
        self.steps[0].push()
        assert emulated_gpu.EmulatedQueue.stopped.wait(HANG_SECONDS)
        return {"event": "halted"}

    def record(self) -> dict[str, Any]:
        client = Client(RemoteServer(self.server, self.transport), HANG_SECONDS)
        self.forward = LaunchedPass(client, lambda: True, dtype=torch.bfloat16, max_rows=2 * ROWS, max_adapters=3)
        self.layer = layer_of(self.forward)
        self.graph = Graph(self.forward)
        with self.graph.capture():
            self.layer.run()
        self.recorded = list(self.graph.launches)
        self.scheduler = RemoteServer(self.server, links=False).join()
        self.held = {one.name: one for one in self.scheduler.acquire(self.adapters, client.deadline(), loaded=True)}
        return {"event": "recorded", "sent": self.forward.sent()}

    def play(self, names: Names, seed: int, kill: int = 0, stranger: bool = False) -> dict[str, Any]:
        self.layer.feed(seed)
        self._begin(names, stranger)
        killer = killed_meanwhile(self.forward, kill) if kill else None
        self.graph.replay()
        if killer is not None:
            killer.join()
        failures = {name: list(failure) for name, failure in self.forward.end().items()}
        assert self.graph.launches == self.recorded
        found, sent = digest_of(self.layer.results()), self.forward.sent()
        return {"event": "played", "digest": found, "failures": failures, "sent": sent}

    def _begin(self, names: Names, stranger: bool) -> None:
        requests: dict[str, Held | None] = {f"{i}": name and self.held[name] for i, name in enumerate(names)}
        if stranger:
            requests["stranger"] = dataclasses.replace(self.held[self.adapters[0]], handle=STRANGER)
        held = {one.handle: one for one in requests.values() if one is not None}
        rows = {request: Assigned(one.handle, 0) for request, one in requests.items() if one is not None}
        plan = StepPlan(self.scheduler.terms.server, rows, tuple(held.values()), holder=self.scheduler.proof)
        self.forward.receive(plan)
        self.forward.begin(list(requests), [ROWS // len(requests)] * len(requests), [0] * len(requests))

    def lose(self) -> dict[str, Any]:
        self.forward.client.give_up(ShardUnavailableError("a test says so"))
        return {"event": "lost"}

    def obey(self, do: str, **more: Any) -> dict[str, Any]:
        try:
            return getattr(self, do)(**more)
        except LoraServerError as error:
            return {"event": "failed", "code": error.code, "reason": str(error)}


def digest_by_host(server: str, names: Names, seed: int) -> str:
    """Compute the digest that `play` should find, by way of the host, over TCP."""
    forward = PlannedPass(Client(RemoteServer(server, "tcp"), HANG_SECONDS), lambda: True)
    layer = layer_of(forward)
    layer.feed(seed)
    begin(forward, names, ROWS)
    layer.run()
    assert forward.end() == {}
    forward.close()
    return digest_of(layer.results())


class EngineProcess(Spoken):
    """Such a process; each call is one command, and its answer."""

    def __init__(self, server: str, transport: str, *adapters: str) -> None:
        super().__init__("tests.support.gpu.gpu_engine", [server, transport, *adapters])

    def ask(self, do: str, **command: Any) -> dict[str, Any]:
        self.tell(do=do, **command)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        return self.event(time.monotonic() + HANG_SECONDS, "answer in time")


def main() -> None:
    logs.configure()  # stdout is for the JSON
    emulated_gpu.use()
    emulated_world.use()
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    engine = Engine(sys.argv[1], sys.argv[2], sys.argv[3:])
    for line in sys.stdin:
        say(**engine.obey(**json.loads(line)))


if __name__ == "__main__":
    main()
