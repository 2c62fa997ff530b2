"""An engine's scheduler without a model, for bench.admission: it holds adapters for requests and releases them in time.

python -m bench.admission_client JOB        one client process; JOB is a file of JSON, see Job

It holds adapters as vLLM's connector does (client_connector/serving/leases.py): `hold` when a request arrives, a look
at every step at which requests were admitted meanwhile, `release` when the request has had its time. It prints `ready`;
reads from standard input the moment of time 0 (by time.monotonic(), which all processes of a host share); prints
`asked` after the last call; and when standard input ends, even if requests still wait, it prints a list of Seen.
"""

from __future__ import annotations

import heapq
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from client_connector.serving.leases import AdapterLeases
from client_connector.serving.request_state import Phase
from client_connector.serving.settings import Settings

STEP_SECONDS, MOST_SECONDS = 0.005, 1.0  # between two looks: while a request waits, and otherwise
ANSWER_SECONDS = 2e-4  # between two looks for the server's first answer


class Call(msgspec.Struct):
    """A request: the time `at` which it arrives and the `seconds` for which it holds its adapter."""

    index: int
    at: float
    name: str
    seconds: float


class Job(msgspec.Struct):
    """The calls of one client, in the order of time."""

    server: str
    calls: list[Call]


class Seen(msgspec.Struct):
    """The outcome of a request. Times count from time 0, as in Call; None if that never happened."""

    index: int
    asked: float
    immediate: bool = False
    admitted: float | None = None
    released: float | None = None
    error: str = ""


def work(
    job: Job, leases: AdapterLeases, zero: float, asked: Callable[[], object], enough: threading.Event
) -> list[Seen]:
    """Make all calls in real time, and hold and release their adapters until `enough` is set. Returns the outcomes."""
    seen: dict[str, Seen] = {}
    ends: list[tuple[float, str]] = []
    waiting: dict[str, Call] = {}

    def now() -> float:
        return time.monotonic() - zero

    def begin(key: str, call: Call) -> None:
        seen[key].admitted = began = now()
        heapq.heappush(ends, (began + call.seconds, key))

    def ask(call: Call) -> None:
        key = str(call.index)
        seen[key] = Seen(call.index, now())
        state = leases.hold(key, call.name, None)
        while state.phase is Phase.ASKING:
            time.sleep(ANSWER_SECONDS)
            state = leases.state(key) or state
        seen[key].immediate = state.phase in (Phase.HELD, Phase.LOADING)  # it has a place
        if state.failure is not None:
            seen[key].error = state.failure.message
        elif state.waits:
            waiting[key] = call
        else:
            begin(key, call)

    coming = deque(job.calls)
    while not enough.is_set():
        while ends and ends[0][0] <= now():
            _, key = heapq.heappop(ends)
            leases.release(key)
            seen[key].released = now()
        for key in list(waiting):
            state = leases.state(key)
            if state is not None and state.failure is not None:
                seen[key].error = state.failure.message
                del waiting[key]
            elif leases.is_ready(key):
                begin(key, waiting.pop(key))
        if coming and coming[0].at <= now():
            ask(coming.popleft())
            if not coming:
                asked()
        dues = [coming[0].at] if coming else []
        dues += [ends[0][0]] if ends else []
        dues += [now() + (STEP_SECONDS if waiting or not coming else MOST_SECONDS)]
        time.sleep(max(0.0, min(dues) - now()))
    return list(seen.values())


def main() -> None:
    job = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Job)
    leases = AdapterLeases(Settings(job.server), lambda text: ())
    try:
        print("ready", flush=True)
        zero, enough = float(sys.stdin.readline()), threading.Event()
        threading.Thread(target=lambda: (sys.stdin.read(), enough.set()), daemon=True).start()
        seen = work(job, leases, zero, lambda: print("asked", flush=True), enough)
        print(msgspec.json.encode(seen).decode(), flush=True)
    finally:
        leases.close()


if __name__ == "__main__":
    main()
