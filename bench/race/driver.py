"""Drives an engine that takes requests while it runs: sends the calls of each job, and notes when tokens come back."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator

import msgspec

from bench.race.load import Call, Job, Seen, answer, repeated

Stream = Callable[[Call], AsyncIterator[tuple[list[int], str]]]  # a call's new tokens as they come, and why it failed


class Driver:
    """The calls of one job."""

    def __init__(self, stream: Stream, job: Job) -> None:
        self._stream, self._job = stream, job
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
        seen = Seen(number, due, self._now())
        self.seen.append(seen)
        try:
            async for tokens, failure in self._stream(call):
                seen.tokens += tokens
                seen.times += [self._now()] * len(tokens)
                seen.failure = failure
        except Exception as error:
            seen.failure = repr(error)


async def serve(stream: Stream) -> None:
    """Say that the engine is ready, and run jobs until stdin ends."""
    answer([])
    while line := await asyncio.to_thread(sys.stdin.buffer.readline):
        answer(await Driver(stream, msgspec.json.decode(line, type=Job)).run())
