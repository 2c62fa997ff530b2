"""The RPCs of nodes: `LeaseRank`, by which those with `--node-rank auto` get a rank and renew their lease of it, and
`FollowLayouts`, by which every node learns of which layouts it runs shards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import structlog

from lora_server.control.members.nodes import NodeTable
from lora_server.control.members.ranks import RankLease, RankLeases
from lora_server.control.rpc.listener import StreamCall, Write
from lora_server.control.rpc.registration import Doorkeeper
from lora_server.control.rpc.streams import EventWakes, run_either
from lora_server.errors import ConfigError, LeaseError, ProtocolError
from lora_server.wire import bounds
from lora_server.wire import lora_server_pb2 as pb

log = structlog.get_logger()


class NodesService:
    """Serves nodes. Each proves its token, as a shard does, then it says what it wants."""

    def __init__(self, nodes: NodeTable, ranks: RankLeases, door: Doorkeeper, seconds: float) -> None:
        """`seconds`: for a node to answer the challenge."""
        self._nodes, self._ranks, self._door, self._seconds = nodes, ranks, door, seconds
        self._wakes = EventWakes()

    async def lease(self, first: pb.NodeReport, call: StreamCall[pb.NodeReport]) -> None:
        """Grant, renew or end a lease of a rank. Raises ProtocolError, ConfigError, and LeaseError if the rank is
        another node's by now."""
        claim = await self._claim(first, call)
        await call.write(pb.NodeCommand(lease=self._answer(claim)))

    async def follow(self, first: pb.NodeReport, call: StreamCall[pb.NodeReport]) -> None:
        """Send a node the layouts of which it runs shards, as they change, and take what it reports, until either side
        is gone. Raises ProtocolError, ConfigError."""
        claim, rank, changed = await self._claim(first, call), first.hello.node, asyncio.Event()
        self._nodes.check(rank, claim.agreement_digest)
        connection = self._nodes.connect(rank, partial(self._wakes.wake, asyncio.get_running_loop(), changed))
        changed.set()  # for the layouts that there are
        try:
            await run_either(self._hear(rank, call.rest), self._send(changed, call.write))
        finally:
            self._nodes.disconnect(connection)

    async def _send(self, changed: asyncio.Event, write: Write) -> None:
        while await changed.wait():
            changed.clear()
            if self._nodes.closed:
                return
            layouts = [pb.NodeLayout(generation=one, layout=layout) for one, layout in self._nodes.layouts.items()]
            await write(pb.NodeCommand(layouts=pb.NodeLayouts(layouts=layouts)))

    async def _hear(self, rank: int, reports: AsyncIterator[pb.NodeReport]) -> None:
        async for report in reports:
            bounds.check(report)
            self._nodes.fail(rank, report.failed.generation, report.failed.reason)

    async def _claim(self, first: pb.NodeReport, call: StreamCall[pb.NodeReport]) -> pb.RankClaim:
        """Challenge a node, and return its claim once its token and --nodes are found good."""
        challenge = self._door.challenge(first.hello)
        await call.write(pb.NodeCommand(challenge=challenge))
        try:
            report = await asyncio.wait_for(anext(call.rest, None), self._seconds)
        except TimeoutError:
            report = None
        if report is None or not report.HasField("claim"):
            raise ProtocolError(
                f"a node: got no RankClaim within {self._seconds:g} s, expected one after the challenge"
            )
        claim, nodes = report.claim, self._nodes.count
        bounds.check(claim)
        self._door.check_node(first.hello, challenge, claim.proof)
        if claim.nodes != nodes:
            raise ConfigError(f"--nodes: got {claim.nodes}, expected {nodes}, as node 0 was started with")
        if (rank := max(claim.rank, first.hello.node)) >= nodes:
            raise ProtocolError(f"a node: got a claim to rank {rank}, expected one below {nodes}")
        call.prove()
        return claim

    def _answer(self, claim: pb.RankClaim) -> pb.RankLease:
        ranks, held = self._ranks, RankLease(claim.node, claim.rank, claim.epoch)
        if not claim.node:
            raise ProtocolError("a node: got a claim to a rank without the node's id, expected one with it")
        if claim.leaves:
            ranks.end(held)
            return pb.RankLease()
        if claim.rank:
            if not ranks.renew(held):
                raise LeaseError(f"rank {claim.rank}: leased to another node while this one was away")
            return pb.RankLease(rank=claim.rank, epoch=claim.epoch)
        granted = ranks.grant(claim.node)
        if granted is None:
            return pb.RankLease()
        log.info("rank leased", rank=granted.rank, epoch=granted.epoch)
        return pb.RankLease(rank=granted.rank, epoch=granted.epoch)
