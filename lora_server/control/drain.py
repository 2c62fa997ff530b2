"""Nobody is admitted any more, and those that compute come to an end: before a node stops, or a shard is started anew.

Requests wait in the queue meanwhile. With a shard's restart all leases end while nobody holds anything: engines join
anew, without a failed request. A controller that dies forgets it all, and who waits goes on.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import structlog

from lora_server.control.adapters import Adapters
from lora_server.control.clients import Clients
from lora_server.control.shards import ShardTable, wait_all
from lora_server.errors import ConfigError, ServerBusyError, ServerUnavailableError
from lora_server.wire import lora_server_pb2 as pb

LOOK_SECONDS = 0.05
LEAST_SECONDS, MOST_SECONDS = 0.0, 3600.0
log = structlog.get_logger()


class Drain:
    """Thread-safe. One at a time."""

    def __init__(self, shards: ShardTable, clients: Clients, adapters: Adapters) -> None:
        self._shards, self._clients, self._adapters = shards, clients, adapters
        self._one = threading.Lock()
        self.reason = ""  # why nobody is admitted

    def begin(self, seconds: float) -> int:
        """Until `resume`: nobody joins, nobody is admitted. How many adapters are still held after so long."""
        with self._alone("draining"):
            self._clients.refused = "the server is draining, and will stop: ask another one"
            held = self._adapters.drain(self.reason, _checked(seconds))
            log.info("drained" if not held else "not drained in time", held=held)
            return held

    def resume(self) -> None:
        """As if nothing had been."""
        self.reason = self._clients.refused = ""
        self._adapters.drain("", 0)

    def restart(self, shard: int, seconds: float) -> None:
        """Start a shard anew between requests: they wait, and go on with its successor.

        Raises ConfigError for no shard of this server, ServerUnavailableError where requests do not end in time (then
        nothing was done), or the successor is not up in time.
        """
        deadline = time.monotonic() + _checked(seconds)
        live = self._shards.require_up()
        if shard not in live:
            raise ConfigError(f"--shard: got {shard}, expected one of 0 to {max(live)}")
        if self.reason:
            raise ServerBusyError(f"already {self.reason}: wait for that to end, or take it back with --undo")
        with self._alone(f"shard {shard} is started anew"):
            try:
                if held := self._adapters.drain(self.reason, deadline - time.monotonic()):
                    raise ServerUnavailableError(
                        f"shard {shard}: not started anew, since {held} adapters were still in use after "
                        f"{seconds:g} s; give it longer"
                    )
                self._clients.end_all()  # they hold nothing, and join anew when they want something
                old = live[shard].pid
                log.info("shard is told to end, to be started anew", shard=shard, pid=old)
                stop = live[shard].send(pb.ShardCommand(stop=True))
                wait_all([stop], max(1.0, deadline - time.monotonic()), "its end")
                self._until(lambda: self._is_new(shard, old), deadline, shard)
            finally:
                self.resume()

    def _is_new(self, shard: int, old: int) -> bool:
        live = self._shards.live()
        return shard in live and live[shard].pid != old and not self._shards.missing()

    def _until(self, done: Callable[[], bool], deadline: float, shard: int) -> None:
        pause = threading.Event()
        while not done():
            if time.monotonic() > deadline:
                raise ServerUnavailableError(f"shard {shard}: its successor is not up yet; see its node's log")
            pause.wait(LOOK_SECONDS)

    @contextlib.contextmanager
    def _alone(self, reason: str) -> Iterator[None]:
        if not self._one.acquire(blocking=False):
            raise ServerBusyError(f"already {self.reason}: wait for that to end")
        try:
            self.reason = reason
            yield
        finally:
            self._one.release()


def _checked(seconds: float) -> float:
    if not LEAST_SECONDS <= seconds <= MOST_SECONDS:
        raise ConfigError(f"--seconds: got {seconds:g}, expected {LEAST_SECONDS:g} to {MOST_SECONDS:g}")
    return seconds
