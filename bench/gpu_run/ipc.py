"""Stage `ipc`: engines and a shard on one GPU; either side is killed and stopped at random moments of a step.

Asked of each: does the other side's CUDA context live, does it go on with the same answers, is it told in time?
`--device cpu --transport shm` plays the same on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bench.gpu_run import endless, stage
from bench.gpu_run.lab import LEASE_SECONDS, NAMES, START_SECONDS, Engine, Lab, open_lab, until
from bench.gpu_run.record import Record

VICTIMS, SHARD_KILLS = 4, 2
STEPS, STEP_SECONDS = 20, 30.0
RECOVERY_SECONDS = 60.0
TRANSPORT = "cuda_ipc"
SEED = 3


def end_to_end(lab: Lab, witness: Engine) -> dict[str, Any]:
    """Steps go through, and give the same answer each time."""
    witness.next("step", START_SECONDS)
    began = time.monotonic()
    witness.steps(STEPS, STEP_SECONDS)
    return {"ms_per_forward_pass": round((time.monotonic() - began) / STEPS * 1e3, 2)}


def engines_killed(lab: Lab, witness: Engine) -> dict[str, Any]:
    """SIGKILL of engines at random moments: the shard stays, the other engine notices nothing."""
    shard, chance = lab.shard_pid(), random.Random(SEED)
    victims = [lab.start() for _ in range(VICTIMS)]
    for victim in victims:
        victim.next("step", START_SECONDS)
    for victim in victims:
        victim.steps(2, STEP_SECONDS)
        time.sleep(chance.uniform(0.0, 0.05))  # not synchronisation: any moment of a step
        victim.end()
        witness.steps(3, STEP_SECONDS)
    until(lambda: lab.status().clients == 1, "the killed engines' leases end", 3 * LEASE_SECONDS + 10)
    witness.steps(3, STEP_SECONDS)
    same_shard(lab, shard)
    return {"killed": VICTIMS}


def engine_stopped(lab: Lab, witness: Engine) -> dict[str, Any]:
    """SIGSTOP of an engine for longer than its lease: its memory is taken back while it still maps it."""
    shard, victim = lab.shard_pid(), lab.start()
    victim.next("step", START_SECONDS)
    victim.send(signal.SIGSTOP)
    until(lambda: lab.status().clients == 1, "the stopped engine is cut off", 3 * LEASE_SECONDS + 10)
    witness.steps(5, STEP_SECONDS)
    victim.heard()
    victim.send(signal.SIGCONT)
    failed = rejoined(lab, victim)
    victim.right(victim.next("step", RECOVERY_SECONDS))
    witness.steps(3, STEP_SECONDS)
    same_shard(lab, shard)
    victim.end()
    return {"told": failed[0]["reason"] if failed else "between two steps: it joined anew", "context": "alive"}


def rejoined(lab: Lab, victim: Engine) -> list[dict[str, Any]]:
    """Steps that failed until it had joined anew; none where it was stopped between two. Raises for a dead context."""
    failed: list[dict[str, Any]] = []
    until(lambda: listen(victim, failed) and lab.status().clients == 2, "the stopped engine is back", RECOVERY_SECONDS)
    return failed


def listen(engine: Engine, failed: list[dict[str, Any]]) -> bool:
    """Add its failed steps; True, or RuntimeError for one that left a dead context."""
    failed.extend(event for event in engine.heard() if event["event"] == "failed")
    if any(event["context"] != "alive" for event in failed):
        raise RuntimeError(f"the engine's context: {failed}")
    return True


def shard_killed(lab: Lab, witness: Engine) -> dict[str, Any]:
    """Kill the shard, while the engine maps its memory: the engine gets an error, then answers of the next shard."""
    return [interrupted(lab, witness, signal.SIGKILL) for _ in range(SHARD_KILLS)][-1]


def shard_stopped(lab: Lab, witness: Engine) -> dict[str, Any]:
    """SIGSTOP of the shard for longer than a step may take, then SIGCONT."""
    return interrupted(lab, witness, signal.SIGSTOP)


def interrupted(lab: Lab, witness: Engine, number: signal.Signals) -> dict[str, Any]:
    """The engine's own view of a shard that goes away."""
    shard, before, failed = lab.shard_pid(), restarts(lab), list[dict[str, Any]]()
    witness.heard()
    began = time.monotonic()
    os.kill(shard, number)

    def noticed() -> bool:
        """Tell whether the engine saw the death: a step failed, or it joined the next shard between two steps."""
        return listen(witness, failed) and (bool(failed) or restarts(lab) > before)

    try:
        until(noticed, "the engine is told", endless.TIMEOUT_SECONDS + RECOVERY_SECONDS)
    finally:
        if number == signal.SIGSTOP:
            resume(shard)
    told = {"told": failed[0]["reason"], "told_after_s": round(time.monotonic() - began, 2)} if failed else {}
    lab.server.wait_ready()
    witness.right(witness.next("step", RECOVERY_SECONDS))
    witness.steps(3, STEP_SECONDS)
    if number == signal.SIGKILL and restarts(lab) != before + 1:
        raise RuntimeError(f"expected the shard's restart number {before + 1}, got {restarts(lab)}")
    return {**told, "context": "alive", "restarts": restarts(lab)}


def restarts(lab: Lab) -> int:
    """Count the shard's restarts so far."""
    return sum(int(one.restarts) for one in lab.status().shards)


def resume(pid: int) -> None:
    """SIGCONT; it may have been replaced meanwhile."""
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return


def same_shard(lab: Lab, pid: int) -> None:
    """Raises RuntimeError if the shard was restarted."""
    if (now := lab.shard_pid()) != pid:
        raise RuntimeError(f"the shard was restarted: it was process {pid}, and is {now}")


SCENARIOS: dict[str, Callable[[Lab, Engine], dict[str, Any]]] = {
    scenario.__name__: scenario
    for scenario in (end_to_end, engines_killed, engine_stopped, shard_killed, shard_stopped)
}


def check(record: Record, arguments: argparse.Namespace) -> None:
    """Check that an engine accepts its flags; in a rehearsal, run some scenarios on this CPU."""
    endless.parse(["model", "127.0.0.1:1", *NAMES, "--device", "cuda", "--transport", arguments.transport])
    if arguments.rehearse and arguments.transport == TRANSPORT:
        stage.play(work, record, arguments, device="cpu", transport="shm", scenarios="end_to_end,shard_killed")


def work(record: Record, arguments: argparse.Namespace) -> bool:
    """Every scenario, each with an engine that has been well so far; whether all went as they should."""
    good = True
    with (
        tempfile.TemporaryDirectory(prefix="lora-ipc-") as scratch,
        open_lab(record, Path(scratch), arguments.device, arguments.transport) as lab,
    ):
        witness = lab.start()
        for name in arguments.scenarios.split(","):
            if not record.attempt("scenario", name, partial(SCENARIOS[name], lab, witness)):
                good, witness = False, replaced(lab)
        print(lab.server.tail())
    return good


def replaced(lab: Lab) -> Engine:
    """A new witness, for the scenarios after one that went wrong; the others end."""
    for engine in lab.engines:
        engine.end()
    lab.server.wait_ready()
    lab.engines.append(lab.start())
    lab.engines[-1].next("step", START_SECONDS)
    return lab.engines[-1]


if __name__ == "__main__":
    flags = stage.parser(__doc__)
    flags.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    flags.add_argument("--transport", default=TRANSPORT)
    flags.add_argument("--scenarios", default=",".join(SCENARIOS))
    given = flags.parse_args()
    stage.main(work, given, modules=("cupy",), check=check, gpu=given.device == "cuda")
