"""Disturbances of a server under an engine that generates. Every row must nevertheless equal that of an undisturbed run
bit by bit, or be a typed error. tests/conformance does this with transformers, tests/vllm with vLLM."""

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.nn.modules.module import register_module_forward_pre_hook

from lora_server.demo.engine import Sequence
from lora_server.demo.launch import RunningServer, running_server
from tests.support import alora
from tests.support.gpu import emulated_gpu
from tests.support.serving import HANG_SECONDS, cli, complete, shard_processes, status, suspended, until
from tests.support.workload import Workload

DEATHS = int(os.environ.get("LORA_DEATHS", "3"))
MOST_SECONDS = 4e-3  # from a chosen module of a step to the death of a shard: longer than a layer
TRANSPORTS = ["shm", "tcp", pytest.param("gpu", marks=pytest.mark.emulator)]
SEEDS = [pytest.param(seed, marks=[pytest.mark.long] if seed >= 3 else []) for seed in range(DEATHS)]


@contextlib.contextmanager
def serving(load: Workload, transport: str, folder: Path, module: str = "lora_server") -> Iterator[RunningServer]:
    """Shards on the host, or on GPUs that are this CPU, with two aLoRAs and an ordinary adapter."""
    alora.make(load.model, folder / "adapters")
    flags = ["--base-model", str(load.base), "--adapters", str(folder / "adapters"), "--layout", "ep2-pp1"]
    flags += ["--data-dir", str(folder / "data"), "--dtype", "bfloat16" if transport == "gpu" else "float32"]
    if transport == "gpu":
        emulated_gpu.compile_all()
        module = "tests.support.gpu.gpu_serve"
    with running_server(folder / "log", flags, module=module) as running:
        yield running


def batch() -> list[Sequence]:
    """Base rows, aLoRAs with rows before their invocation, one that is never invoked, and an ordinary adapter's."""
    prompts = alora.prompts()
    calls = [("middle", "check"), ("end", "check"), ("absent", "check"), ("middle", "plain"), ("middle", None)]
    rewrite = Sequence([*prompts["middle"], *alora.OTHER, 50], "rewrite")
    return [*(Sequence(prompts[prompt], name) for prompt, name in calls), rewrite, Sequence(prompts["start"], None)]


Disturb = Callable[[RunningServer], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def a_shard_dies(server: RunningServer) -> Iterator[None]:
    """SIGKILL."""
    shard_processes(server.address)[1].kill()
    yield


@contextlib.contextmanager
def a_shard_is_stopped(server: RunningServer) -> Iterator[None]:
    """SIGTERM."""
    shard_processes(server.address)[0].terminate()
    yield


@contextlib.contextmanager
def a_shard_is_drained(server: RunningServer) -> Iterator[None]:
    """It is started anew between two requests, and no other is."""
    first, second = shard_processes(server.address)
    with ThreadPoolExecutor(1) as pool:
        arguments = ("drain", "--shard", "1", "--seconds", str(HANG_SECONDS), "--server", server.address)
        drained = pool.submit(cli, *arguments, seconds=2 * HANG_SECONDS)
        yield
        done = drained.result()
    assert (done.returncode, done.stdout) == (0, "shard 1 was started anew\n"), done.stderr
    now = shard_processes(server.address)
    assert now[0] == first and now[1] != second
    log = server.log.read_text()
    assert "was asked to stop; starting it again" in log and "died: exit code" not in log, "planned work is no error"


@contextlib.contextmanager
def a_step_times_out(server: RunningServer) -> Iterator[None]:
    """Suspend a shard for longer than a step may take, then resume it."""
    with suspended(shard_processes(server.address)[1].pid):
        yield


@contextlib.contextmanager
def the_controller_dies(server: RunningServer) -> Iterator[None]:
    """Kill the controller by SIGKILL; its shards go on serving."""
    psutil.Process(status(server.address).pid).kill()
    yield


@dataclass(frozen=True)
class Disturbance:
    """`seen`: whether the engine must see an error; None: it depends on where the step was."""

    begin: Disturb
    seen: bool | None

    def __str__(self) -> str:
        return self.begin.__name__


DISTURBANCES = [
    Disturbance(a_shard_dies, None),
    Disturbance(a_shard_is_stopped, None),
    Disturbance(a_shard_is_drained, False),
    Disturbance(a_step_times_out, True),
    Disturbance(the_controller_dies, False),
]


def wait_complete(server: RunningServer) -> None:
    """Wait until the server is complete again after a disturbance."""
    until(lambda: complete(server.address), "the server is complete again", HANG_SECONDS)


@dataclass(frozen=True)
class Death:
    """The time of a shard's death: so many seconds after a call of a module of the engine's model. `moment` is the
    share of a complete run's calls before it."""

    shard: int
    moment: float
    seconds: float

    @classmethod
    def of(cls, seed: int, shards: int):
        """Draw a death by a seed."""
        rng = random.Random(seed)
        return cls(rng.randrange(shards), rng.random(), rng.uniform(0, MOST_SECONDS))


class ModuleCalls:
    """Counts the calls of this process's modules from `begin` on, and kills a process after one of them."""

    def __init__(self) -> None:
        self._hook: Any = None
        self.number = 0

    def begin(self, do: Callable[[], object] | None = None, at: int = 0) -> None:
        """`do` is called once, at the call of that number."""
        self.end()

        def called(*ignored: object) -> None:
            if self.number == at and do is not None:
                do()
            self.number += 1

        self._hook, self.number = register_module_forward_pre_hook(called), 0

    def end(self) -> int:
        """Stop counting calls; return their number."""
        if self._hook is not None:
            self._hook.remove()
        self._hook = None
        return self.number


def kill_in(pid: int, seconds: float) -> None:
    """Kill a process after `seconds`, from a thread, while a step goes on."""

    def kill() -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass
        os.kill(pid, signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
