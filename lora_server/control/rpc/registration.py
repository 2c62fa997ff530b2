"""The streams between shard processes and their controller."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable
from functools import partial
from typing import NamedTuple, TypeAlias

import structlog

from lora_server.control.controller import Controller
from lora_server.control.members.shards import CommandQueue, ShardHandle
from lora_server.control.rpc.listener import StreamCall, Threads, Write
from lora_server.control.rpc.streams import EventWakes, run_either
from lora_server.errors import ConfigError, ProtocolError
from lora_server.wire import bounds
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire.messages import NONCE_BYTES, proof, proves

Received: TypeAlias = tuple[ShardHandle, Iterable[pb.ShardReport] | None]  # None: its stream ended
RETRY_SECONDS = 0.1  # until a thread may be had
ANSWER_SECONDS = 8e-6  # per stream, in which calls are answered; to write to it takes ten times as long
MESSAGES = 4000  # a second, to all shards together, that a controller sends at most
log = structlog.get_logger()


class Doorkeeper(NamedTuple):
    """Authenticates shards by the nodes' shared token. With `believes_other_nodes`, nodes above rank 0 need none."""

    secret: str
    believes_other_nodes: bool = False

    def challenge(self, hello: pb.ShardHello) -> pb.ControllerChallenge:
        """Return the controller's challenge, with its own proof of the token. Raises ProtocolError."""
        if len(hello.nonce) != NONCE_BYTES:
            raise ProtocolError(f"a nonce of {len(hello.nonce)} bytes; expected {NONCE_BYTES}, in a ShardHello")
        nonce = secrets.token_bytes(NONCE_BYTES)
        return pb.ControllerChallenge(nonce=nonce, proof=proof(self._key(hello), b"controller", hello.nonce, nonce))

    def check(self, hello: pb.ShardHello, challenge: pb.ControllerChallenge, registration: pb.Registration) -> None:
        """Check a shard's proof of the token; raises ConfigError if it is wrong."""
        same = (hello.shard, hello.node) == (registration.shard, registration.node)
        if not (same and proves(registration.proof, self._key(hello), b"shard", challenge.nonce, hello.nonce)):
            raise self._wrong(f"shard {hello.shard} of node {hello.node}")

    def check_node(self, hello: pb.ShardHello, challenge: pb.ControllerChallenge, shown: bytes) -> None:
        """Check a node's proof of the token; raises ConfigError if it is wrong."""
        if not proves(shown, self._key(hello), b"node", challenge.nonce, hello.nonce):
            raise self._wrong("a node")

    def _wrong(self, caller: str) -> ConfigError:
        return ConfigError(
            f"{caller}: its token is not the controller's; give every node a --join-token-file with the same text"
        )

    def _key(self, hello: pb.ShardHello) -> bytes:
        return b"" if hello.node and self.believes_other_nodes else self.secret.encode()


class ShardsService:
    """The RPC `Register`, one stream per shard process: reports come in, commands go out. Its end is the shard's."""

    def __init__(self, controller: Controller, threads: Threads, door: Doorkeeper) -> None:
        self._controller, self._threads, self._door = controller, threads, door
        self._wakes = EventWakes(lambda: ANSWER_SECONDS * len(self._streams))
        self._mailbox: queue.SimpleQueue[Received | None] = queue.SimpleQueue()
        self._streams: set[ShardHandle] = set()  # those that are open
        threading.Thread(target=self._apply_reports, name="reports", daemon=True).start()

    def close(self) -> None:
        """End the thread that applies reports. Call it once all streams have ended."""
        self._mailbox.put(None)

    async def register(self, message: pb.ShardReports, call: StreamCall[pb.ShardReports]) -> None:
        """Register a shard and serve its stream until either side is gone. Raises ProtocolError, ConfigError."""
        if not message.reports:
            raise ProtocolError("a first message without a report; expected a ShardHello")
        reports, seconds = ReportReader(message, call.rest), self._controller.timings.handshake
        first = await reports.next(seconds) or pb.ShardReport()
        challenge = self._door.challenge(first.hello)
        await call.write(pb.ShardCommands(commands=[pb.ShardCommand(challenge=challenge)]))
        if (report := await reports.next(seconds)) is None:
            raise ProtocolError(f"shard {first.hello.shard}: no registration within {seconds:g} s, or its stream ended")
        registration = report.registration
        bounds.check(registration)
        self._door.check(first.hello, challenge, registration)
        call.prove()
        kept: list[pb.Kept] = []
        while len(kept) < registration.kept:
            if (report := await reports.next(seconds)) is None:
                came = f"{len(kept)} of {registration.kept} reports of what it kept came"
                raise ProtocolError(
                    f"shard {registration.shard}: {came}, and no other within {seconds:g} s, or its stream ended"
                )
            kept.append(report.kept)
        handle = await self._threads.run(self._controller.arrivals.arrive, registration, kept)
        self._streams.add(handle)
        try:
            await run_either(self._receive(reports, handle), self._send(handle.commands, call.write))
        finally:
            self._streams.discard(handle)
            self._mailbox.put((handle, None))

    async def _receive(self, reports: ReportReader, handle: ShardHandle) -> None:
        while (message := await reports.message()) is not None:  # one wake-up of the thread for all of a message
            self._controller.shards.heard_from(handle)  # it is there, whatever its reports wait for
            self._mailbox.put((handle, message))

    async def _send(self, commands: CommandQueue, write: Write) -> None:
        """Write a shard's commands as they come, until its queue is closed: what comes in a pause goes together."""
        there = asyncio.Event()
        commands.on_put = partial(self._wakes.wake, asyncio.get_running_loop(), there)
        there.set()  # for what came before
        while await there.wait():
            there.clear()
            for data in commands.take():
                if data is None:
                    return
                await write(data)
                await asyncio.sleep(len(self._streams) / MESSAGES)

    def _apply_reports(self) -> None:
        """Apply the reports of all shards, on one thread: what one causes may wait for a lock, never for another."""
        while (received := self._mailbox.get()) is not None:
            handle, reports = received
            if reports is None:
                self._depart(handle)
                continue
            try:
                for report in reports:
                    self._controller.hear(handle, report)
            except Exception as error:
                log.exception("a shard's report failed; ending its stream", shard=handle.shard, error=repr(error))
                handle.commands.close()

    def _depart(self, handle: ShardHandle) -> None:
        """Begin a shard's departure on a thread of its own: it may wait for a shard that registers."""
        try:
            threading.Thread(target=self._controller.arrivals.depart, args=(handle,), daemon=True).start()
        except RuntimeError as error:
            log.warning("no thread for a shard's departure; trying again", shard=handle.shard, reason=str(error))
            time.sleep(RETRY_SECONDS)
            self._mailbox.put((handle, None))


class ReportReader:
    """The reports of a stream, one by one or by the message. For one task."""

    def __init__(self, first: pb.ShardReports, rest: AsyncIterator[pb.ShardReports]) -> None:
        self._here, self._rest = deque(first.reports), rest

    async def next(self, seconds: float) -> pb.ShardReport | None:
        """Return the next report; None at the end, or where none comes for so long."""
        if not self._here:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    while not self._here and (message := await anext(self._rest, None)) is not None:
                        self._here.extend(message.reports)
        return self._here.popleft() if self._here else None

    async def message(self) -> Iterable[pb.ShardReport] | None:
        """Return what is left of a message, or the next one, None at the end."""
        if self._here:
            left, self._here = self._here, deque()
            return left
        message = await anext(self._rest, None)
        return None if message is None else message.reports
