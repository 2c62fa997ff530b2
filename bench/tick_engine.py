"""A serving engine without a model: each tick is one pass, with a step at every dense site, of the requests that are
ready. It schedules as vLLM's hooks do, by AdapterLeases and PlannedPass."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from client_connector.client import Client
from client_connector.remote import RemoteServer
from client_connector.serving.leases import AdapterLeases
from client_connector.serving.pace import PassPace
from client_connector.serving.plan import RETRY, Failure
from client_connector.serving.planned import PlannedPass
from client_connector.serving.request_state import Phase
from client_connector.serving.settings import Settings


class AnyPace(PassPace):
    """The pace of engines that schedule a request as soon as its adapter has a place, whatever is left to load."""

    def of(self, tokens: int) -> float | None:
        return None


@dataclass
class Generation:
    """A request: `prompt` rows in its first pass, one in each later one, `passes` in all. Times are monotonic."""

    name: str
    prompt: int = 1
    passes: int = 1 << 60
    began: float = field(default_factory=time.monotonic)
    first: float = 0.0  # when its first pass ended
    done: int = 0
    void: int = 0  # passes that were computed for nothing
    failure: Failure | None = None
    ended: threading.Event = field(default_factory=threading.Event)


class Pass(NamedTuple):
    """A pass of the engine."""

    began: float
    seconds: float
    requests: tuple[str, ...]
    failures: dict[str, Failure]


class TickEngine:
    """Makes passes in a thread of its own while `going` is set. `add` is thread-safe.

    `waits`: requests are scheduled once admitted, and steps wait for weights, as engines did before they knew what is
    loaded.
    """

    def __init__(self, address: str, timeout_seconds: float = 10.0, waits: bool = False) -> None:
        self.client = Client(RemoteServer(address, "shm"), timeout_seconds)
        self.leases = AdapterLeases(Settings(address, timeout_seconds=timeout_seconds), lambda text: [])
        self.forward = PlannedPass(self.client, lambda: True)
        if waits:
            self.leases.pace = AnyPace()
            self.forward.sites.waits_for_weights = True  # type: ignore[attr-defined]
        spec = self.client.terms.spec
        self._sites = [site for site in spec.sites() if spec.is_dense(site)]
        self._widths = {site: (spec.in_width(site), spec.out_width(site)) for site in self._sites}
        self.waiting: dict[str, Generation] = {}
        self.running: dict[str, Generation] = {}
        self.passes: list[Pass] = []
        self.stopping, self.going = threading.Event(), threading.Event()
        self.going.set()
        self._thread = threading.Thread(target=self._run, daemon=True, name="tick-engine")
        self._thread.start()

    def add(self, request: str, generation: Generation) -> Generation:
        """Take a request in, as a thread that receives requests does."""
        self.leases.hold(request, generation.name, [7] * generation.prompt)
        self.waiting[request] = generation
        return generation

    def close(self) -> None:
        """Stop, and leave the server."""
        self.stopping.set()
        self._thread.join()
        self.leases.close()
        self.forward.close()

    def _run(self) -> None:
        torch.set_num_threads(1)
        with torch.no_grad():
            while not self.stopping.is_set():
                if self.going.wait(0.01):
                    self._tick()

    def _tick(self) -> None:
        for request, failure in self.leases.failed():
            self._end(request, failure)
        for request in list(self.waiting):
            if self.leases.is_ready(request):
                self.running[request] = self.waiting.pop(request)
        self.leases.expect(list(self.waiting))
        began, batch = time.monotonic(), list(self.running.items())
        plan = self.leases.plan([request for request, _ in batch])
        if not batch:
            time.sleep(1e-3)
            return
        counts = [1 if one.done else one.prompt for _, one in batch]
        self.forward.receive(plan)
        self.forward.begin([request for request, _ in batch], counts, [one.done for _, one in batch])
        self._compute(sum(counts))
        failures = {request: Failure(RETRY, "") for request in plan.void} | self.forward.end()
        ended = time.monotonic()
        self.leases.pace.passed(sum(counts), began, ended)
        self.passes.append(Pass(began, ended - began, tuple(self.running), failures))
        for request, one in batch:
            self._settle(request, one, failures.get(request), ended)

    def _compute(self, rows: int) -> None:
        for site in self._sites:
            width, out = self._widths[site]
            step = self.forward.sites.start_dense(site, torch.ones(rows, width))
            self.forward.sites.add(step, [(torch.zeros(rows, out), 0)])

    def _settle(self, request: str, one: Generation, failure: Failure | None, now: float) -> None:
        if failure is not None:
            one.void += 1
            state = self.leases.fail_step(request, failure)
            if state is not None and state.phase is not Phase.FAILED and not state.is_ready:
                self.waiting[request] = self.running.pop(request)
            return
        one.first = one.first or now
        one.done += 1
        if one.done == one.passes:
            self._end(request, None)

    def _end(self, request: str, failure: Failure | None) -> None:
        one = self.running.pop(request, None) or self.waiting.pop(request, None)
        self.leases.release(request)
        if one is not None:
            one.failure = failure
            one.ended.set()
