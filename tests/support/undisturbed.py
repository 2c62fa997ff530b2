"""What may befall a server under an engine that generates, and what every row must be all the same: bit by bit that of
an undisturbed run, or a typed error. tests/conformance has transformers, tests/vllm vLLM."""

import contextlib
import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
import pytest
import torch

from lora_server.demo.engine import Sequence
from lora_server.demo.launch import RunningServer
from tests.support import alora
from tests.support.serving import HANG_SECONDS, cli, shard_processes, status, until

DEATHS = int(os.environ.get("LORA_DEATHS", "3"))
MOST_SECONDS = 4e-3  # from a chosen module of a step to the death of a shard: longer than a layer
SEEDS = [pytest.param(seed, marks=[pytest.mark.long] if seed >= 3 else []) for seed in range(DEATHS)]


def adapters(model: torch.nn.Module, root: Path) -> Path:
    """Two aLoRAs and an ordinary adapter."""
    alora.make(model, root)
    return root


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
    """It is started anew between two requests."""
    with ThreadPoolExecutor(1) as pool:
        arguments = ("drain", "--shard", "1", "--seconds", str(HANG_SECONDS), "--server", server.address)
        drained = pool.submit(cli, *arguments, seconds=2 * HANG_SECONDS)
        yield
        assert drained.result().returncode == 0, drained.result().stderr


@contextlib.contextmanager
def a_step_times_out(server: RunningServer) -> Iterator[None]:
    """A shard stands still for longer than a step may take, and goes on."""
    shard = shard_processes(server.address)[1]
    shard.suspend()
    try:
        yield
    finally:
        shard.resume()


@contextlib.contextmanager
def the_controller_dies(server: RunningServer) -> Iterator[None]:
    """SIGKILL; its shards serve on."""
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


def is_complete(server: RunningServer) -> bool:
    """Whether its controller answers, and all of its shards are up."""
    try:
        return status(server.address).ready
    except grpc.RpcError:
        return False


def wait_complete(server: RunningServer) -> None:
    """After a disturbance."""
    until(lambda: is_complete(server), "the server is complete again", HANG_SECONDS)


@dataclass(frozen=True)
class Death:
    """When a shard dies: so long after a call of a module of the engine's model. `moment` is the part of the calls of a
    whole run before it."""

    shard: int
    moment: float
    seconds: float

    @classmethod
    def of(cls, seed: int, shards: int):
        """Seeded."""
        rng = random.Random(seed)
        return cls(rng.randrange(shards), rng.random(), rng.uniform(0, MOST_SECONDS))
