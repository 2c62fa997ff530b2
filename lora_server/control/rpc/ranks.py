"""The RPC `LeaseRank`, by which nodes with `--node-rank auto` get a rank and renew their lease of it."""

from __future__ import annotations

import asyncio

import structlog

from lora_server.control.members.ranks import RankLease, RankLeases
from lora_server.control.rpc.listener import StreamCall
from lora_server.control.rpc.registration import Doorkeeper
from lora_server.errors import ConfigError, LeaseError, ProtocolError
from lora_server.wire import bounds
from lora_server.wire import lora_server_pb2 as pb

log = structlog.get_logger()


class RanksService:
    """One call per grant, renewal or end: the node proves its token, as a shard does, then it says what it wants."""

    def __init__(self, ranks: RankLeases, door: Doorkeeper, seconds: float) -> None:
        """`seconds`: for a node to answer the challenge."""
        self._ranks, self._door, self._seconds = ranks, door, seconds

    async def lease(self, first: pb.NodeReport, call: StreamCall[pb.NodeReport]) -> None:
        """Answer one call. Raises ProtocolError, ConfigError, and LeaseError if the rank is another node's by now."""
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
        bounds.check(report.claim)
        self._door.check_node(first.hello, challenge, report.claim.proof)
        call.prove()
        await call.write(pb.NodeCommand(lease=self._answer(report.claim)))

    def _answer(self, claim: pb.RankClaim) -> pb.RankLease:
        ranks, held = self._ranks, RankLease(claim.node, claim.rank, claim.epoch)
        if claim.nodes != ranks.nodes:
            raise ConfigError(f"--nodes: got {claim.nodes}, expected {ranks.nodes}, as node 0 was started with")
        if not claim.node or claim.rank >= ranks.nodes:
            raise ProtocolError(
                f"a node: got a claim to rank {claim.rank}, expected one below {ranks.nodes}, and its id"
            )
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
