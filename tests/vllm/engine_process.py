"""One vLLM engine in a process of its own, driven by JSON lines on stdin: `python engine_process.py REPLY_FD`.

A process, because vLLM's distributed state does not survive a second engine beside it. The first line says what it
shall be. A fork server that has vLLM imported calls `main`, and REPLY_FD is 3.
"""

import atexit
import gc
import json
import os
import sys
import threading
import time
import traceback
from typing import Any

ANSWER_SECONDS = 2.0


def params(request: dict[str, Any]) -> Any:
    from vllm import SamplingParams

    count = request["new_tokens"]
    return SamplingParams(temperature=0, max_tokens=count, min_tokens=count, logprobs=0, detokenize=False)


def lora(name: str | None, numbers: dict[str, int], path: str = "by-name") -> Any:
    from vllm.lora.request import LoRARequest

    if name is None:
        return None
    return LoRARequest(name, numbers.setdefault(name, len(numbers) + 1), path)


def answer(output: Any) -> dict[str, Any]:
    one = output.outputs[0]
    tokens = list(one.token_ids)
    logprobs = [step[token].logprob for step, token in zip(one.logprobs or [], tokens, strict=False)]
    ended = {"finish_reason": one.finish_reason, "stop_reason": one.stop_reason}
    others = {"cached": output.num_cached_tokens, "extra": output.kv_transfer_params}
    return {"tokens": tokens, "logprobs": logprobs} | ended | others


class Engine:
    def __init__(self, settings: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(**settings)
        self.numbers: dict[str, int] = {}
        self.added = 0
        self.calls: Any = None
        self._answered_for: set[str] = set()
        step = self.llm.llm_engine.step
        self.llm.llm_engine.step = lambda: (self._wait_for_answers(), step())[1]

    def _wait_for_answers(self) -> None:
        """Let the server answer once about each new request, so that batches do not depend on how soon it does."""
        from client_connector.serving.request_state import Phase

        core = getattr(self.llm.llm_engine.engine_core, "engine_core", None)
        leases = getattr(getattr(core, "scheduler", None), "lora_server_leases", None)
        requests = {} if leases is None else dict(leases._requests)
        new, deadline = requests.keys() - self._answered_for, time.monotonic() + ANSWER_SECONDS
        while any(requests[name].state.phase is Phase.ASKING for name in new) and time.monotonic() < deadline:
            time.sleep(1e-3)
        self._answered_for |= new

    def generate(self, requests: list[dict[str, Any]], path: str) -> list[dict[str, Any]]:
        outputs = self.llm.generate(
            [{"prompt_token_ids": request["prompt"]} for request in requests],
            [params(request) for request in requests],
            lora_request=[lora(request["adapter"], self.numbers, path) for request in requests],
            use_tqdm=False,
        )
        return [answer(output) for output in outputs]

    def add(self, request: dict[str, Any], path: str) -> str:
        """Queue one request and return its id; `step` works on it."""
        self.added += 1
        name, prompt = f"step-{self.added}", {"prompt_token_ids": request["prompt"]}
        adapter = lora(request["adapter"], self.numbers, path)
        self.llm.llm_engine.add_request(name, prompt, params(request), lora_request=adapter)
        return name

    def abort(self, name: str) -> None:
        self.llm.llm_engine.abort_request([name])

    def step(self, count: int = 1) -> dict[str, Any]:
        """Up to `count` steps (0: until nothing is left); the newest output of each request."""
        seen, done = {}, 0
        while self.llm.llm_engine.has_unfinished_requests() and (not count or done < count):
            for output in self.llm.llm_engine.step():
                seen[output.request_id] = answer(output)
            done += 1
        return seen

    def scheduler(self) -> dict[str, Any]:
        core = self.llm.llm_engine.engine_core.engine_core
        leases = getattr(core.scheduler, "lora_server_leases", None)
        return {
            "running": len(core.scheduler.running),
            "preemptions": sum(request.num_preemptions for request in core.scheduler.requests.values()),
            "held": None if leases is None else sorted(one.name for one in leases._requests.values() if one.state.held),
        }

    def add_lora(self, name: str) -> bool:
        return self.llm.llm_engine.add_lora(lora(name, self.numbers))

    def strike(self, call: int = -1, pid: int = 0, seconds: float = 0.0) -> int:
        """Kill a process so long after that call of a module from now on; how many calls there were until now."""
        from tests.support.undisturbed import ModuleCalls, kill_in

        self.calls = self.calls or ModuleCalls()
        seen = self.calls.end()
        self.calls.begin(lambda: kill_in(pid, seconds), call)
        return seen

    def evaluate(self, expression: str) -> Any:
        """For what a test must know of the process; `llm` is the engine."""
        return eval(expression, {"llm": self.llm, "sys": sys, "os": os, "gc": gc})


def compile_also_with_lora(mode: str, backend: str) -> None:
    """As vLLM has it on GPUs. On CPUs it leaves compilation out where LoRA is on, and calls experts without its op."""
    import torch
    from vllm.config import CompilationMode
    from vllm.model_executor.layers.fused_moe import MoERunner
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        lora, vllm_config.lora_config = vllm_config.lora_config, None
        original(cls, vllm_config)
        vllm_config.lora_config = lora
        compilation = vllm_config.compilation_config
        compilation.mode, compilation.backend = CompilationMode[mode], backend
        compilation.compile_sizes = compilation.compile_sizes or []

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    MoERunner._select_forward = lambda self: torch.ops.vllm.moe_forward


def serve(settings: dict[str, Any], reply_fd: int) -> None:
    replies = os.fdopen(reply_fd, "w")

    def reply(**fields: Any) -> None:
        replies.write(json.dumps(fields) + "\n")
        replies.flush()

    if os.environ.get("LORA_SERVER_TEST_GPU"):  # this CPU is one
        from tests.support.gpu import emulated_gpu, emulated_world

        emulated_gpu.use()
        emulated_world.use()
    if os.environ.get("LORA_SERVER_TEST_ROWS_APART"):
        from tests.vllm import rows_apart

        rows_apart.use()
    if how := os.environ.get("LORA_SERVER_TEST_COMPILE"):
        compile_also_with_lora(*how.split(","))
    try:
        engine = Engine(settings)
    except BaseException as error:
        reply(error=f"{type(error).__name__}: {error}")
        raise
    reply(result="ready")
    for line in sys.stdin:
        call = json.loads(line)
        try:
            reply(result=getattr(engine, call["method"])(**call["arguments"]))
        except Exception as error:
            traceback.print_exc()
            reply(error=f"{type(error).__name__}: {error}")


def main() -> None:
    """Of a forked one."""
    from lora_server.daemon.forks import call_myself
    from lora_server.demo import children

    call_myself("vllm-engine")
    job = json.loads(sys.stdin.readline() or "null")
    if job is None or not children.leave_keeper(job["parent"]):
        return  # its parent ended before it began
    os.environ.clear()
    os.environ.update(job["environment"])
    serve(job["settings"], 3)
    threading._shutdown()  # what an interpreter does at its end
    atexit._run_exitfuncs()


if __name__ == "__main__":
    serve(json.loads(sys.stdin.readline())["settings"], int(sys.argv[1]))
