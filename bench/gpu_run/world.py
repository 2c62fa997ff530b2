"""Stage `world`: all of the backend `nvshmem`: a server and engines in NVSHMEM's world, as PEs of one GPU.

gathered        two engines join, and the world is made
answers         greedy tokens: both engines', and those of a third over TCP; logits as near to PEFT's as `engine` asks
timed           a step by Link, and by kernels; a push beside a raw put of its bytes
passes          a serving engine's, as launches in a CUDA graph: the bits that a host gets over TCP
engine_killed   the other goes on with the same tokens
shard_killed    the engine is told; the next world is gathered with new engines, and has the same tokens

Every wait has a deadline of its own, and earlier findings are on disk by then. PEs of one GPU take turns on it, so this
stage shows whether answers are right; its times are those of a shared GPU.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from bench.gpu_run import stage, world_engine
from bench.gpu_run.engine import RATIO, SLACK, equal, generate
from bench.gpu_run.lab import LEASE_SECONDS, Lab, make_files, record_starts, until
from bench.gpu_run.nvshmem import ENVIRONMENT
from bench.gpu_run.record import Record
from bench.gpu_run.spoken import Spoken
from lora_server.demo import tiny
from lora_server.demo.engine import load_model
from lora_server.demo.launch import launch
from lora_server.device.nvshmem import nvshmem_build
from lora_server.device.protocol import needs

ENGINES = 2
START_SECONDS = 75.0  # of a process, with its kernels compiled and its world made
ANSWER_SECONDS = 30.0
TOLD_SECONDS = 30.0  # from a shard's death to the engine's error
WORLD = {name: value for name, value in ENVIRONMENT.items() if name != "NVSHMEM_SYMMETRIC_SIZE"}


class Engine(Spoken):
    """An engine process; each call is one command, and its answer."""

    def tokens(self, seconds: float = ANSWER_SECONDS) -> torch.Tensor:
        """Generate the batch and return its tokens."""
        return torch.tensor(self.ask("generated", seconds, do="generate")["tokens"])


class World:
    """A server, and the engines of its world."""

    def __init__(self, lab: Lab, base: Path, adapters: Path, given: argparse.Namespace) -> None:
        self.lab, self.base, self.adapters, self.given = lab, base, adapters, given
        self.engines: list[Engine] = []
        self.expected: torch.Tensor | None = None  # tokens

    def engine(self, transport: str = "nvshmem") -> Engine:
        """Started, and told nothing."""
        given = self.given
        flags = ["--device", given.device, "--transport", transport, "--new-tokens", str(given.new_tokens)]
        self.engines.append(Engine(given.engine, [str(self.base), self.lab.server.address, *flags]))
        return self.engines[-1]

    def gathered(self) -> dict[str, Any]:
        """Engines join, all together, and the server is ready."""
        began = time.monotonic()
        until(lambda: "1 of 1 shards and 0 of" in self.lab.server.get("/readyz")[1], "its shard is here", START_SECONDS)
        for new in [self.engine() for _ in range(ENGINES)]:
            new.tell(do="join")
        for new in self.engines[-ENGINES:]:
            new.answer("joined", START_SECONDS)
        self.lab.server.wait_ready(ANSWER_SECONDS)
        return {"seconds": round(time.monotonic() - began, 1)}

    def answers(self) -> dict[str, Any]:
        """Both engines' are TCP's, token by token, and their logits are near PEFT's."""
        asked = [engine.ask("generated", START_SECONDS, do="generate") for engine in self.engines]
        beside = self.engine("tcp")
        beside.ask("joined", START_SECONDS, do="join")
        asked.append(beside.ask("generated", START_SECONDS, do="generate"))
        beside.end()
        self.engines.remove(beside)
        tokens = [torch.tensor(one["tokens"]) for one in asked]
        self.expected = tokens[0]
        found = judged(self, asked[0]) | {"seconds": [one["seconds"] for one in asked], "tokens": tokens[0].numel()}
        counts = [equal(one, tokens[-1]) for one in tokens[:-1]]
        if counts != [tokens[0].numel()] * ENGINES:
            raise RuntimeError(f"tokens equal to those over TCP: {counts} of {tokens[0].numel()}; {found}")
        return found

    def timed(self) -> dict[str, Any]:
        """Time steps in one of the engines; it leaves the world for that and joins again."""
        first, given = self.engines[0], self.given
        first.ask("left", ANSWER_SECONDS, do="leave")
        found = [
            first.ask("measured", START_SECONDS, do="measure", rows=int(rows), rounds=given.rounds)["found"]
            for rows in given.rows.split(",")
        ]
        first.ask("joined", ANSWER_SECONDS, do="join")
        if not all(one["same_answers"] for one in found):
            raise RuntimeError(f"answers differ from one kind of step to the other: {found}")
        return {"steps": found}

    def passes(self) -> dict[str, Any]:
        """Run passes in one of the engines; it leaves the world for that and joins again."""
        first = self.engines[0]
        first.ask("left", ANSWER_SECONDS, do="leave")
        found = first.ask("passed", START_SECONDS, do="passes")["found"]
        first.ask("joined", ANSWER_SECONDS, do="join")
        if not all(found.values()):
            raise RuntimeError(f"passes that are not a host's: {[name for name, good in found.items() if not good]}")
        return {"right": list(found)}

    def engine_killed(self) -> dict[str, Any]:
        """The last one."""
        shard = self.lab.shard_pid()
        self.engines.pop().end()
        self.same(self.engines[0])
        until(lambda: self.lab.status().clients == ENGINES - 1, "its lease ends", 3 * LEASE_SECONDS + 10)
        self.same(self.engines[0])
        if self.lab.shard_pid() != shard:
            raise RuntimeError("the shard was restarted")
        return {"went_on": True}

    def shard_killed(self) -> dict[str, Any]:
        """Kill the shard: its engine's process can still compute but is in no world; new engines gather the next."""
        survivor = self.engines[0]
        psutil.Process(self.lab.shard_pid()).kill()
        began = time.monotonic()
        told = survivor.ask("failed", TOLD_SECONDS, do="generate")
        after = round(time.monotonic() - began, 2)
        if told["context"] != "alive":
            raise RuntimeError(f"the engine's context: {told}")
        survivor.end()
        self.engines.clear()
        found = self.gathered()
        for engine in self.engines:
            self.same(engine, START_SECONDS)
        return {"told": told["code"], "told_after_s": after, "next_world": found}

    def same(self, engine: Engine, seconds: float = ANSWER_SECONDS) -> None:
        """Raise RuntimeError if the engine's tokens differ from the first ones."""
        if self.expected is None or not torch.equal(tokens := engine.tokens(seconds), self.expected):
            raise RuntimeError(f"other tokens than at first: {None if self.expected is None else tokens.tolist()}")

    def end(self) -> None:
        """End the engines and stop the server."""
        for engine in self.engines:
            engine.end()
        self.lab.server.stop()


def judged(world: World, answer: dict[str, Any]) -> dict[str, Any]:
    """Compare logits after the prompt with PEFT's in float32 and bfloat16. Raises RuntimeError if they are too far."""
    device, ids = torch.device(world.given.device), world_engine.prompts()
    logits, tokens = [], []
    for dtype in (torch.float32, torch.bfloat16):
        base = load_model(world.base)
        models = [
            base if name is None else tiny.peft_model(base, world.adapters / name) for name in world_engine.ADAPTERS
        ]
        models = [model.to(device, dtype) for model in models]
        rows = [(model, ids[i : i + 1].to(device)) for i, model in enumerate(models)]
        logits.append(torch.cat([model(one).logits[:, -1].float().cpu() for model, one in rows]))
        tokens.append(torch.cat([generate(model, one, world.given.new_tokens).cpu() for model, one in rows]))
    ours, theirs = (float((one - logits[0]).abs().mean()) for one in (torch.tensor(answer["logits"]), logits[1]))
    found = {
        "mean_error": ours,
        "mean_error_of_peft": theirs,
        "tokens_equal_to_peft": equal(torch.tensor(answer["tokens"]), tokens[1]),
        "tokens_of_peft_equal_to_float32": equal(tokens[1], tokens[0]),
    }
    if ours > RATIO * theirs + SLACK:
        raise RuntimeError(f"logits are not PEFT's: {found}")
    return found


STEPS: dict[str, Callable[[World], dict[str, Any]]] = {  # each needs those before it
    step.__name__: step
    for step in (World.gathered, World.answers, World.timed, World.passes, World.engine_killed, World.shard_killed)
}


def attempt(record: Record, world: World, name: str) -> bool:
    """Run one step and record its line. Returns whether it passed."""
    return record.attempt("check", name, lambda: STEPS[name](world))


def work(record: Record, given: argparse.Namespace) -> bool:
    """Run all steps up to one that fails; return whether all passed. Raises Unable if parts of NVSHMEM are missing."""
    torch.set_grad_enabled(False)
    lacks = needs.missing_for_nvshmem(needs.host_library, nvshmem_build.missing) if given.device == "cuda" else []
    if lacks:
        raise stage.Unable("; ".join(lacks))
    for name, value in WORLD.items():
        os.environ.setdefault(name, value)
    with tempfile.TemporaryDirectory(prefix="lora-world-") as scratch:
        base, adapters = make_files(Path(scratch), given.width)
        flags = ["--base-model", str(base), "--adapters", str(adapters), "--lease-seconds", str(LEASE_SECONDS)]
        flags += ["--device", "cuda", "--dtype", "bfloat16", "--max-step-rows", str(given.step_rows)]
        flags += ["--gpu-transport", "nvshmem", "--nvshmem-clients", str(ENGINES), *given.flags.split()]
        server = launch(Path(scratch) / "log", *flags, module=given.serve)
        world = World(Lab(server, base, given.device, "nvshmem"), base, adapters, given)
        try:
            return all(attempt(record, world, name) for name in STEPS)
        finally:
            world.end()
            record_starts(record, server.log)
            print(server.tail())


# where the GPU is a CPU: the tests' own server and engine, whose kernels are ours
EMULATED = {
    "device": "cpu", "serve": "tests.support.gpu.gpu_serve", "engine": "tests.support.gpu.gpu_world_engine",
    "flags": "--slots 2", "width": 64,
    "new_tokens": 2, "rows": "3", "rounds": 2, "step_rows": 64,
}  # fmt: skip


def check(record: Record, given: argparse.Namespace) -> None:
    """Check that engines accept their flags; in a rehearsal, run the stage on this CPU."""
    world_engine.parse(["model", "127.0.0.1:1", "--device", given.device, "--transport", "nvshmem"])
    if missing := nvshmem_build.missing():
        record.add("absent", what=missing)
    if given.rehearse and given.device != "cpu":
        stage.play_emulated(work, record, given, **EMULATED)


if __name__ == "__main__":
    own = stage.parser(__doc__)
    own.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    own.add_argument("--serve", default="lora_server", help="the server's module")
    own.add_argument("--engine", default="bench.gpu_run.world_engine", help="an engine's module")
    own.add_argument("--flags", default="--device-pool 256MiB", help="more of the server's")
    own.add_argument("--width", type=int, default=256, help="of the model")
    own.add_argument("--new-tokens", type=int, default=16)
    own.add_argument("--rows", default="16,256,1024", help="of the steps that are timed")
    own.add_argument("--rounds", type=int, default=50, help="of each")
    own.add_argument("--step-rows", type=int, default=1024, help="the server's --max-step-rows")
    stage.main(work, own.parse_args(), modules=("cupy", "peft", "nvshmem", "cuda.bindings"), check=check)
