"""Stage `nvshmem`: 2 and 4 PEs on one GPU: init, module init, put and signal round the ring, then one PE is killed.

Several PEs of one GPU take turns on it: this shows whether it works, not how fast. Collectives are not used.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bench.gpu_run import nvshmem_pe, stage
from bench.gpu_run.record import Record
from bench.gpu_run.spoken import Spoken
from lora_server.device.nvshmem import nvshmem_build

SOURCE = Path(__file__).with_name("nvshmem.cu")
WORLDS = (2, 4)
TURNS = 3
START_SECONDS, ANSWER_SECONDS = 45.0, 10.0
ENVIRONMENT = {
    "NVSHMEM_REMOTE_TRANSPORT": "none",
    "NVSHMEM_DISABLE_NVLS": "1",
    "NVSHMEM_DISABLE_NCCL": "1",
    "NVSHMEM_SYMMETRIC_SIZE": str(64 << 20),
    "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "lo",
}


class World:
    """PEs by rank; each call asks all that live, and then hears all."""

    def __init__(self, size: int, module: Path, program: str = "bench.gpu_run.nvshmem_pe") -> None:
        environment = {**os.environ, **ENVIRONMENT}
        arguments = [[str(rank), str(size), str(module)] for rank in range(size)]
        self.size = size
        self.pes = [Spoken(program, one, environment) for one in arguments]

    def start(self) -> dict[str, Any]:
        """Start all PEs and wait until they are ready."""
        uid = self.pes[0].next("uid", START_SECONDS)["uid"]
        for pe in self.pes:
            pe.tell(uid=uid)
        modules = [pe.next("module", START_SECONDS) for pe in self.pes]
        ready = [pe.next("ready", START_SECONDS) for pe in self.pes]
        if [one["pe"] for one in modules] != list(range(self.size)) or any(one["status"] for one in modules):
            raise RuntimeError(f"module init: {modules}")
        return {"peers_are_mapped": all(one["peer_is_mapped"] for one in ready)}

    def ask(self, event: str, ranks: range, **command: Any) -> list[dict[str, Any]]:
        """The answers of these ranks, in order; raises TimeoutError or RuntimeError for one that gives none."""
        for rank in ranks:
            self.pes[rank].tell(**command)
        return [self.pes[rank].answer(event, ANSWER_SECONDS) for rank in ranks]

    def end(self) -> None:
        """End all PEs."""
        for pe in self.pes:
            pe.end()


def ring(world: World) -> dict[str, Any]:
    """Every PE puts to the next one, several times; all bytes and signals arrive."""
    took = []
    for turn in range(1, TURNS + 1):
        world.ask("put", range(world.size), do="put", turn=turn)
        waited = world.ask("waited", range(world.size), do="wait", turn=turn)
        wrong = [one for one in waited if one["took_ns"] < 0 or not one["right"]]
        if wrong:
            raise RuntimeError(f"turn {turn}: {wrong}")
        took.append(max(one["took_ns"] for one in waited))
    return {"turns": TURNS, "longest_wait_us": max(took) / 1e3}


def one_killed(world: World) -> dict[str, Any]:
    """Kill the last PE: the PE that waits for it gives up in time, and the contexts of all others stay alive."""
    world.pes[-1].end()
    alive, turn = range(world.size - 1), TURNS + 1
    puts = world.ask("put", alive, do="put", turn=turn)
    waited = world.ask("waited", alive, do="wait", turn=turn)
    if waited[0]["took_ns"] != -1:
        raise RuntimeError(f"PE 0 heard of a PE that is dead: {waited[0]}")
    wrong = [one for one in waited[1:] if one["took_ns"] < 0 or not one["right"]]
    states = [one["state"] for one in world.ask("context", alive, do="context")]
    if wrong or set(states) != {"alive"}:
        raise RuntimeError(f"survivors: {wrong}, contexts {states}")
    return {"puts_returned": len(puts), "wait_gave_up": True, "contexts": states}


STEPS: dict[str, Callable[[World], dict[str, Any]]] = {  # each needs those before it
    "init, module init": World.start,
    "put and signal": ring,
    "one killed": one_killed,
}


def check(record: Record, _: argparse.Namespace) -> None:
    """Check that PEs accept their flags and the device code exists; with a compiler, also that it compiles."""
    nvshmem_pe.parse(["0", "2", "module"])
    SOURCE.read_text()
    missing = nvshmem_build.missing()
    if missing:
        record.add("absent", what=missing)
    else:
        record.add("built", bytes=len(nvshmem_build.build(SOURCE.read_text(), "sm_90")))


def work(record: Record, _: argparse.Namespace) -> bool:
    """Both worlds; whether everything went as it should."""
    import torch

    major, minor = torch.cuda.get_device_capability(0)
    good = True
    with tempfile.TemporaryDirectory(prefix="lora-nvshmem-") as scratch:
        module = Path(scratch) / "module.cubin"
        began = time.monotonic()
        module.write_bytes(nvshmem_build.build(SOURCE.read_text(), f"sm_{major}{minor}"))
        record.add("built", bytes=module.stat().st_size, seconds=round(time.monotonic() - began, 1))
        for size in WORLDS:
            good = play(record, World(size, module)) and good
    return good


def play(record: Record, world: World) -> bool:
    """Run the steps up to the first that fails, then end the PEs. Returns whether all passed."""
    try:
        return all(record.attempt("check", name, partial(step, world), pes=world.size) for name, step in STEPS.items())
    finally:
        world.end()


if __name__ == "__main__":
    stage.main(work, stage.parser(__doc__).parse_args(), modules=("cupy", "nvshmem", "cuda.bindings"), check=check)
