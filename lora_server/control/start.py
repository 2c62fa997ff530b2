"""How far the start of a controller is: calls that need the answer of every shard are refused before."""

from __future__ import annotations

import threading

from lora_server.errors import ServerUnavailableError

RESTARTED = "the controller has just started and waits for its shards to register; try again"


class StartState:
    """Thread-safe; each event is set once. `Arrivals` sets `settled`, the start-up directory's source `registered`."""

    def __init__(self) -> None:
        self.settled = threading.Event()  # all shards have said what they keep: an unknown name or lease is none
        self.registered = threading.Event()  # the start-up directory is listed
        self.progress = 0, 0  # of registering it: done, all

    def require_settled(self) -> None:
        """Raise ServerUnavailableError until every shard has said what it keeps."""
        if not self.settled.is_set():
            raise ServerUnavailableError(RESTARTED)
