"""Engine processes that check themselves, and the outcomes of their rounds."""

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from lora_server.demo import children
from lora_server.errors import BY_CODE
from tests.support.checking_engine import CheckingJob
from tests.support.serving import HANG_SECONDS, until
from tests.support.workload import Workload

TYPED = set(BY_CODE) | {"right"}
STEP_SECONDS = 60.0  # of a step: what a fault may hold it up for, on a busy machine


def checking(job: Path, prefix: Sequence[str] = ()) -> list[str]:
    """The command of an engine that checks itself."""
    return [*prefix, sys.executable, "-m", "tests.support.checking_engine", str(job)]


class Engine:
    """A process that prints a JSON line per round; a thread reads them."""

    def __init__(self, command: Sequence[str]) -> None:
        self.process = children.start(command, stdout=subprocess.PIPE, text=True)
        self.rounds: list[dict] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(HANG_SECONDS)
        self._reader.join(HANG_SECONDS)
        self.process.stdout.close()

    def finish(self) -> None:
        """Let the round under way be the last."""
        self.process.terminate()
        assert self.process.wait(HANG_SECONDS) == 0
        self._reader.join(HANG_SECONDS)

    def _read(self) -> None:
        for line in self.process.stdout:
            if line.startswith("{"):
                self.rounds.append(json.loads(line))

    def right_since(self, since: float) -> float | None:
        """Return when the first right round after `since` ended; None if there is none yet."""
        return next((one["at"] for one in list(self.rounds) if one["at"] > since and one["outcome"] == "right"), None)


def start_checking(
    load, server, file, transport="auto", timeout=HANG_SECONDS, prefix=(), names=(), variants=None
) -> Engine:
    """One that holds adapters for a round, all of the workload's or these, releases them, and asks again."""
    chosen = [pair for pair in zip(load.batch, load.expected, strict=True) if not names or pair[0].adapter in names]
    batch, expected = map(list, zip(*chosen, strict=True))
    job = CheckingJob(str(load.base), server, transport, timeout, batch, expected, variants or {})
    file.write_bytes(msgspec.json.encode(job))
    return Engine(checking(file, prefix))


class Fleet:
    """Engines in a block, at whose begin each has been right. `outcomes` counts all rounds by what came of them."""

    def __init__(self, load: Workload, server: str, scratch: Path, transports: tuple[str, ...], **how) -> None:
        self.engines = []
        scratch.mkdir(exist_ok=True)
        prefixes = how.pop("prefixes", ((),) * len(transports))
        for index, (transport, prefix) in enumerate(zip(transports, prefixes, strict=True)):
            file, own = scratch / f"engine-{index}.json", {"timeout": STEP_SECONDS, "prefix": prefix, **how}
            self.engines.append(start_checking(load, server, file, transport, **own))

    def __enter__(self):
        with contextlib.ExitStack() as late:
            late.callback(self.__exit__)
            self.all_right_again(now())
            late.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        for engine in self.engines:
            engine.stop()

    def all_right_again(self, since: float, seconds: float = HANG_SECONDS) -> float:
        """Wait until every engine has had a complete right round after `since`; return how long the slowest took."""
        until(lambda: all(one.right_since(since) for one in self.engines), f"right again: {self.outcomes()}", seconds)
        return max(one.right_since(since) for one in self.engines) - since

    def check_all_right(self) -> None:
        """Wait until every engine is right again; assert that each round of each was right."""
        self.all_right_again(now())
        assert set(self.check()) == {"right"}

    def outcomes(self) -> Counter[str]:
        return Counter(one["outcome"] for engine in self.engines for one in list(engine.rounds))

    def check(self) -> Counter[str]:
        """Assert that no answer was wrong, no error untyped, and no engine died; return the outcomes."""
        outcomes = self.outcomes()
        assert set(outcomes) <= TYPED, outcomes
        assert all(engine.process.poll() is None for engine in self.engines)
        return outcomes

    def held(self) -> list[tuple[int, int]]:
        """Descriptors and shared regions of each engine after its newest round."""
        return [(one.rounds[-1]["descriptors"], one.rounds[-1]["regions"]) for one in self.engines]


def now() -> float:
    return time.time()
