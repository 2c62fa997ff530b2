"""A stand-in for bench.gpu_run.nvshmem_pe without a GPU: puts are files beside MODULE; a file `lost` stops them."""

from __future__ import annotations

import json
import sys
import time

from bench.gpu_run.child import say
from bench.gpu_run.nvshmem_pe import parse

LIMIT_SECONDS = 0.3


def wait(folder, rank, turn):
    deadline = time.monotonic() + LIMIT_SECONDS
    while not (folder / f"{rank}-{turn}").exists():
        if time.monotonic() > deadline:
            return say("waited", took_ns=-1, right=False)
        time.sleep(0.01)
    return say("waited", took_ns=1000, right=True)


def main():
    given = parse()
    folder = given.module.parent
    if given.rank == 0:
        say("uid", uid="ab")
    assert json.loads(sys.stdin.readline()) == {"uid": "ab"}
    say("module", status=0, pe=given.rank, pes=given.world)
    say("ready", peer_is_mapped=True)
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "put":
            if not (folder / "lost").exists():
                (folder / f"{(given.rank + 1) % given.world}-{command['turn']}").touch()
            say("put")
        elif command["do"] == "wait":
            wait(folder, given.rank, command["turn"])
        else:
            say("context", state="alive")


if __name__ == "__main__":
    main()
