"""Starting vLLM engines and OpenAI servers in processes of their own, and talking to them."""

import contextlib
import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

from lora_server.daemon.forked import Forked
from lora_server.daemon.forks import ForkServer
from lora_server.demo import children
from lora_server.demo.engine import EngineAnswer, Sequence
from lora_server.demo.launch import RunningServer, free_address, launch, running_server
from tests.support.engine_api import CALL_SECONDS, START_SECONDS, EngineApi, Logged
from tests.support.serving import ANYWHERE, flags
from tests.support.workload import Workload

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
SETTINGS = {
    "enforce_eager": True,
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "distributed_executor_backend": "uni",
    "max_model_len": 1024,
}


FORKS = ForkServer(["vllm.entrypoints.llm", "tests.vllm.engine_process"], START_SECONDS)


class Engine(Logged):
    """`server` None: no address is set. Other keywords are LLM's.

    It is forked from a process that has vLLM imported and nothing started, which spares most of a start; `fresh`: it
    has an interpreter of its own.
    """

    def __init__(
        self, model: Path, server: str | None, log: Path, environment: Any = (), fresh: bool = False, **settings: Any
    ) -> None:
        env = {**os.environ, **ENVIRONMENT, **dict(environment)}
        env.pop("LORA_SERVER_ADDRESS", None)
        if server is not None:
            env["LORA_SERVER_ADDRESS"] = server
        self.log = log
        (stdin, ours), (answers, replies) = os.pipe(), os.pipe()
        self._said, self._replies = os.fdopen(ours, "w"), os.fdopen(answers)
        with log.open("wb") as stream:
            self.process = (_fresh if fresh else _forked)(stdin, stream.fileno(), replies, env)
        job = {"parent": os.getpid(), "environment": env, "settings": {**SETTINGS, "model": str(model), **settings}}
        try:
            self._say(job)
            self._reply(START_SECONDS)
        except BaseException:
            self.close()
            raise

    def call(self, method: str, **arguments: Any) -> Any:
        """The method's result; RuntimeError with what it raised."""
        self._say({"method": method, "arguments": arguments})
        return self._reply(CALL_SECONDS)

    def _say(self, what: dict[str, Any]) -> None:
        self._said.write(json.dumps(what) + "\n")
        self._said.flush()

    def _reply(self, seconds: float) -> Any:
        ready, _, _ = select.select([self._replies], [], [], seconds)
        line = self._replies.readline() if ready else ""
        if not line:
            raise RuntimeError(f"engine: no reply within {seconds:g} s\n{self.tail()}")
        reply = json.loads(line)
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return reply["result"]

    def generate(self, batch: list[Sequence], new_tokens: int, path: str = "by-name") -> list[dict[str, Any]]:
        requests = [{"prompt": s.prompt, "adapter": s.adapter, "new_tokens": new_tokens} for s in batch]
        return self.call("generate", requests=requests, path=path)

    def add(self, prompt: list[int], adapter: str | None, new_tokens: int, path: str = "by-name") -> str:
        """Queue a request; `call("step")` works on it."""
        return self.call("add", request={"prompt": prompt, "adapter": adapter, "new_tokens": new_tokens}, path=path)

    def answers(self, batch: list[Sequence], new_tokens: int) -> list[EngineAnswer]:
        """As `workload.check` wants them; none may have been flagged."""
        replies = self.generate(batch, new_tokens)
        flagged = [reply["stop_reason"] for reply in replies if reply["stop_reason"] is not None]
        assert not flagged, flagged
        return [EngineAnswer(reply["tokens"], reply["logprobs"]) for reply in replies]

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._said.close()
        try:
            self.process.wait(20)
        except (subprocess.TimeoutExpired, TimeoutError):
            self.process.kill()
            self.process.wait()
        self._replies.close()


def _fresh(stdin: int, log: int, replies: int, env: dict[str, str]) -> subprocess.Popen[bytes]:
    command = children.own([sys.executable, str(Path(__file__).with_name("engine_process.py")), str(replies)])
    try:
        return subprocess.Popen(command, stdin=stdin, stdout=log, stderr=log, pass_fds=(replies,), env=env)
    finally:
        os.close(stdin)
        os.close(replies)


def _forked(stdin: int, log: int, replies: int, env: dict[str, str]) -> Forked:
    before = dict(os.environ)
    os.environ.update(ENVIRONMENT | {"PYTHONPATH": str(ROOT)})  # the server's, which may start now
    try:
        return Forked(FORKS.fork("tests.vllm.engine_process", [stdin, log, log, replies]))
    finally:
        os.environ.clear()
        os.environ.update(before)
        os.close(stdin)
        os.close(replies)


def serve(load: Workload, name: str, scratch: Path) -> contextlib.AbstractContextManager[RunningServer]:
    """Four shards, so that experts, layers and dense sites lie apart."""
    return running_server(scratch / f"server-{name}.log", flags(load, "--layout", "ep2-pp2", *ANYWHERE))


class Servers:
    """Servers of a workload, one after another; all are stopped with the block."""

    def __init__(self, load: Workload, folder: Path) -> None:
        self._load, self._folder, self.all = load, folder, list[RunningServer]()

    def start(self, *more: str) -> RunningServer:
        """Start one with these flags and wait until it is ready."""
        self.all.append(launch(self._folder / f"server-{len(self.all)}.log", *flags(self._load, *more)))
        self.all[-1].wait_ready()
        return self.all[-1]

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        for one in self.all:
            one.stop()


def tokens(answer: dict[str, Any]) -> list[int]:
    """Return the tokens of an OpenAI server's completion."""
    return answer["choices"][0]["token_ids"]


class ApiServer(EngineApi):
    """vLLM's OpenAI server, engine core in a process of its own."""

    def __init__(self, model: Path, server: str, log: Path, *flags: str, **environment: str) -> None:
        env = {**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "LORA_SERVER_ADDRESS": server}
        address = free_address()
        host, _, port = address.rpartition(":")
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--host", host, "--port", port, "--served-model-name", "base", "--max-model-len", "512"]
        command += ["--enforce-eager", "--dtype", "float32", *flags]
        super().__init__(address, command, env | environment, log)

    def complete(self, model: str, prompt: list[int], new_tokens: int, **more: Any) -> tuple[int, Any]:
        body = {"model": model, "prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "logprobs": 0, **more}
        return self.request("POST", "/v1/completions", {"min_tokens": new_tokens, "return_token_ids": True, **body})
