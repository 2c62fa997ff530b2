"""Looks up the adapter names of requests; a request waits for a server that is away without using a thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import closing

from client_connector.directory import AdapterDirectory
from client_connector.events import EventFollower, KnownAdapters
from client_connector.reconnect import Outage, while_away
from client_connector.serving.settings import Settings
from lora_server.errors import LoraServerError, ServerBusyError, ServerUnavailableError
from lora_server.timings import Timings
from lora_server.wire import lora_server_pb2 as pb


class Lookup:
    """The lookups of one front end. An outage has `seconds` for all requests: once it is older, they fail at once."""

    def __init__(
        self,
        directory: AdapterDirectory,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        look_seconds: float = Timings.lookup,
        known: KnownAdapters | None = None,
    ) -> None:
        """`look_seconds`: between two attempts of one request while the server is away. `known` answers first."""
        self.directory, self._seconds, self._look_seconds = directory, seconds, look_seconds
        self._outage, self._known = Outage(clock), known or KnownAdapters()

    @classmethod
    def of(cls, found: Settings) -> Lookup:
        """Make the lookups of an engine's front end, with a directory of their own; they follow the server's events."""
        directory = AdapterDirectory(found.address, timings=found.timings)
        known = EventFollower(found.address, timings=found.timings).known
        return cls(directory, found.timeout_seconds, look_seconds=found.timings.lookup, known=known)

    def forget(self, name: str) -> None:
        """Ask the server for a name the next time: it was removed."""
        self._known.forget(name)

    async def get(self, name: str, tenant: str = "", waits: bool = True) -> pb.Adapter:
        """See AdapterDirectory.get. Without `waits` it raises ServerUnavailableError at once."""
        while True:
            if (known := self._known.find(name, tenant)) is not None:
                return known
            changes = self._known.changes
            try:
                found = await asyncio.to_thread(self.directory.get, name, tenant)
            except ServerBusyError:  # the server is up, and the directory has waited for it already
                raise
            except ServerUnavailableError:
                self._outage.begin()
                if not waits or self._outage.seconds >= self._seconds:
                    raise
            except LoraServerError:
                self._outage.end()
                raise
            else:
                self._outage.end()
                self._known.keep(name, tenant, found, changes)
                return found
            await asyncio.sleep(self._look_seconds)


def require_server(found: Settings) -> None:
    """Wait until the server answers, before workers start that would all fail. Raises ServerUnavailableError after
    `timeout_seconds`, and any other error of the server's."""
    with closing(AdapterDirectory(found.address, timings=found.timings)) as directory:
        while_away(found.timeout_seconds)(directory.status)
