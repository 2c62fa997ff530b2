"""A shard's stream to its controller: registers, reports, carries commands out; finds a controller that was away.

Steps never depend on it: while it is broken the shard serves on, with the weights and clients that it has.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import cast

import grpc
import structlog

from lora_server.daemon.kept import Kept
from lora_server.errors import ConfigError, LeaseError, LoraServerError
from lora_server.timings import DEFAULTS, Timings
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire import lora_server_pb2_grpc as rpc
from lora_server.wire.credentials import Credentials
from lora_server.wire.rpc import open_channel, translate

log = structlog.get_logger()

Done = Callable[[LoraServerError | None], None]


class ControllerStream:
    """`execute(command, done)` carries a command out; `layers_ready(handle)` counts what is here of an adapter."""

    def __init__(
        self,
        address: str,
        credentials: Credentials,
        register: Callable[[], pb.Registration],
        execute: Callable[[pb.ShardCommand, Done], None],
        layers_ready: Callable[[int], int],
        timings: Timings = DEFAULTS,
    ) -> None:
        self._timings = timings
        self._address, self._credentials = address, credentials
        self._register, self._execute, self._layers_ready = register, execute, layers_ready
        self._kept = Kept()
        self._reports: queue.SimpleQueue[pb.ShardReport | None] = queue.SimpleQueue()
        self._quiet_until = time.monotonic() + timings.controller_start  # or an outage was spoken of
        self.up = threading.Event()  # a controller has taken the registration
        self._ended = threading.Event()

    @property
    def instance(self) -> str:
        """What this process registers as; the controller alone is told."""
        return self._kept.instance

    def report(self, report: pb.ShardReport) -> None:
        """From any thread; what is reported while there is no stream is lost."""
        self._reports.put(report)

    def leave(self, seconds: float) -> None:
        """Once `stopping` is set: tell the controller that this end is no death, and wait until it knows."""
        self.report(pb.ShardReport(leaving=True))
        self._reports.put(None)
        self._ended.wait(seconds)

    def run(self, stopping: threading.Event) -> LoraServerError | None:
        """Until `stopping`, or for good: then why this shard may not serve."""
        try:
            return self._run(stopping)
        finally:
            self._ended.set()

    def _run(self, stopping: threading.Event) -> LoraServerError | None:
        while not stopping.is_set():
            error = self._serve_once()
            if stopping.is_set():
                break
            if isinstance(error, (ConfigError, LeaseError)):
                log.error("the controller turned this shard away", reason=str(error))
                return error
            if time.monotonic() > self._quiet_until:
                self._quiet_until = time.monotonic() + self._timings.outage_reminder
                event = "no controller; serving on and trying again" if self.up.is_set() else "no controller yet"
                log.warning(event, controller=self._address, reason=str(error))
            stopping.wait(self._timings.controller_retry)
        return None

    def _serve_once(self) -> LoraServerError | None:
        """One stream, to its end."""
        self._reports = queue.SimpleQueue()
        with open_channel(self._address, self._credentials) as channel:
            try:
                for command in rpc.ShardsStub(channel).Register(self._outgoing(self._reports)):
                    self._on_command(command, self._reports)
            except grpc.RpcError as error:
                return translate(cast(grpc.Call, error), self._address)
            finally:
                self._reports.put(None)
        return None

    def _outgoing(self, reports: queue.SimpleQueue[pb.ShardReport | None]) -> Iterator[pb.ShardReport]:
        registration, kept = self._kept.sign(self._register()), list(self._kept.reports(self._layers_ready))
        yield pb.ShardReport(registration=registration)
        yield from kept
        while (report := reports.get()) is not None:
            yield report

    def _on_command(self, command: pb.ShardCommand, reports: queue.SimpleQueue[pb.ShardReport | None]) -> None:
        def done(error: LoraServerError | None = None) -> None:
            report = pb.Done(command=command.id)
            if error is not None:
                report.code, report.message = error.code, str(error)
            reports.put(pb.ShardReport(done=report))

        if command.HasField("claim"):
            if self._kept.is_foreign(command.claim):
                self._drop_everything()
            self.up.set()
            self._quiet_until = 0.0
        self._kept.note(command)
        self._execute(command, done)

    def _drop_everything(self) -> None:
        handles, clients = self._kept.forget()
        log.warning("the server was started anew: dropping what the old one knew", adapters=len(handles))
        for client in clients:
            self._execute(pb.ShardCommand(revoke=client), lambda error: None)
        for handle in handles:
            self._execute(pb.ShardCommand(drop=handle), lambda error: None)
