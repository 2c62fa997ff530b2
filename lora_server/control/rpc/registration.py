"""The streams between shard processes and their controller."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import threading
from collections.abc import AsyncIterator
from typing import NamedTuple

import structlog

from lora_server.control.controller import Controller
from lora_server.control.members.shards import ShardHandle
from lora_server.control.rpc.listener import Mailbox, Threads, Write
from lora_server.errors import ConfigError
from lora_server.wire import lora_server_pb2 as pb

log = structlog.get_logger()


class Doorkeeper(NamedTuple):
    """Who may be a shard. Where nodes have no token, those above rank 0 are believed."""

    secret: str
    believes_other_nodes: bool = False

    def check(self, registration: pb.Registration) -> None:
        """Raises ConfigError."""
        if registration.node and self.believes_other_nodes and not registration.secret:
            return
        if not hmac.compare_digest(self.secret.encode(), registration.secret.encode()):
            raise ConfigError(
                f"shard {registration.shard} of node {registration.node}: its token is not the controller's; give "
                "every node a --join-token-file with the same text"
            )


class ShardsService:
    """One stream per shard process: its reports come in, commands go out, its end is the shard's death."""

    def __init__(self, controller: Controller, threads: Threads, door: Doorkeeper) -> None:
        self._controller, self._threads, self._door = controller, threads, door

    async def register(self, first: pb.ShardReport, reports: AsyncIterator[pb.ShardReport], write: Write) -> None:
        """Until either side is gone."""
        registration = first.registration
        self._door.check(registration)
        kept = [(await anext(reports)).kept for _ in range(registration.kept)]
        handle = await self._threads.run(self._controller.arrivals.arrive, registration, kept)
        commands: asyncio.Queue[pb.ShardCommand | None] = asyncio.Queue()
        with Mailbox() as mailbox:
            threading.Thread(target=self._reports, args=(handle, mailbox), name="reports", daemon=True).start()
            args = handle, commands, asyncio.get_running_loop()
            threading.Thread(target=_hand_over, args=args, name="commands", daemon=True).start()
            ends = [asyncio.ensure_future(_receive(reports, mailbox)), asyncio.ensure_future(_send(commands, write))]
            try:
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for end in ends:
                    end.cancel()
                ended = await asyncio.gather(*ends, return_exceptions=True)
                log.debug("shard stream ended", shard=handle.shard, how=[repr(one) for one in ended if one])

    def _reports(self, handle: ShardHandle, reports: Mailbox) -> None:
        try:
            for report in reports:
                self._on_report(handle, report)
        finally:
            self._controller.arrivals.depart(handle)

    def _on_report(self, handle: ShardHandle, report: pb.ShardReport) -> None:
        kind = report.WhichOneof("report")
        if kind == "done":
            handle.finish(report.done)
        elif kind == "stats":
            self._controller.shards.update(handle, report.stats)
        elif kind == "residencies":
            self._controller.adapters.on_moved(handle.shard, report.residencies.moved)
        elif kind == "leaving":
            handle.leaving = True
        elif kind == "client_gone":
            self._controller.clients.end(report.client_gone.client, report.client_gone.epoch)


async def _receive(reports: AsyncIterator[pb.ShardReport], mailbox: Mailbox) -> None:
    async for report in reports:
        mailbox.put(report)


def _hand_over(
    handle: ShardHandle, commands: asyncio.Queue[pb.ShardCommand | None], loop: asyncio.AbstractEventLoop
) -> None:
    """To the event loop, until the handle is closed."""
    with contextlib.suppress(RuntimeError):  # the loop is closed
        for command in handle.commands():
            loop.call_soon_threadsafe(commands.put_nowait, command)
        loop.call_soon_threadsafe(commands.put_nowait, None)


async def _send(commands: asyncio.Queue[pb.ShardCommand | None], write: Write) -> None:
    while (command := await commands.get()) is not None:
        await write(command)
