"""Leases of ranks: granted to one node at a time, learnt again by a controller that starts, counted up."""

import pytest

from lora_server.control.members.ranks import RankLease, RankLeases
from lora_server.control.members.shards import ShardHandle
from lora_server.timings import Timings
from tests.support.controllers import make_controller, registration

A, B, C = b"a", b"b", b"c"
REST, SILENCE = Timings.rank_rest, Timings.shard_silence


@pytest.fixture
def table(clock):
    return make_controller("ep1-pp3", clock=clock).shards


@pytest.fixture
def ranks(table, clock):
    leases = RankLeases(table, 3, clock=clock)
    clock.advance(REST)
    return leases


def test_every_rank_above_0_goes_to_one_node_which_may_claim_it_again(ranks):
    """The answer to its first claim was lost."""
    first = ranks.grant(A)
    assert ranks.grant(A) == first
    second = ranks.grant(B)
    assert (first.rank, second.rank, ranks.grant(C)) == (1, 2, None)
    assert ranks.renew(first) and ranks.renew(second)
    ranks.end(first)
    assert ranks.grant(A).epoch > first.epoch


def test_a_lease_ends_with_its_node_or_after_a_silence(ranks, clock):
    first, second = ranks.grant(A), ranks.grant(B)
    ranks.end(first)
    assert ranks.grant(C).rank == 1
    clock.advance(SILENCE / 2)
    assert ranks.renew(second)
    clock.advance(SILENCE / 2 + 1)
    assert ranks.grant(A).rank == 1, "B was heard"


def test_of_two_nodes_that_claim_a_rank_the_newer_has_it(ranks, table, clock):
    """Also before a controller that knows neither: it learns the leases in whatever order they come."""
    first = ranks.grant(A)
    clock.advance(SILENCE + 1)
    newer = ranks.grant(B)
    assert newer.rank == first.rank and newer.epoch > first.epoch
    assert not ranks.renew(first) and ranks.renew(newer)
    ranks.end(first)
    assert ranks.grant(C).rank == 2, "a lease that was replaced ends nothing"
    for order in (first, newer), (newer, first):
        other = RankLeases(table, 3, clock=clock)
        for lease in order:
            other.renew(lease)
        assert not other.renew(first) and other.renew(newer)


def test_a_controller_that_starts_grants_none_until_nodes_have_shown_theirs(table, clock):
    ranks = RankLeases(table, 3, clock=clock)
    assert ranks.grant(A) is None
    assert ranks.renew(RankLease(B, 1, 7))
    clock.advance(REST)
    assert ranks.grant(A).rank == 2


def test_a_rank_whose_shards_serve_is_not_free(ranks, table, clock):
    """Those of a node that was given this rank, and has no lease."""
    handle = ShardHandle(registration(1))
    table.arrive(handle)
    assert ranks.grant(A).rank == 2
    assert ranks.grant(B) is None
    table.depart(handle)
    assert ranks.grant(B).rank == 1
