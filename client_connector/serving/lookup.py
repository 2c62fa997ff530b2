"""Names that requests ask for, looked up on the server; who asks while it is away waits, and holds no thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from client_connector.directory import Directory
from lora_server.errors import LoraServerError, ServerBusyError, ServerUnavailableError
from lora_server.timings import Timings
from lora_server.wire import lora_server_pb2 as pb


class Lookup:
    """Of one front end. An outage has `seconds` for all requests: once it is older they fail at once."""

    def __init__(
        self,
        directory: Directory,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        look_seconds: float = Timings.lookup,
    ) -> None:
        """`look_seconds`: between two looks of one request at a server that is away."""
        self._directory, self._seconds, self._clock, self._look_seconds = directory, seconds, clock, look_seconds
        self._away_since: float | None = None

    async def get(self, name: str, tenant: str = "", waits: bool = True) -> pb.Adapter:
        """See Directory.get. Raises ServerUnavailableError at once where it `waits` for no server."""
        while True:
            try:
                found = await asyncio.to_thread(self._directory.get, name, tenant)
            except ServerBusyError:  # it is there, and was waited for
                raise
            except ServerUnavailableError:
                now = self._clock()
                since = self._away_since = now if self._away_since is None else self._away_since
                if not waits or now - since >= self._seconds:
                    raise
            except LoraServerError:
                self._away_since = None
                raise
            else:
                self._away_since = None
                return found
            await asyncio.sleep(self._look_seconds)
