"""The streams between shard processes and their controller."""

from __future__ import annotations

import asyncio
import queue
import secrets
import threading
from collections.abc import AsyncIterator
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

Mailbox: TypeAlias = "queue.SimpleQueue[tuple[ShardHandle, pb.ShardReport | None] | None]"  # None: the stream ended
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
        self._wakes = EventWakes()
        self._mailbox: Mailbox = queue.SimpleQueue()
        threading.Thread(target=self._hear, name="reports", daemon=True).start()

    def close(self) -> None:
        """End the thread that hears reports. Call it once all streams have ended."""
        self._mailbox.put(None)

    async def register(self, message: pb.ShardReports, call: StreamCall[pb.ShardReports]) -> None:
        """Register a shard and serve its stream until either side is gone. Raises ProtocolError, ConfigError."""
        reports, seconds = _each(message, call.rest), self._controller.timings.handshake
        first = await anext(reports, pb.ShardReport())
        challenge = self._door.challenge(first.hello)
        await call.write(pb.ShardCommands(commands=[pb.ShardCommand(challenge=challenge)]))
        try:
            report = await asyncio.wait_for(anext(reports, None), seconds)
        except TimeoutError:
            report = None
        if report is None:
            raise ProtocolError(f"shard {first.hello.shard}: no registration within {seconds:g} s")
        registration = report.registration
        bounds.check(registration)
        self._door.check(first.hello, challenge, registration)
        call.prove()
        kept: list[pb.Kept] = []
        while len(kept) < registration.kept:
            if (report := await anext(reports, None)) is None:
                raise ProtocolError(f"shard {registration.shard}: {len(kept)} of {registration.kept} reports came")
            kept.append(report.kept)
        handle = await self._threads.run(self._controller.arrivals.arrive, registration, kept)
        try:
            await run_either(self._receive(reports, handle), self._send(handle.commands, call.write))
        finally:
            self._mailbox.put((handle, None))

    async def _receive(self, reports: AsyncIterator[pb.ShardReport], handle: ShardHandle) -> None:
        async for report in reports:
            self._mailbox.put((handle, report))

    async def _send(self, commands: CommandQueue, write: Write) -> None:
        """Write a shard's commands as they come, until its queue is closed: what comes in a `pause` goes together."""
        there = asyncio.Event()
        commands.on_put = partial(self._wakes.wake, asyncio.get_running_loop(), there)
        there.set()  # for what came before
        while await there.wait():
            there.clear()
            for data in commands.take():
                if data is None:
                    return
                await write(data)
            await asyncio.sleep(self._controller.agreement.layout.num_shards / MESSAGES)

    def _hear(self) -> None:
        """Apply the reports of all shards, on one thread: nothing that a report causes waits for another."""
        while (said := self._mailbox.get()) is not None:
            handle, report = said
            if report is None:  # its departure may wait, for a shard that registers
                threading.Thread(target=self._controller.arrivals.depart, args=(handle,), daemon=True).start()
                continue
            try:
                self._controller.hear(handle, report)
            except Exception as error:
                log.exception("a shard's report failed; ending its stream", shard=handle.shard, error=repr(error))
                handle.commands.close()


async def _each(first: pb.ShardReports, rest: AsyncIterator[pb.ShardReports]) -> AsyncIterator[pb.ShardReport]:
    """Yield the reports of these messages, one by one."""
    for report in first.reports:
        yield report
    async for message in rest:
        for report in message.reports:
            yield report
