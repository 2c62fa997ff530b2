"""A shard's stream to its controller: registers, reports, receives commands, and reconnects after an outage.

Steps never depend on it: while it is broken the shard serves on, with the weights and clients that it has.
"""

from __future__ import annotations

import itertools
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeAlias, cast

import grpc
import structlog

from lora_server.daemon.kept import Kept
from lora_server.errors import ConfigError, LeaseError, LoraServerError, ProtocolError, ServerUnavailableError
from lora_server.timings import DEFAULTS, Timings
from lora_server.wire import bounds
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire import lora_server_pb2_grpc as rpc
from lora_server.wire.credentials import Credentials
from lora_server.wire.leader import leader_of, leave
from lora_server.wire.messages import NONCE_BYTES, proof, proves
from lora_server.wire.rpc import open_channel, translate

log = structlog.get_logger()

Done = Callable[[LoraServerError | None], None]
_Reports: TypeAlias = "queue.SimpleQueue[pb.ShardReport | None]"


class KeptCommands:
    """Carries a controller's commands out, and keeps what the next controller must be told. The stream's thread."""

    def __init__(self, execute: Callable[[pb.ShardCommand, Done], None]) -> None:
        self._execute, self.kept = execute, Kept()

    def carry_out(self, command: pb.ShardCommand, done: Done) -> None:
        """Note a command and execute it; a claim of another run first drops everything that is kept."""
        if (size := command.ByteSize()) > bounds.KEPT_BYTES:
            kind = command.WhichOneof("command")
            log.error("refusing a command: no report to the next controller could carry it", kind=kind, bytes=size)
            done(ProtocolError(f"command {kind}: got {size:,} bytes, expected at most {bounds.KEPT_BYTES:,}"))
            return
        if command.HasField("claim") and self.kept.is_foreign(command.claim):
            self._drop_everything()
        self.kept.note(command)
        self._execute(command, done)

    def _drop_everything(self) -> None:
        handles, clients = self.kept.forget()
        log.warning("the server is a new one: dropping the state of the old one", adapters=len(handles))
        for client in clients:
            self._execute(pb.ShardCommand(revoke=client), lambda error: None)
        for handle in handles:
            self._execute(pb.ShardCommand(drop=handle), lambda error: None)


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
        self._register, self._layers_ready = register, layers_ready
        self._commands = KeptCommands(execute)
        self._reports: _Reports = queue.SimpleQueue()
        self._quiet_until = time.monotonic() + timings.controller_start  # or an outage was spoken of
        self.up = threading.Event()  # a controller has taken the registration
        self._ended = threading.Event()

    @property
    def instance(self) -> str:
        """Return the secret name that this process registers with; only the controller learns it."""
        return self._commands.kept.instance

    def report(self, report: pb.ShardReport) -> None:
        """Send a report, from any thread. Without a stream it is lost, unless it says that a client's connection ended:
        the next registration repeats that."""
        if report.HasField("client_gone"):
            self._commands.kept.end(report.client_gone)
        self._reports.put(report)

    def leave(self, seconds: float) -> None:
        """Tell the controller that this shard stops in order, and wait for its answer. Call once `stopping` is set."""
        self.report(pb.ShardReport(leaving=True))
        self._reports.put(None)
        self._ended.wait(seconds)

    def run(self, stopping: threading.Event) -> LoraServerError | None:
        """Keep a stream until `stopping`; return early, with the reason, if the controller turns this shard away."""
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
        """Serve one stream until it ends; return why."""
        first: _Reports = queue.SimpleQueue()
        reports: _Reports = queue.SimpleQueue()
        self._reports, leader = reports, leader_of(self._address)
        with open_channel(self._address, self._credentials) as channel:
            commands = rpc.ShardsStub(channel).Register(itertools.chain(messages_of(first), messages_of(reports)))

            def give_up() -> None:
                leave(self._address, leader)
                commands.cancel()

            late = threading.Timer(self._timings.handshake, give_up)
            late.daemon = True
            late.start()
            try:
                registration = self._introduce(first, commands)
                late.cancel()
                first.put(pb.ShardReport(registration=registration))
                for kept in self._commands.kept.reports(self._layers_ready):
                    first.put(kept)
                first.put(None)
                for message in commands:
                    for command in message.commands:
                        self._on_command(command, reports)
            except grpc.RpcError as error:
                return translate(cast(grpc.Call, error), self._address)
            except LoraServerError as error:
                leave(self._address, leader)  # with a standby: another process may have this one's port
                return error
            finally:
                late.cancel()
                first.put(None)
                reports.put(None)
        return None

    def _introduce(self, reports: _Reports, commands: Iterator[pb.ShardCommands]) -> pb.Registration:
        """Authenticate the controller before telling it anything. Raises ConfigError at the start, later
        ServerUnavailableError: another process may have its port for now."""
        registration, key = self._commands.kept.sign(self._register()), self._credentials.node_secret.encode()
        nonce = secrets.token_bytes(NONCE_BYTES)
        hello = pb.ShardHello(shard=registration.shard, node=registration.node, nonce=nonce)
        reports.put(pb.ShardReport(hello=hello))
        challenge = next(iter(next(commands, pb.ShardCommands()).commands), pb.ShardCommand()).challenge
        if not proves(challenge.proof, key, b"controller", nonce, challenge.nonce):
            kind = ServerUnavailableError if self.up.is_set() else ConfigError
            raise kind(
                f"controller {self._address}: its token is not that of node {registration.node}; give every node a "
                "--join-token-file with the same text"
            )
        registration.proof = proof(key, b"shard", challenge.nonce, nonce)
        return registration

    def _on_command(self, command: pb.ShardCommand, reports: _Reports) -> None:
        def done(error: LoraServerError | None = None) -> None:
            if not command.id:
                return
            report = pb.Done(command=command.id)
            if error is not None:
                report.code, report.message = error.code, str(error)
            reports.put(pb.ShardReport(done=report))

        self._commands.carry_out(command, done)
        if command.HasField("claim"):
            self.up.set()
            self._quiet_until = 0.0


def messages_of(reports: _Reports) -> Iterator[pb.ShardReports]:
    """Yield reports as they come, until a None: all that wait in one message, up to about MESSAGE_BYTES."""
    while (report := reports.get()) is not None:
        message, size = pb.ShardReports(), 0
        while report is not None:
            message.reports.append(report)
            size += report.ByteSize()
            if size > bounds.MESSAGE_BYTES or reports.empty():
                break
            report = reports.get()
        yield message
        if report is None:
            return
