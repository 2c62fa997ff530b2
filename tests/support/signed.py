"""Requests as clients and shards sign them."""

import itertools

from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire.proofs import lend, sign
from lora_server.wire.terms import Proof

_COUNT = itertools.count(1)


def signed(request, proof, count=None):
    """A request of the client with this lease."""
    sign(request, pb.Proof(client=proof.client, epoch=proof.epoch, count=count or next(_COUNT)), proof.key)
    return request


def signed_by_shard(request, shard, instance):
    """A request of the process that registered so."""
    sign(request, pb.ShardProof(shard=shard, count=next(_COUNT)), instance.encode())
    return request


def borrow(borrower, holder):
    """A request to compute with what another client holds."""
    lent = pb.Proof(client=holder.client, epoch=holder.epoch, mac=lend(holder.key, borrower.client, borrower.epoch))
    return signed(pb.BorrowRequest(holder=lent), borrower)


def proof_of(lease):
    """Make the proof of a lease from the answer of Join."""
    return Proof(lease.client, lease.epoch, lease.key)
