"""Shards of `bench.control_scale` without weights: `python -m bench.control_fakes JOB`.

Each has a stream to the controller, as a shard's process has, and reports its counters as often. It measures an adapter
as soon as it is told of it, and has loaded it as soon as the controller says so, or a client holds it.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
from pathlib import Path

from bench.control_scale import TOKEN
from lora_server import spec
from lora_server.config import ServeConfig
from lora_server.control.members.agreement import Agreement
from lora_server.daemon.stream import ControllerStream, Done
from lora_server.placement import Layout, Placement
from lora_server.timings import DEFAULTS
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire.credentials import Credentials

LOWEST_PRIORITY = 19
BYTES, POOL = 1 << 12, 1 << 40


class FakeShard:
    """A shard that is a stream to the controller and nothing else."""

    def __init__(self, address: str, shard: int, placement: Placement, digest: str) -> None:
        self._shard, self._digest = shard, digest
        self._layers, self._loaded = len(placement.layers(shard)), set[int]()
        self.stream = ControllerStream(
            address, Credentials(node_secret=TOKEN), self._registration, self._execute, self._has
        )

    def _registration(self) -> pb.Registration:
        return pb.Registration(
            shard=self._shard,
            node=self._shard,
            pid=os.getpid(),
            agreement_digest=self._digest,
            endpoint=pb.Endpoint(),
            pool_bytes=POOL,
        )

    def _execute(self, command: pb.ShardCommand, done: Done) -> None:
        kind = command.WhichOneof("command")
        moved = [command.load.handle] if kind == "load" else []
        if kind in ("bring", "uses"):
            moved = [command.bring] if kind == "bring" else [*command.uses.active.more]
            moved = [handle for handle in moved if handle not in self._loaded]
            self._loaded.update(moved)
        if moved:
            rows = [pb.Residency(handle=one, layers=self._has(one), bytes=BYTES, measured=True) for one in moved]
            self.stream.report(pb.ShardReport(residencies=pb.Residencies(moved=rows)))
        done(None)

    def _has(self, handle: int) -> int:
        return self._layers if handle in self._loaded else 0

    def beat(self) -> None:
        """Report its counters, as a shard does once a second."""
        self.stream.report(pb.ShardReport(stats=pb.ShardStats(device="none", free_bytes=POOL, total_bytes=POOL)))


def main() -> None:
    """Entry point of the process."""
    os.nice(LOWEST_PRIORITY)  # engines share its cores; real shards have their own
    gc.disable()  # a shard's process has one shard's records to walk, not 64 of them
    job = json.loads(sys.argv[1])
    model, layout = spec.load(Path(job["base"])), Layout.parse(job["layout"])
    config = ServeConfig(base_model=job["base"], layout=job["layout"])
    digest, placement, never = Agreement.of(config, model).digest(), Placement(model, layout), threading.Event()
    shards = [FakeShard(job["address"], shard, placement, digest) for shard in job["shards"]]
    for one in shards:
        threading.Thread(target=one.stream.run, args=(never,), daemon=True).start()
    while not never.wait(DEFAULTS.shard_report):
        for one in shards:
            one.beat()


if __name__ == "__main__":
    main()
