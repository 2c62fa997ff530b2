"""Engines of `bench.control_scale` and `bench.control_rate`, many in a process: `python -m bench.control_engines JOB`.

Each joins with a lease of its own, and asks for adapters by Zipf's law: the n-th 1/n as often as the first. For each
Load on stdin all hold and release adapters for its seconds; then the process prints one JSON object: the `seconds` that
it took, and of each request the adapter, when it was named (time.monotonic()), and the milliseconds from then to its
hold, in `held`, or to the refusal or the time-out, in `failed`.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

import msgspec

from client_connector.holds import QueuedAnswer
from client_connector.remote import RemoteServer
from lora_server.errors import LoraServerError
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire.terms import Held

PATIENCE = 600.0
Asked = tuple[int, float, float]  # adapter, when, milliseconds


class Job(msgspec.Struct):
    """`drawn`: so many adapters are drawn before anything is measured, and then taken in turn."""

    address: str
    adapters: int
    seed: int
    engines: int = 1
    drawn: int = 256


class Load(msgspec.Struct):
    """What each engine does for `seconds`.

    With a `pause`: requests one after the other, by a Poisson process with that mean of seconds between two, as
    serving engines make them (Hold). Without: `requests` at a time, as fast as they go; `single`: each by two calls of
    its own (Acquire, Release). `among`: only so many adapters are drawn, the most popular ones.
    """

    seconds: float
    among: int = sys.maxsize
    pause: float = 0.0
    requests: int = 1
    single: bool = False


class Engine:
    """A client."""

    def __init__(self, job: Job, number: int) -> None:
        self._session = RemoteServer(job.address, links=False).join(PATIENCE)
        self._dice, weights = random.Random(job.seed + number), [1.0 / rank for rank in range(1, job.adapters + 1)]
        self._drawn = itertools.cycle(self._dice.choices(range(job.adapters), weights, k=job.drawn))
        self._lock = threading.Lock()

    def work(self, load: Load, waited: dict[str, list[Asked]]) -> None:
        """Carry out a load; append each request to one list of `waited`."""
        self._until, self._waited = time.monotonic() + load.seconds, waited
        self._among = load.among
        if load.pause:
            self._with_pauses(load.pause)
        elif load.single:
            run_all([self._one_by_one] * load.requests)
        else:
            self._open, self._ended = load.requests, threading.Event()
            for _ in range(load.requests):
                self._ask()
            self._ended.wait()

    def _draw(self) -> int:
        """Return the next adapter that the load draws."""
        while (one := next(self._drawn)) >= self._among:
            pass
        return one

    def _note(self, adapter: int, began: float, kind: str = "held") -> None:
        self._waited[kind].append((adapter, began, 1e3 * (time.monotonic() - began)))

    def _with_pauses(self, pause: float) -> None:
        while (wait := self._dice.expovariate(1 / pause)) < self._until - time.monotonic():
            time.sleep(wait)
            began, adapter, kind = time.monotonic(), self._draw(), "held"
            try:
                self._hold(adapter)
            except LoraServerError as error:
                kind = "failed"
                print(f"failed: {error}", file=sys.stderr, flush=True)
            self._note(adapter, began, kind)

    def _hold(self, adapter: int) -> None:
        """Hold an adapter, and release it."""
        ticket, names = self._session.ticket(), [name_of(adapter)]
        while not isinstance(answer := self._session.ask(ticket, names, PATIENCE), list):
            self._session.wait([ticket], PATIENCE)
        self._session.release([one.handle for one in answer], waits=False)

    def _one_by_one(self) -> None:
        calls = self._session.calls
        while (began := time.monotonic()) < self._until:
            adapter = self._draw()
            request = pb.AcquireRequest(names=[name_of(adapter)], ticket=self._session.ticket())
            held = calls.call(calls.clients.Acquire, request).adapters
            self._note(adapter, began)
            calls.call(calls.clients.Release, pb.ReleaseRequest(handles=[one.handle for one in held]))

    def _ask(self) -> None:
        """Make a request, and the next one once it is answered, until the time is over."""
        began, adapter = time.monotonic(), self._draw()

        def granted(answer: Future[list[Held] | QueuedAnswer]) -> None:
            held = answer.result()
            assert isinstance(held, list), "the pool has room for all adapters"
            self._note(adapter, began)
            self._session.release([one.handle for one in held], waits=False)
            if time.monotonic() < self._until:
                self._ask()
                return
            with self._lock:
                self._open -= 1
                if not self._open:
                    self._ended.set()

        self._session.ask_soon(self._session.ticket(), [name_of(adapter)]).add_done_callback(granted)


def name_of(adapter: int) -> str:
    """Return the name of the n-th adapter, as `bench.harness.make_many` names it."""
    return f"a{adapter:05}"


def run_all(calls: list[Callable[[], object]]) -> None:
    """Run calls in a thread each, to their end."""
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> None:
    """Entry point of the process."""
    job = msgspec.json.decode(sys.argv[1], type=Job)
    engines = [Engine(job, number) for number in range(job.engines)]
    print("joined", flush=True)
    for line in sys.stdin:
        load, waited = msgspec.json.decode(line, type=Load), {"held": list[Asked](), "failed": list[Asked]()}
        began = time.monotonic()
        run_all([partial(engine.work, load, waited) for engine in engines])
        print(json.dumps({"seconds": time.monotonic() - began, **waited}), flush=True)


if __name__ == "__main__":
    main()
