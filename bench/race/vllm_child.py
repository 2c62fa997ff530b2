"""A vLLM engine under load: `python -m bench.race.vllm_child FD`, a job per line on stdin, its outcome per line on FD.

The first line is the engine's arguments. Requests go through AsyncLLM, as those of vLLM's own front end do, and the
engine core is a process of its own.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from bench.race.driver import Stream, serve
from bench.race.load import Call


def streams(engine: Any, paths: dict[str, str]) -> Stream:
    """Return how a call is sent to an AsyncLLM; `paths` of adapters by name."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import RequestOutputKind

    numbers, ids = itertools.count(), {name: number for number, name in enumerate(paths, 1)}

    async def stream(call: Call) -> AsyncIterator[tuple[list[int], str]]:
        count = call.new_tokens
        params = SamplingParams(temperature=0, max_tokens=count, min_tokens=count, detokenize=False)
        params.output_kind = RequestOutputKind.DELTA
        lora = None
        if call.adapter in paths:
            lora = LoRARequest(call.adapter, ids[call.adapter], paths[call.adapter])
        prompt = {"prompt_token_ids": call.prompt}
        async for output in engine.generate(prompt, params, str(next(numbers)), lora_request=lora):
            made = output.outputs[0]
            went_well = made.finish_reason in (None, "length")
            yield made.token_ids, "" if went_well else f"{made.finish_reason}: {made.stop_reason}"

    return stream


async def run(settings: dict[str, Any], paths: dict[str, str]) -> None:
    """Start the engine and run jobs until stdin ends."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**settings))
    try:
        await serve(streams(engine, paths))
    finally:
        engine.shutdown()


def main() -> None:
    """Entry point of the process."""
    start = msgspec.json.decode(sys.stdin.buffer.readline())
    asyncio.run(run(start["settings"], start["paths"]))


if __name__ == "__main__":
    main()
