"""One vLLM engine of `lora-server profile-vllm`: `python -m lora_server.demo.profiled_vllm`.

The first line of stdin is the job, the last line of stdout is the result. Requests go through AsyncLLM, as those of
vLLM's own front end do, and the engine core is a process of its own.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import statistics
import sys
import time
from typing import Any

import msgspec

_JOINING = 3  # tokens of a batch during which its requests join; they are not timed


class StepAsk(msgspec.Struct):
    """A request: tokens of its prompt, its adapter (None: the base model), tokens to generate."""

    prompt: int
    adapter: str | None
    new_tokens: int = 1


class StepJob(msgspec.Struct):
    """`settings` are vLLM's engine arguments, `paths` the adapters by name.

    A cell is batches of requests that are sent at once, one batch after the other. Those of `first` are not timed.
    Then all cells are run in turn, `rounds` times, so that a slow minute of the machine is in no cell's times alone.
    """

    settings: dict[str, Any]
    paths: dict[str, str]
    first: list[list[StepAsk]]
    cells: list[list[list[StepAsk]]]
    rounds: int


class CellTimes(msgspec.Struct):
    """Medians of a cell over the requests of all rounds: until the first token, and of a step of the whole batch."""

    first_us: float
    step_us: float


class EngineTimes(msgspec.Struct):
    """The times of the cells, and vLLM's limits of a step in effect: its defaults differ by device."""

    cells: list[CellTimes]
    max_num_seqs: int
    max_num_batched_tokens: int


class _Engine:
    """The engine and the adapters' numbers."""

    def __init__(self, engine: Any, paths: dict[str, str]) -> None:
        self._engine, self._paths = engine, paths
        self._ids, self._numbers = {name: number for number, name in enumerate(paths, 1)}, itertools.count()

    async def run(self, batches: list[list[StepAsk]]) -> list[list[float]]:
        """Run a cell; returns the times of each request's tokens."""
        return [times for batch in batches for times in await asyncio.gather(*map(self._request, batch))]

    async def _request(self, ask: StepAsk) -> list[float]:
        """Send a request; returns the times of its tokens, in us."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind

        count, began, number = ask.new_tokens, time.perf_counter(), next(self._numbers)
        params = SamplingParams(temperature=0, max_tokens=count, min_tokens=count, detokenize=False)
        params.output_kind = RequestOutputKind.DELTA
        prompt = {"prompt_token_ids": [3 + (7 * number + place) % 200 for place in range(ask.prompt)]}
        lora = None
        if ask.adapter is not None:
            lora = LoRARequest(ask.adapter, self._ids[ask.adapter], self._paths[ask.adapter])
        times = list[float]()
        async for output in self._engine.generate(prompt, params, str(number), lora_request=lora):
            made = output.outputs[0]
            if made.finish_reason not in (None, "length"):
                raise RuntimeError(f"request of {ask.adapter}: {made.finish_reason}: {made.stop_reason}")
            times += [(time.perf_counter() - began) * 1e6] * len(made.token_ids)
        return times


def medians(found: list[list[float]]) -> CellTimes:
    """Return the medians of the requests of a cell, of which the tokens' times are given."""
    steps = [(one[-1] - one[_JOINING]) / (len(one) - 1 - _JOINING) for one in found if len(one) > _JOINING + 1]
    return CellTimes(statistics.median(one[0] for one in found), statistics.median(steps) if steps else 0.0)


async def run(job: StepJob) -> EngineTimes:
    """Start the engine and measure every cell."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**job.settings))
    try:
        measured = _Engine(engine, job.paths)
        limits = engine.vllm_config.scheduler_config
        await measured.run(job.first)
        found: list[list[list[float]]] = [[] for _ in job.cells]
        for _ in range(job.rounds):
            for times, cell in zip(found, job.cells, strict=True):
                times += await measured.run(cell)
        return EngineTimes([medians(times) for times in found], limits.max_num_seqs, limits.max_num_batched_tokens)
    finally:
        engine.shutdown()


def main() -> None:
    """Entry point of the process."""
    answers = os.dup(1)
    os.dup2(2, 1)  # engines print
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=StepJob)
    found = msgspec.json.encode(asyncio.run(run(job)))
    with os.fdopen(answers, "wb") as stream:
        stream.write(found + b"\n")


if __name__ == "__main__":
    main()
