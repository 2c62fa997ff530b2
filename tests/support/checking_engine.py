"""An engine that generates and checks itself until it is killed: `python -m tests.support.checking_engine JOB.json`.

SIGTERM ends it after the round under way. One JSON line per round: when it ended, what came of it ("right", "wrong",
the code of a typed error, or "untyped ..."), the longest time (s) between two answers of shards since the last line,
and how many descriptors and shared regions the process has.
"""

import json
import random
import signal
import sys
import threading
import time
from pathlib import Path

import msgspec
import torch

from client_connector.exchange import StepTimes
from client_connector.transformers import attach
from lora_server import logs
from lora_server.demo.engine import EngineAnswer, Sequence, generate, load_model
from lora_server.errors import LoraServerError

TOLERANCE = 1e-4


class CheckingJob(msgspec.Struct):
    """`expected`: what PEFT answers to `batch`. `variants`: names of adapters with the same delta, of which each round
    takes one at random in the place of the batch's."""

    model: str
    server: str
    transport: str
    timeout_seconds: float
    batch: list[Sequence]
    expected: list[EngineAnswer]
    variants: dict[str, list[str]] = {}

    def names(self, chance: random.Random) -> list[str | None]:
        """Return the adapters of a round."""
        return [chance.choice(self.variants.get(one.adapter or "", [one.adapter])) for one in self.batch]


class Gaps:
    """The longest time between two answers of shards."""

    def __init__(self) -> None:
        self._last, self._longest = 0, 0

    def note(self, times: StepTimes) -> None:
        if self._last:
            self._longest = max(self._longest, times.arrived_ns - self._last)
        self._last = times.arrived_ns

    def take(self) -> float:
        longest, self._longest = self._longest, 0
        return longest * 1e-9


def held() -> dict[str, int]:
    maps = Path("/proc/self/maps").read_text()
    return {"descriptors": len(list(Path("/proc/self/fd").iterdir())), "regions": maps.count("memfd:lora-client")}


def is_right(answers: list[EngineAnswer], expected: list[EngineAnswer]) -> bool:
    return all(
        ours.tokens == theirs.tokens
        and max(abs(a - b) for a, b in zip(ours.logprobs, theirs.logprobs, strict=True)) <= TOLERANCE
        for ours, theirs in zip(answers, expected, strict=True)
    )


def main() -> None:
    logs.configure()  # stdout is for the outcomes
    job = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=CheckingJob)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    model, new_tokens = load_model(job.model), len(job.expected[0].tokens)
    chance = random.Random(sys.argv[1])
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    kept = []  # tracebacks, as an application that logs its errors late would keep them
    gaps = Gaps()
    with attach(model, server=job.server, transport=job.transport, timeout_seconds=job.timeout_seconds) as lora:
        lora.observe(gaps.note)
        while not ended.is_set():
            try:
                with lora.adapters(job.names(chance)):
                    outcome = "right" if is_right(generate(model, job.batch, new_tokens), job.expected) else "wrong"
            except LoraServerError as error:
                kept.append(error)
                outcome = error.code
            except Exception as error:
                outcome = f"untyped {error!r}"
            print(json.dumps({"at": time.time(), "outcome": outcome, "gap": gaps.take(), **held()}), flush=True)
            if outcome != "right":
                time.sleep(0.05)  # do not hammer a server that is away


if __name__ == "__main__":
    main()
