"""Starting SGLang's server, and talking to it."""

import os
import sys
from pathlib import Path
from typing import Any

from lora_server.demo.engine import EngineAnswer, Sequence
from lora_server.demo.launch import free_address
from tests.support.engine_api import EngineApi

ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "SGLANG_USE_CPU_ENGINE": "1"}
FLAGS = {
    "device": "cpu",
    "dtype": "float32",
    "attention-backend": "torch_native",
    "sampling-backend": "pytorch",
    "max-total-tokens": "4096",
    "max-running-requests": "16",
    "context-length": "512",
    "served-model-name": "base",
}


class SglangServer(EngineApi):
    """`server` None: no address is set."""

    def __init__(self, model: Path, server: str | None, log: Path, *flags: str, **environment: str) -> None:
        env = {**os.environ, **ENVIRONMENT, **environment}
        env.pop("LORA_SERVER_ADDRESS", None)
        if server is not None:
            env["LORA_SERVER_ADDRESS"] = server
        address = free_address()
        host, _, port = address.rpartition(":")
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--host", host]
        command += ["--port", port, *(word for name, value in FLAGS.items() for word in (f"--{name}", value)), *flags]
        super().__init__(address, command, env, log)

    def generate(self, batch: list[Sequence], new_tokens: int) -> tuple[int, Any]:
        """The status, and what SGLang answers to these in one call."""
        body = {
            "input_ids": [one.prompt for one in batch],
            "lora_path": [one.adapter for one in batch],
            "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
            "return_logprob": True,
        }
        return self.request("POST", "/generate", body)

    def answers(self, batch: list[Sequence], new_tokens: int) -> list[EngineAnswer]:
        """As `workload.check` wants them."""
        code, replies = self.generate(batch, new_tokens)
        assert code == 200, replies
        return [_answer(reply) for reply in replies]

    def answer(self, prompt: list[int], adapter: str | None, new_tokens: int) -> list[int]:
        """The tokens of one."""
        return self.answers([Sequence(prompt, adapter)], new_tokens)[0].tokens


def _answer(reply: dict[str, Any]) -> EngineAnswer:
    return EngineAnswer(reply["output_ids"], [one[0] for one in reply["meta_info"]["output_token_logprobs"]])
