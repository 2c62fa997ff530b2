"""Engines of `bench.control_scale` and `bench.control_rate`, many in a process: `python -m bench.control_engines JOB`.

Each joins with a lease of its own, and asks for adapters by Zipf's law: the n-th 1/n as often as the first. For each
Load on stdin all hold and release adapters for its seconds; then the process prints one JSON object: the `seconds` that
it took, and the milliseconds from each request's name to its hold. `warm` are those that were answered at once, `cold`
those that were queued until every shard had measured the adapter, `failed` those that the server refused, or did not
answer.
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
KINDS = ("warm", "cold", "failed")  # of answers


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

    def work(self, load: Load, waited: dict[str, list[float]]) -> None:
        """Carry out a load; append the milliseconds of each request to one list of `waited`."""
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

    def _name(self) -> str:
        """Return the next adapter that the load draws."""
        while (one := next(self._drawn)) >= self._among:
            pass
        return f"a{one:05}"

    def _note(self, kind: str, began: float) -> None:
        self._waited[kind].append(1e3 * (time.monotonic() - began))

    def _with_pauses(self, pause: float) -> None:
        while (wait := self._dice.expovariate(1 / pause)) < self._until - time.monotonic():
            time.sleep(wait)
            began = time.monotonic()
            try:
                kind = self._hold()
            except LoraServerError as error:
                kind = "failed"
                print(f"failed: {error}", file=sys.stderr, flush=True)
            self._note(kind, began)

    def _hold(self) -> str:
        """Hold the next adapter, and release it; return the kind of the answer."""
        ticket, names = self._session.ticket(), [self._name()]
        answer, kind = self._session.ask(ticket, names, PATIENCE), "warm"
        while not isinstance(answer, list):
            self._session.wait([ticket], PATIENCE)
            answer, kind = self._session.ask(ticket, names, PATIENCE), "cold"
        self._session.release([one.handle for one in answer], waits=False)
        return kind

    def _one_by_one(self) -> None:
        calls = self._session.calls
        while (began := time.monotonic()) < self._until:
            request = pb.AcquireRequest(names=[self._name()], ticket=self._session.ticket())
            held = calls.call(calls.clients.Acquire, request).adapters
            self._note("warm", began)
            calls.call(calls.clients.Release, pb.ReleaseRequest(handles=[one.handle for one in held]))

    def _ask(self) -> None:
        """Make a request, and the next one once it is answered, until the time is over."""
        began = time.monotonic()

        def granted(answer: Future[list[Held] | QueuedAnswer]) -> None:
            held = answer.result()
            assert isinstance(held, list), "the pool has room for all adapters"
            self._note("warm", began)
            self._session.release([one.handle for one in held], waits=False)
            if time.monotonic() < self._until:
                self._ask()
                return
            with self._lock:
                self._open -= 1
                if not self._open:
                    self._ended.set()

        self._session.ask_soon(self._session.ticket(), [self._name()]).add_done_callback(granted)


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
        load, waited = (
            msgspec.json.decode(line, type=Load),
            {kind: list[float]() for kind in KINDS},
        )
        began = time.monotonic()
        run_all([partial(engine.work, load, waited) for engine in engines])
        print(json.dumps({"seconds": time.monotonic() - began, **waited}), flush=True)


if __name__ == "__main__":
    main()
