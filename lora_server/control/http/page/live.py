"""The page's data as server-sent events: new when the server published an event, and every two seconds."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from lora_server.timings import Timings

BEAT_SECONDS = 2.0  # between two answers without an event
LEAST_SECONDS = 0.2  # between two answers
STREAM_SECONDS = Timings.http_request / 2  # then a reader asks again, and shows its token again


class LiveData:
    """Sends what `look` returns to any number of readers, which share each look. `look` may block."""

    def __init__(self, look: Callable[[], dict[str, Any]]) -> None:
        self._look = look
        self._changes = 0
        self._readers: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}
        self._seen, self._seen_changes, self._seen_at = "", 0, 0.0  # the last look
        self._turn = asyncio.Lock()  # one look at a time

    def wake(self) -> None:
        """Have readers look again. For any thread; never blocks."""
        self._changes += 1
        for changed, loop in list(self._readers.items()):
            with contextlib.suppress(RuntimeError):  # the HTTP server has ended
                loop.call_soon_threadsafe(changed.set)

    def answer(self, _: Request) -> Response:
        """Return a stream of events, each with the data as JSON."""
        return StreamingResponse(self._events(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    async def _events(self) -> AsyncIterator[str]:
        changed, loop = asyncio.Event(), asyncio.get_running_loop()
        self._readers[changed] = loop
        try:
            until = loop.time() + STREAM_SECONDS
            while loop.time() < until:
                changed.clear()
                data, is_new = await self._shared()
                yield f"data: {data}\n\n"
                await asyncio.sleep(LEAST_SECONDS)
                if is_new:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(changed.wait(), BEAT_SECONDS - LEAST_SECONDS)
        finally:
            del self._readers[changed]

    async def _shared(self) -> tuple[str, bool]:
        """Return the data, no older than LEAST_SECONDS, and whether nothing has changed since it was looked at."""
        async with self._turn:
            if not self._seen or time.monotonic() - self._seen_at >= LEAST_SECONDS:
                changes, at = self._changes, time.monotonic()
                seen = json.dumps(await to_thread.run_sync(self._look, abandon_on_cancel=True))
                self._seen, self._seen_changes, self._seen_at = seen, changes, at
            return self._seen, self._seen_changes == self._changes
