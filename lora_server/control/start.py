"""The progress of a controller's start. Calls that need every shard's state are refused until all have registered."""

from __future__ import annotations

import threading

from lora_server.errors import ServerUnavailableError

RESTARTED = "the controller has just started and waits for its shards to register; try again"


class StartState:
    """Events of the start. Thread-safe; each is set once: `settled` by `Arrivals`, `registered` by the source of the
    start-up directory."""

    def __init__(self) -> None:
        self.settled = threading.Event()  # all shards reported what they keep: an unknown name or lease does not exist
        self.registered = threading.Event()  # the start-up directory is listed
        self.leader_epoch = 0  # of this controller's lead; 0: the server has no standby
        self.progress = 0, 0  # adapters of the start-up directory: registered, in all

    def require_settled(self) -> None:
        """Raise ServerUnavailableError until every shard has reported what it keeps."""
        if not self.settled.is_set():
            raise ServerUnavailableError(RESTARTED)
