"""What races: each system is one engine process with its settings, and ours has a LoRA server beside it."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from bench.race.load import Job, Seen
from lora_server.demo import children
from lora_server.demo.launch import running_server
from lora_server.errors import LoraServerError
from lora_server.merged import find_merged

START_SECONDS, GRACE_SECONDS = 600.0, 600.0  # GRACE: beyond a job's own seconds
ROOT = Path(__file__).parents[2]
BATCH = 32
RANKS = (8, 16, 32, 64)
POOL = "4GiB"  # room for all adapters, of which vLLM's own LoRA keeps all in host memory
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
SGLANG = ROOT / ".venv-sglang/bin/python"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "SGLANG_USE_CPU_ENGINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
}


@dataclass(frozen=True)
class System:
    """`kind`: base, own (the engine's LoRA with so many `places`) or ours. `sites`: which adapters it serves.

    `base`: its model's directory. `engine`: vllm, sglang or peft, which has its own LoRA alone.
    """

    name: str
    kind: str
    threads: int
    places: int = 0
    sites: str = "attention"
    base: str = "base"
    engine: str = "vllm"


class Contestant:
    """A running engine process."""

    def __init__(self, system: System, process: subprocess.Popen[bytes], answers: int, log: Path) -> None:
        self.system, self._process, self._log = system, process, log
        self.server = ""  # the address of its LoRA server
        self._answers = os.fdopen(answers, "rb")

    def ask(self, job: Job) -> list[Seen]:
        """Run a job; raises LoraServerError where the engine ends or is silent for long."""
        self.say(msgspec.json.encode(job))
        return self.answer(job.seconds + GRACE_SECONDS)

    def say(self, line: bytes) -> None:
        """Write a line to the process."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, as `answer` says
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()

    def answer(self, seconds: float) -> list[Seen]:
        """Wait for the process's next line; raises LoraServerError."""
        ready, _, _ = select.select([self._answers], [], [], seconds)
        line = self._answers.readline() if ready else b""
        if not line:
            tail = self._log.read_text(errors="replace")[-3000:]
            raise LoraServerError(f"{self.system.name}: no answer within {seconds:g} s:\n{tail}")
        return msgspec.json.decode(line, type=list[Seen])

    def stop(self) -> None:
        """End the process and what it started."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        children.stop(self._process)
        self._answers.close()


@contextlib.contextmanager
def running(system: System, work: Path, adapters: Sequence[str]) -> Iterator[Contestant]:
    """Start a system for these adapters of work/adapters; its first answer means that it is ready.

    An engine's threads have the first cores, a core each, and ours has a server of one shard with one thread on the
    others: a shard that wakes on its engine's core stops the engine.
    """
    engine, rest = children.cores(system.threads)
    with contextlib.ExitStack() as stack:
        environment = os.environ | ENVIRONMENT | {"OMP_NUM_THREADS": str(system.threads)}
        environment["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, engine))
        if system.kind == "ours":
            flags = ["--base-model", str(work / "base"), "--adapters", str(work / "adapters")]
            flags += ["--layout", "ep1-pp1", "--dtype", "float32", "--device-pool", POOL]
            with children.on_cores(rest):
                server = stack.enter_context(running_server(work / f"{system.name}-server.log", flags))
            environment["LORA_SERVER_ADDRESS"] = server.address
        contestant = _spawn(system, environment, work / f"{system.name}.log")
        contestant.server = environment.get("LORA_SERVER_ADDRESS", "")
        stack.callback(contestant.stop)
        contestant.say(msgspec.json.encode(_start(system, work, adapters) | {"cores": engine}))
        yield contestant


def _start(system: System, work: Path, adapters: Sequence[str]) -> dict[str, Any]:
    paths = {name: str(work / "adapters" / name) for name in adapters}
    if system.engine == "peft":
        return {"model": str(work / "base"), "paths": paths, "threads": system.threads, "batch": BATCH}
    if system.engine == "sglang":
        return _start_sglang(system, work, paths)
    settings: dict[str, Any] = {
        "model": str(work / system.base),
        "dtype": "float32",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "max_model_len": 512,
        "max_num_seqs": BATCH,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
    }
    if system.kind == "own":
        settings |= {"enable_lora": True, "max_loras": system.places, "max_lora_rank": max(RANKS)}
        settings |= {"max_cpu_loras": max(len(adapters), system.places)}
        settings |= {"lora_target_modules": ATTENTION} if system.sites == "attention" else {}
    if system.kind == "ours":
        paths = dict.fromkeys(paths, "by-name")
        if (merged := find_merged(work / system.base)) is not None:  # as vLLM's front end names it
            paths[merged.name] = f"lora_server:{merged.name}@{merged.version}"
    return {"settings": settings, "paths": {} if system.kind == "base" else paths}


def _start_sglang(system: System, work: Path, paths: dict[str, str]) -> dict[str, Any]:
    """SGLang's engine as close to vLLM's as its arguments allow; threads are those of the environment."""
    settings: dict[str, Any] = {
        "model_path": str(work / system.base),
        "device": "cpu",
        "dtype": "float32",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "disable_cuda_graph": True,
        "skip_tokenizer_init": True,
        "context_length": 512,
        "max_running_requests": BATCH,
        "max_total_tokens": BATCH * 512,
        "mem_fraction_static": 0.98,  # what the others take while it starts counts against it
        "disable_radix_cache": True,
        "sleep_on_idle": True,  # else its scheduler takes a core while the others have their turn
        "log_level": "warning",
    }
    if system.kind == "own":  # the other backends are Triton's
        settings |= {"enable_lora": True, "lora_backend": "torch_native", "max_loras_per_batch": system.places}
        settings |= {"max_lora_rank": max(RANKS), "lora_paths": paths, "lora_target_modules": ATTENTION}
    return {"settings": settings, "paths": {} if system.kind == "base" else paths}


def _spawn(system: System, environment: dict[str, str], log: Path) -> Contestant:
    answers, theirs = os.pipe()
    python = SGLANG if system.engine == "sglang" else sys.executable
    try:
        with log.open("wb") as stream:
            process = children.start(
                [str(python), "-m", f"bench.race.{system.engine}_child", str(theirs)],
                stdin=subprocess.PIPE, stdout=stream, stderr=stream, env=environment, pass_fds=(theirs,),
            )  # fmt: skip
    finally:
        os.close(theirs)
    return Contestant(system, process, answers, log)
