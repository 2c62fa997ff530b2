"""Engines of `bench.control_scale`, many in a process: `python -m bench.control_engines JOB`.

Each joins with a lease of its own. For each line on stdin, each acquires and releases adapters for the line's
`seconds`, with `pause` seconds between two on average, as serving engines do (Hold); then the process prints the
milliseconds of all acquires as one JSON object: `warm` are those that were answered at once, `cold` those that were
queued until every shard had measured the adapter.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time

from client_connector.remote import RemoteServer

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
        time.sleep(self._dice.uniform(0, min(2 * pause, seconds)))
        while (began := time.monotonic()) < until:
            ticket, names = self._session.ticket(), [self._names[self._drawn % len(self._names)]]
            answer, kind = self._session.ask(ticket, names, PATIENCE), "warm"
            while not isinstance(answer, list):
                self._session.wait([ticket], PATIENCE)
                answer, kind = self._session.ask(ticket, names, PATIENCE), "cold"
            waited[kind].append(1e3 * (time.monotonic() - began))
            self._session.release([one.handle for one in answer], waits=False)
            self._drawn += 1
            time.sleep(self._dice.uniform(0, 2 * pause))


def main() -> None:
    """Entry point of the process."""
    job = json.loads(sys.argv[1])
    engines = [Engine(job["address"], job["adapters"], job["seed"] + one) for one in range(job["engines"])]
    print("joined", flush=True)
    for line in sys.stdin:
        asked, waited = json.loads(line), {"warm": list[float](), "cold": list[float]()}
        args = asked["pause"], asked["seconds"], waited
        threads = [threading.Thread(target=one.work, args=args, daemon=True) for one in engines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(json.dumps(waited), flush=True)


if __name__ == "__main__":
    main()
