"""One engine of `bench.control_rate`: request life cycles as fast as they go; each line on stdin is a Job."""

from __future__ import annotations

import random
import sys
import threading
import time
from concurrent.futures import Future

import msgspec

from client_connector.holds import QueuedAnswer
from client_connector.remote import RemoteServer, RemoteSession
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire.terms import Held

DRAWN = 1 << 16  # names that are drawn before anything is measured


class Job(msgspec.Struct):
    """`requests` at a time, each of which holds an adapter and releases it; `single`: by two calls of its own."""

    single: bool
    requests: int
    seconds: float


class Found(msgspec.Struct):
    """`waited_ms`: of each request, from its name to its hold."""

    seconds: float
    waited_ms: list[float]


class Requests:
    """The life cycles of one job. Popularity is Zipf's: the n-th adapter is asked for 1/n as often as the first."""

    def __init__(self, session: RemoteSession, adapters: int, seed: int) -> None:
        dice = random.Random(seed)
        weights = [1.0 / rank for rank in range(1, adapters + 1)]
        self._names = [f"a{number:05}" for number in dice.choices(range(adapters), weights, k=DRAWN)]
        self._session, self._next = session, 0
        self._lock = threading.Lock()

    def run(self, job: Job) -> Found:
        """Run a job, and wait until its last request has ended."""
        self._until, self._waited = time.monotonic() + job.seconds, list[float]()
        began = time.monotonic()
        if job.single:
            threads = [threading.Thread(target=self._one_by_one) for _ in range(job.requests)]
            for one in threads:
                one.start()
            for one in threads:
                one.join()
        else:
            self._open, self._ended = job.requests, threading.Event()
            for _ in range(job.requests):
                self._ask()
            self._ended.wait()
        return Found(time.monotonic() - began, self._waited)

    def _draw(self) -> str:
        self._next += 1
        return self._names[self._next % DRAWN]

    def _one_by_one(self) -> None:
        calls = self._session.calls
        while (began := time.monotonic()) < self._until:
            request = pb.AcquireRequest(names=[self._draw()], ticket=self._session.ticket())
            held = calls.call(calls.clients.Acquire, request).adapters
            self._waited.append(1e3 * (time.monotonic() - began))
            calls.call(calls.clients.Release, pb.ReleaseRequest(handles=[one.handle for one in held]))

    def _ask(self) -> None:
        began = time.monotonic()

        def granted(answer: Future[list[Held] | QueuedAnswer]) -> None:
            held = answer.result()
            assert isinstance(held, list), "the pool has room for all adapters"
            self._waited.append(1e3 * (time.monotonic() - began))
            self._session.release([one.handle for one in held], waits=False)
            if time.monotonic() < self._until:
                self._ask()
            else:
                self._end()

        self._session.ask_soon(self._session.ticket(), [self._draw()]).add_done_callback(granted)

    def _end(self) -> None:
        with self._lock:
            self._open -= 1
            if not self._open:
                self._ended.set()


def main() -> None:
    address, adapters, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    session = RemoteServer(address, links=False).join()
    requests = Requests(session, adapters, seed)
    print("joined", flush=True)
    for line in sys.stdin:
        print(msgspec.json.encode(requests.run(msgspec.json.decode(line, type=Job))).decode(), flush=True)
    session.leave()


if __name__ == "__main__":
    main()
