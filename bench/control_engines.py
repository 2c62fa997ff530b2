"""Engines of `bench.control_scale`, many in a process: `python -m bench.control_engines JOB`.

Each joins with a lease of its own. After a line on stdin each acquires and releases adapters now and then for the job's
`seconds`, as serving engines do (Hold); then the process prints the milliseconds of all acquires as one JSON list.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time

from client_connector.remote import RemoteServer, RemoteSession

PAUSE_SECONDS = 1.0  # between two requests of an engine, on average
PATIENCE = 600.0


def work(session: RemoteSession, adapters: int, seconds: float, seed: int, waited: list[float]) -> None:
    """Acquire and release adapters for `seconds`; append the milliseconds of each acquire to `waited`."""
    dice, until = random.Random(seed), time.monotonic() + seconds
    weights = [1.0 / rank for rank in range(1, adapters + 1)]
    names = [f"a{number:05}" for number in dice.choices(range(adapters), weights, k=64)]
    time.sleep(dice.uniform(0, PAUSE_SECONDS))
    while (began := time.monotonic()) < until:
        held = session.ask_soon(session.ticket(), [names[len(waited) % len(names)]]).result(PATIENCE)
        assert isinstance(held, list), "the pools have room for all adapters"
        waited.append(1e3 * (time.monotonic() - began))
        session.release([one.handle for one in held], waits=False)
        time.sleep(dice.uniform(0, 2 * PAUSE_SECONDS))


def main() -> None:
    """Entry point of the process."""
    job = json.loads(sys.argv[1])
    sessions = [RemoteServer(job["address"], links=False).join(PATIENCE) for _ in range(job["engines"])]
    print("joined", flush=True)
    sys.stdin.readline()
    waited: list[float] = []
    threads = [
        threading.Thread(target=work, args=(session, job["adapters"], job["seconds"], seed, waited))
        for seed, session in enumerate(sessions)
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    print(json.dumps(waited), flush=True)


if __name__ == "__main__":
    main()
