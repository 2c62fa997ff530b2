"""The process of one of a server's two controllers: it stands by until it leads, then it is the controller.

A controller that takes over starts as one that its node restarted: shards and clients find it, and tell it what there
is. One that loses its lead ends; its node starts it again, and it stands by.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable

import structlog
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from lora_server.access.gate import Gate
from lora_server.access.tls import certificate_of
from lora_server.address import Address, ControllerList
from lora_server.config import ProcessConfig
from lora_server.control.reports.build import leader_metrics
from lora_server.control.rpc.refusing import refuse_calls
from lora_server.daemon.child_main import run_child
from lora_server.daemon.controller_main import ControllerProcess
from lora_server.daemon.guard import cannot_listen
from lora_server.daemon.heap import give_back_large
from lora_server.daemon.http import listen_http
from lora_server.daemon.processes import EXIT_FAILED, Up, say
from lora_server.daemon.startup import ask
from lora_server.errors import ConfigError, LoraServerError, NotLeaderError
from lora_server.registry.database import Database, database_of
from lora_server.registry.leadership import Leadership

log = structlog.get_logger()


class StandbyCollector(Collector):
    """Metrics of a controller that stands by."""

    def __init__(self, leadership: Leadership) -> None:
        self._leadership = leadership

    def collect(self) -> Iterable[Metric]:
        """Yield that it does not lead, and the epoch of the controller that does."""
        yield from leader_metrics(False, self._leadership.leader.epoch)


class CandidateProcess:
    """A controller that leads, or stands by."""

    _leadership: Leadership  # once `run` has opened the database

    def __init__(self, config: ProcessConfig) -> None:
        self.config, self._stopping = config, threading.Event()
        self._address = str(Address(config.advertise, config.listen.port))
        self._controller: ControllerProcess | None = None

    def run(self) -> int:
        """Stand by until this controller leads; then serve until stopped. Raises ConfigError."""
        config, database = self.config, self._open()
        if database is None:
            return 0
        assert config.controller is not None
        both = ",".join(sorted(map(str, config.controller.addresses)))  # one lock, whatever the order they are given in
        self._leadership = Leadership(database, both, self._address, config.timings.leader)
        if self._leadership.attempt():
            self._lead()
        else:
            self._stand_by()
            config = config.model_copy(update={"restarted": True})  # in the place of the one that led
        if self._stopping.is_set():
            return 0
        self._controller = controller = ControllerProcess(config, database, self._leadership.epoch)
        if self._stopping.is_set():
            controller.stop()
        return controller.run()

    def stop(self) -> None:
        """Stop `run`, from any thread."""
        self._stopping.set()
        if self._controller is not None:
            self._controller.stop()

    def _open(self) -> Database | None:
        """Open the database; None once stopped. A process that was restarted waits for it: the other one may lead."""
        while True:
            try:
                return database_of(self.config)
            except ConfigError as error:
                if not self.config.restarted:
                    raise
                log.warning("cannot stand by; trying again", reason=str(error))
            if self._stopping.wait(self.config.timings.leader_look):
                return None

    def _stand_by(self) -> None:
        """Refuse calls until this controller leads, or is stopped. Raises ConfigError for a port that is taken."""
        config, certificate = self.config, certificate_of(self.config)
        with contextlib.ExitStack() as stack:
            gate = Gate(self._leadership.database, config.require_tokens, config.secret, config.timings.token_look)
            stack.callback(gate.close)
            collector = StandbyCollector(self._leadership)
            listen_http(config, stack, self._reason, collector, gate=gate, certificate=certificate)
            tls = certificate.grpc() if certificate is not None else None
            try:
                listener = refuse_calls(str(config.listen), self._refusal, gate, tls, config.timings)
            except RuntimeError as error:
                raise cannot_listen("--listen", config.listen, OSError("gRPC could not bind it")) from error
            stack.callback(listener.close, 0.0)
            say(Up())
            log.info("standing by", leader=self._leadership.leader.address)
            while not self._stopping.wait(config.timings.leader_look):
                if self._leadership.attempt():
                    self._lead()  # before the listeners close, which takes a while
                    return

    def _lead(self) -> None:
        log.info("leading", epoch=self._leadership.epoch, address=self._address)
        threading.Thread(target=self._keep, daemon=True, name="leadership").start()

    def _keep(self) -> None:
        """End this process once another controller leads."""
        leader = self._leadership.keep(self._stopping, self._other_leader)
        if leader:
            log.error("another controller leads; ending this one", leader=leader, epoch=self._leadership.epoch)
            os._exit(EXIT_FAILED)

    def _other_leader(self) -> str:
        """Ask the controllers for their status: one that stands by has none, and neither has one that is away."""
        assert self.config.controller is not None
        run = self._controller.controller.arrivals.run if self._controller is not None else ""
        for address in self.config.controller.addresses:
            with contextlib.suppress(LoraServerError):
                reply, _ = ask(ControllerList((address,)), self.config)
                if (reply.pid, reply.run) != (os.getpid(), run):  # not this controller itself
                    return str(address)
        return ""

    def _reason(self) -> str:
        leader = self._leadership.leader.address
        return f"this controller stands by: {f'{leader} leads' if leader else 'none leads yet'}"

    def _refusal(self) -> NotLeaderError:
        return NotLeaderError(
            f"controller {self._address}: {self._reason()}; give the addresses of both, {self.config.controller}"
        )


def main() -> None:
    """Entry point of the controller's process, after the fork."""
    give_back_large()
    run_child(CandidateProcess)
