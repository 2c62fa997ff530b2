"""A vLLM engine under load: `python -m bench.race.vllm_child FD`, a job per line on stdin, its outcome per line on FD.

The first line is the engine's arguments. Requests go through AsyncLLM, as those of vLLM's own front end do, and the
engine core is a process of its own.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from bench.race.load import Call, Job, Seen, answer, repeated


class Driver:
    """Sends the calls of one job and records when each token comes back."""

    def __init__(self, engine: Any, paths: dict[str, str], job: Job, numbers: Iterator[int]) -> None:
        self._engine, self._paths, self._job, self._numbers = engine, paths, job, numbers
        self._ids = {name: number for number, name in enumerate(paths, 1)}
        self._began = time.perf_counter()
        self.seen: list[Seen] = []

    async def run(self) -> list[Seen]:
        """Run the job to its end, or for its seconds."""
        if self._job.width:
            calls = repeated(self._job.calls)
            tasks = [asyncio.create_task(self._in_turn(calls)) for _ in range(self._job.width)]
        else:
            tasks = [asyncio.create_task(self._on_time(one, call)) for one, call in enumerate(self._job.calls)]
        _, late = await asyncio.wait(tasks, timeout=self._job.seconds)
        for task in late:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        seen, self.seen = self.seen, []
        await self._send(0, Call(0.0, None, [5], 1), 0.0)  # its answer means that the engine is idle again
        return seen

    def _now(self) -> float:
        return time.perf_counter() - self._began

    async def _in_turn(self, calls: Iterator[tuple[int, Call]]) -> None:
        for number, call in calls:
            await self._send(number, call, self._now())

    async def _on_time(self, number: int, call: Call) -> None:
        await asyncio.sleep(max(0.0, call.at - self._now()))
        await self._send(number, call, call.at)

    async def _send(self, number: int, call: Call, due: float) -> None:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind

        count = call.new_tokens
        params = SamplingParams(temperature=0, max_tokens=count, min_tokens=count, detokenize=False)
        params.output_kind = RequestOutputKind.DELTA
        lora = None
        if call.adapter in self._paths:
            lora = LoRARequest(call.adapter, self._ids[call.adapter], self._paths[call.adapter])
        seen = Seen(number, due, self._now())
        self.seen.append(seen)
        prompt = {"prompt_token_ids": call.prompt}
        async for output in self._engine.generate(prompt, params, str(next(self._numbers)), lora_request=lora):
            made = output.outputs[0]
            seen.tokens += made.token_ids
            seen.times += [self._now()] * len(made.token_ids)
            if made.finish_reason not in (None, "length"):
                seen.failure = f"{made.finish_reason}: {made.stop_reason}"


async def serve(settings: dict[str, Any], paths: dict[str, str]) -> None:
    """Start the engine, say so, and run jobs until stdin ends."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine, numbers = AsyncLLM.from_engine_args(AsyncEngineArgs(**settings)), itertools.count()
    try:
        answer([])
        while line := await asyncio.to_thread(sys.stdin.buffer.readline):
            answer(await Driver(engine, paths, msgspec.json.decode(line, type=Job), numbers).run())
    finally:
        engine.shutdown()


def main() -> None:
    """Entry point of the process."""
    start = msgspec.json.decode(sys.stdin.buffer.readline())
    asyncio.run(serve(start["settings"], start["paths"]))


if __name__ == "__main__":
    main()
