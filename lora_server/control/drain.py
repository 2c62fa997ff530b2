"""Drain: admission stops and admitted requests run to their end, before a node stops or a shard is restarted.

Requests wait in the queue meanwhile. A shard is restarted once no adapter is held. All leases end then, and engines
join again without a failed request. A controller that dies forgets the restart, and queued requests go on. A server
that drains is drained under its next controller, too.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import structlog

from lora_server.clock import SYSTEM, Clock
from lora_server.control.admission.service import AdmissionService
from lora_server.control.clients import Clients
from lora_server.control.members.shards import ShardTable, wait_all
from lora_server.control.start import RESTARTED
from lora_server.errors import ConfigError, ServerBusyError, ServerUnavailableError
from lora_server.registry.drains import Drains
from lora_server.timings import Timings
from lora_server.wire import lora_server_pb2 as pb

LEAST_SECONDS, MOST_SECONDS = 0.0, 3600.0
log = structlog.get_logger()


class Drain:
    """Drains the server, resumes it, and restarts shards; one at a time. Thread-safe."""

    def __init__(
        self,
        shards: ShardTable,
        clients: Clients,
        admission: AdmissionService,
        drains: Drains | None = None,
        look_seconds: float = Timings.shard_poll,
        clock: Clock = SYSTEM,
    ) -> None:
        """`drains` stores that the server drains. `look_seconds` separates two checks for a shard's successor."""
        self._look_seconds, self._clock = look_seconds, clock
        self._shards, self._clients, self._admission, self._drains = shards, clients, admission, drains
        self._drained = drains.drained() if drains is not None else set()  # under an earlier controller
        self._run = ""
        self._one = threading.Lock()
        self.reason = ""  # why admission is paused; empty if it is not

    def settle(self, run: str) -> None:
        """Set the server's run, and stay drained if an earlier controller drained it. Call it before any admission."""
        self._run = run
        if run in self._drained:
            log.info("the server is still drained, as under the controller before")
            self._pause(0)

    def begin(self, seconds: float) -> int:
        """Refuse joins and admissions until `resume`, and wait up to `seconds` for held adapters to be released; return
        how many are still held then. Raises ServerUnavailableError before all shards have registered."""
        seconds = _checked(seconds)
        with self._alone():
            if not self._run:  # the holds are not known yet
                raise ServerUnavailableError(RESTARTED)
            if self._drains is not None:
                self._drains.drain(self._run)
            held = self._pause(seconds)
            log.info("drained" if not held else "not drained in time", held=held)
            return held

    def _pause(self, seconds: float) -> int:
        self.reason = "draining"
        self._clients.refused = "the server is draining, and will stop: ask another one"
        return self._admission.pause(self.reason, seconds)

    def resume(self) -> None:
        """End the drain: joins and admissions go on."""
        if self._drains is not None and self._run:
            self._drains.resume(self._run)
        self._go_on()

    def _go_on(self) -> None:
        self.reason = self._clients.refused = ""
        self._admission.pause("", 0)

    def restart(self, shard: int, seconds: float) -> None:
        """Restart a shard between requests: they wait, and go on with its successor.

        Raises ConfigError if this server has no such shard; ServerUnavailableError if requests do not end in time (then
        nothing was done), or if the successor is not up in time.
        """
        deadline = self._clock.now() + _checked(seconds)
        live = self._shards.require_up()
        if shard not in live:
            raise ConfigError(f"--shard: got {shard}, expected one of 0 to {max(live)}")
        if self.reason:
            raise ServerBusyError(f"already {self.reason}: wait for that to end, or take it back with --undo")
        with self._alone():
            self.reason = f"restarting shard {shard}"
            try:
                if held := self._admission.pause(self.reason, deadline - self._clock.now()):
                    raise ServerUnavailableError(
                        f"shard {shard}: not restarted, since {held} adapters were still in use after "
                        f"{seconds:g} s; give it longer"
                    )
                self._clients.end_all()  # they hold nothing, and join anew when they want something
                old = live[shard].registration.pid
                log.info("restarting a shard", shard=shard, pid=old)
                stop = live[shard].commands.send(pb.ShardCommand(stop=True))
                wait_all([stop], max(1.0, deadline - self._clock.now()), "its end")
                self._until(lambda: self._is_new(shard, old), deadline, shard)
            finally:
                self._go_on()

    def _is_new(self, shard: int, old: int) -> bool:
        live = self._shards.live()
        is_new = shard in live and live[shard].registration.pid != old
        return is_new and not self._shards.layout.unserved(self._shards.missing())

    def _until(self, done: Callable[[], bool], deadline: float, shard: int) -> None:
        pause = threading.Event()
        while not done():
            if self._clock.now() > deadline:
                raise ServerUnavailableError(f"shard {shard}: its successor is not up yet; see its node's log")
            self._clock.wait(pause, self._look_seconds)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._one.acquire(blocking=False):
            raise ServerBusyError(f"already {self.reason}: wait for that to end")
        try:
            yield
        finally:
            self._one.release()


def _checked(seconds: float) -> float:
    if not LEAST_SECONDS <= seconds <= MOST_SECONDS:
        raise ConfigError(f"--seconds: got {seconds:g}, expected {LEAST_SECONDS:g} to {MOST_SECONDS:g}")
    return seconds
