"""An SGLang engine under load, in the protocol of `vllm_child`: sglang.Engine, whose scheduler is a process of its own.

Its own LoRA is the backend `torch_native`; the others are Triton's, for GPUs.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from bench.race.driver import Stream, serve
from bench.race.load import Call
from lora_server.demo import children


def streams(engine: Any, paths: dict[str, str]) -> Stream:
    """Return how a call is sent to an Engine; `paths` of adapters by name."""

    numbers = itertools.count()

    async def stream(call: Call) -> AsyncIterator[tuple[list[int], str]]:
        params = {"temperature": 0, "max_new_tokens": call.new_tokens, "ignore_eos": True}
        lora = call.adapter if call.adapter in paths else None
        name, count, reason = f"race-{next(numbers):08}", 0, None  # SGLang aborts whatever begins with a name
        try:
            outputs = await engine.async_generate(
                input_ids=call.prompt, sampling_params=params, lora_path=lora, stream=True, rid=name
            )
            async for output in outputs:  # each has all tokens so far
                tokens, reason = output["output_ids"], output["meta_info"]["finish_reason"]
                yield tokens[count:], "" if reason is None or reason["type"] == "length" else str(reason)
                count = len(tokens)
        finally:
            if reason is None:  # the job is over: SGLang would compute it to its end
                engine.tokenizer_manager.abort_request(name)

    return stream


def main() -> None:
    """Entry point of the process."""
    import sglang

    start = msgspec.json.decode(sys.stdin.buffer.readline())
    with children.on_cores(start["cores"]):  # its scheduler, which is the model's process
        engine = sglang.Engine(**start["settings"])
    try:
        engine.loop.run_until_complete(serve(streams(engine, start["paths"])))
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
