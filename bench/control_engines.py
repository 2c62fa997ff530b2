"""Engines of `bench.control_scale`, many in a process: `python -m bench.control_engines JOB`.

Each joins with a lease of its own. For each line on stdin, each acquires and releases adapters for the line's
`seconds`, as serving engines do (Hold), by a Poisson process with a mean of `pause` seconds between two; then the
process prints the milliseconds of all acquires as one JSON object: `warm` are those that were answered at once, `cold`
those that were queued until every shard had measured the adapter, `failed` those that the server refused, or did not
answer.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time

from client_connector.remote import RemoteServer
from lora_server.errors import LoraServerError

PATIENCE = 600.0


class Engine:
    """A client that draws adapters by Zipf's law: the n-th is asked for 1/n as often as the first."""

    def __init__(self, address: str, adapters: int, seed: int) -> None:
        self._session = RemoteServer(address, links=False).join(PATIENCE)
        self._dice, self._drawn = random.Random(seed), 0
        weights = [1.0 / rank for rank in range(1, adapters + 1)]
        self._names = [f"a{number:05}" for number in self._dice.choices(range(adapters), weights, k=256)]

    def work(self, pause: float, seconds: float, waited: dict[str, list[float]]) -> None:
        """Acquire and release for `seconds`; append the milliseconds of each acquire to one list of `waited`."""
        until = time.monotonic() + seconds
        while (wait := self._dice.expovariate(1 / pause)) < until - time.monotonic():
            time.sleep(wait)
            began = time.monotonic()
            try:
                kind = self._acquire()
            except LoraServerError as error:
                kind = "failed"
                print(f"failed: {error}", file=sys.stderr, flush=True)
            waited[kind].append(1e3 * (time.monotonic() - began))

    def _acquire(self) -> str:
        """Hold the next adapter, and release it; return the kind of the answer."""
        ticket, names = self._session.ticket(), [self._names[self._drawn % len(self._names)]]
        self._drawn += 1
        answer, kind = self._session.ask(ticket, names, PATIENCE), "warm"
        while not isinstance(answer, list):
            self._session.wait([ticket], PATIENCE)
            answer, kind = self._session.ask(ticket, names, PATIENCE), "cold"
        self._session.release([one.handle for one in answer], waits=False)
        return kind


def main() -> None:
    """Entry point of the process."""
    job = json.loads(sys.argv[1])
    engines = [Engine(job["address"], job["adapters"], job["seed"] + one) for one in range(job["engines"])]
    print("joined", flush=True)
    for line in sys.stdin:
        asked, waited = json.loads(line), {kind: list[float]() for kind in ("warm", "cold", "failed")}
        args = asked["pause"], asked["seconds"], waited
        threads = [threading.Thread(target=one.work, args=args, daemon=True) for one in engines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(json.dumps(waited), flush=True)


if __name__ == "__main__":
    main()
