"""Which step comes next: decode first without starving prefill, and followers in their leader's order."""

import contextlib
import socket
import time

import pytest

from lora_server.errors import ProtocolError
from lora_server.ports import ANY_PORT, TcpPort
from lora_server.shard.coordination import Follower, Independent, Leader
from lora_server.shard.orders import MAX_OF_A_FOLLOWER, MAX_UNAUTHENTICATED
from lora_server.shard.schedule import PendingStep, StepWork
from lora_server.timings import Timings
from lora_server.transport.address import parse
from lora_server.transport.base import Connection, Grant
from lora_server.transport.frames import HEADER, MESSAGE, STEP, frame
from lora_server.wire import messages, slot
from lora_server.wire.messages import Challenge, Follow, Lead, Order, badge_of
from lora_server.wire.slot import RequestHeader
from tests.support.rig import LOADED, Client, healthy, make_rig
from tests.support.serving import HANG_SECONDS, heard, until


class Peer(Connection):
    """Only a name: the scheduler never touches a region."""

    def __init__(self, client, epoch=1):
        self.grant = Grant(client, epoch, b"")

    def respond(self, seq, nbytes):
        raise AssertionError("a scheduler does not answer")


def step(client, step_class=slot.DECODE, received=0, *, seq=1, blocked=False, epoch=1):
    header = RequestHeader._make([0] * len(RequestHeader._fields))._replace(step_class=step_class, budget_us=60_000_000)
    return PendingStep(Peer(client, epoch), seq, header, received, 0, pin=None if blocked else 1)


@pytest.fixture
def leader(request):
    found = Leader("127.0.0.1", handshake_seconds=getattr(request, "param", Timings.handshake))
    yield found
    found.close()


@pytest.fixture
def make_follower(leader):
    followers = []

    def make():
        follower = follower_of(leader, 1 + len(followers))
        followers.append(follower)
        until(lambda: leader.next({}) is None and leader.followers == len(followers), "the leader to count it")
        return follower

    yield make
    for follower in followers:
        follower.close()


def pending(*steps):
    return {one.connection.grant.client: one for one in steps}


STRANGE = [
    b"", b"GET / HTTP/1.1\r\n\r\n", HEADER.pack(MESSAGE, 2**32 - 1, 0) + bytes(4096), HEADER.pack(STEP, 0, 0),
    b"".join(frame(MESSAGE, b"\xc1")), b"".join(frame(MESSAGE, messages.encode(Follow(1, bytes(32), bytes(32))))),
    b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32),
]  # fmt: skip


@pytest.mark.parametrize("leader", [2.0], indirect=True)
def test_unauthenticated_peers_hear_no_order_and_end_no_follower(leader, make_follower):
    """They could end the leader over its ZeroMQ port, fill its memory, and hear whose step is next."""
    follower, host_port = make_follower(), parse(leader.address)
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection(host_port)) for _ in range(2 * len(STRANGE))]
        for stranger, said in zip(strangers, STRANGE * 2, strict=True):
            stranger.settimeout(HANG_SECONDS)
            stranger.sendall(said)
        order_of(leader, 5, to=follower)
        for stranger in strangers:
            assert len(heard(stranger)) <= HEADER.size + 64, "a challenge, and no more"
    assert leader.followers == 1
    make_follower()
    assert leader.followers == 2, "others are let in"
    follower.close()
    until(lambda: leader.next({}) is None and leader.followers == 1, "one to be counted out")


def test_any_number_of_unauthenticated_peers_keeps_no_follower_out(leader, make_follower, stack):
    for _ in range(3 * MAX_UNAUTHENTICATED):
        stack.enter_context(socket.create_connection(parse(leader.address)))
    make_follower()
    assert leader.followers == 1


def test_a_follower_that_takes_no_orders_is_cut_off(leader, stack):
    """Its connection fills up; nothing is queued for it in the leader."""
    admitted(stack, leader)
    until(lambda: leader.followers == 1, "it to be let in")

    def cut_off():
        for _ in range(1000):
            order_of(leader, 1)
        return leader.followers == 0

    until(cut_off, "the leader to give it up")


def follower_of(leader, shard):
    follower = Follower(shard, lambda: None, 4)
    follower.follow(leader.address, badge_of(leader.badge, shard))
    return follower


def admitted(stack, leader, shard=9, badge_shard=9):
    """A connection that shows a shard's badge as that of `shard`, and what it said."""
    sock = stack.enter_context(socket.create_connection(parse(leader.address)))
    sock.settimeout(HANG_SECONDS)
    challenge = messages.decode(sock.recv(4096)[HEADER.size :], Challenge)
    badge = badge_of(leader.badge, badge_shard)
    proof = messages.proof(badge, b"follower", challenge.nonce, bytes(32))
    follow = b"".join(frame(MESSAGE, messages.encode(Follow(shard, bytes(32), proof))))
    sock.sendall(follow)
    lead = messages.decode(sock.recv(4096)[HEADER.size :], Lead)
    assert messages.proves(lead.proof, badge, b"leader", bytes(32), challenge.nonce)
    return sock, follow


def test_a_peer_that_knows_the_badge_hears_orders_and_holds_up_no_follower(leader, make_follower, stack):
    """One that is silent, one that talks, one that repeats a proof, and more of them than a leader keeps."""
    follower = make_follower()
    silent, follow = admitted(stack, leader)
    talks, _ = admitted(stack, leader)
    until(lambda: len(leader._orders._followers) == 3, "they are let in")
    assert leader.followers == 2, "as one shard"
    order_of(leader, 1, to=follower)
    for peer in (silent, talks):
        assert messages.decode(peer.recv(4096)[HEADER.size :], Order).client == 1
    talks.sendall(b"".join(frame(MESSAGE, messages.encode(Order(9, 1, 1, 60_000_000)))))
    again = stack.enter_context(socket.create_connection(parse(leader.address)))
    again.settimeout(HANG_SECONDS)
    again.sendall(follow)
    for peer in (talks, again):
        assert len(heard(peer)) <= HEADER.size + 64, "a challenge, and no more"
    for _ in range(300):
        admitted(stack, leader)
    assert len(leader._orders._followers) <= 1 + MAX_OF_A_FOLLOWER and leader.followers == 2
    order_of(leader, 2)
    until(lambda: len(follower._queue) == 2, "the follower hears on")
    assert [order.client for order, _ in follower._queue] == [1, 2], "of the leader alone"
    second = follower_of(leader, 2)
    stack.callback(second.close)
    until(lambda: leader.followers == 3, "another follower is let in beside all of them")
    for _ in range(300):
        admitted(stack, leader)
    order_of(leader, 3)
    until(lambda: [order.client for order, _ in second._queue] == [3], "and hears on")


def test_a_badge_is_good_for_its_own_shard_alone(leader, make_follower, stack):
    make_follower()
    with pytest.raises((ProtocolError, ConnectionResetError)):
        admitted(stack, leader, shard=1, badge_shard=9)
    admitted(stack, leader, shard=9, badge_shard=9)
    until(lambda: leader.followers == 2, "it is let in as its own")


def test_a_follower_believes_no_leader_without_the_badge():
    """And does not wait for one that says nothing."""
    follower = Follower(1, lambda: None, 4)
    with socket.create_server(("127.0.0.1", 0)) as false:
        false.settimeout(HANG_SECONDS)
        follower.follow(f"tcp://127.0.0.1:{false.getsockname()[1]}", b"badge")
        for attempt in range(2):
            with false.accept()[0] as peer:
                peer.settimeout(HANG_SECONDS)
                peer.sendall(b"".join(frame(MESSAGE, messages.encode(Challenge(bytes(32))))))
                assert peer.recv(4096), "its proof"
                lie = [b"".join(frame(MESSAGE, messages.encode(one))) for one in (Lead(bytes(32)), Order(1, 1, 1, 1))]
                peer.sendall(b"".join(lie) if attempt else b"x" * 4096)
                with contextlib.suppress(ConnectionResetError):
                    assert peer.recv(4096) == b"", "it goes"
    follower.close()
    assert not follower._queue


def test_orders_of_steps_that_never_come_go(leader, make_follower):
    """A client that pushes to the leader alone, under deadlines of an hour."""
    follower = make_follower()
    for seq in range(1, 101):
        assert leader.next(pending(step(1, seq=seq))).seq == seq
    order_of(leader, 2)
    until(lambda: len(follower._queue) == 101, "the orders to arrive")
    assert follower.next(pending(step(2))).connection.grant.client == 2
    assert len(follower._queue) == 4, "as many as its slots"
    assert follower.next(pending(step(1, seq=98))).seq == 98


def order_of(leader, *clients, to=None):
    """Let the leader pick these clients' steps, one after another; until a follower has heard of them."""
    for client in clients:
        assert leader.next(pending(step(client))).connection.grant.client == client
    if to is not None:
        until(lambda: len(to._queue) == len(clients), "the orders to arrive")


def test_a_follower_serves_in_the_leaders_order(leader, make_follower):
    follower = make_follower()
    order_of(leader, 3, 1, 2, to=follower)
    here = pending(step(1, slot.DECODE, 1), step(2, slot.DECODE, 2), step(3, slot.PREFILL, 3))
    served = []
    while (picked := follower.next(here)) is not None:
        served.append(picked.connection.grant.client)
        del here[picked.connection.grant.client]
    assert served == [3, 1, 2]
    assert follower.next(pending(step(4))) is None, "what the leader has not ordered waits"
    order_of(leader, 1, 2, 3, to=follower)
    assert follower.next({}) is None, "nothing to do before a step comes"
    blocked, late = step(1, blocked=True), step(2)
    first = follower.next(pending(blocked, step(3)))
    assert first.connection.grant.client == 3, "a blocked or late step delays no other"
    assert follower.next(pending(blocked)) is None
    blocked.pin = 1
    assert follower.next(pending(blocked, late)) is blocked, "and keeps its place"
    assert follower.next(pending(late)) is late


@pytest.mark.parametrize("other", [None, {"seq": 2}, {"epoch": 2}])
def test_an_order_whose_step_never_arrives_is_skipped(other, leader, make_follower):
    follower, began = make_follower(), time.monotonic()
    for client in (1, 2):
        refused = step(client)
        refused.header, refused.refusal = refused.header._replace(budget_us=50_000), ProtocolError("bad")
        assert leader.next(pending(refused)) is refused, "the followers' parts of it are served"
    until(lambda: len(follower._queue) == 2, "the orders to arrive")
    here = pending(step(1, **other)) if other else {}
    until(lambda: follower.next(here) is None and not follower._queue, "the orders to be skipped")
    assert time.monotonic() - began > 0.04, "at the client's own deadline"


def test_what_a_follower_refuses_waits_for_no_order(make_follower):
    refused = step(1)
    refused.refusal = ProtocolError("bad")
    assert make_follower().next(pending(step(2), refused)) is refused


def test_in_leader_mode_what_is_begun_is_finished(leader, make_follower):
    """The order says what is begun, and followers may be late: a small step passes a large one before, not within."""
    follower, large, small = make_follower(), step(1), step(2)
    large.header = large.header._replace(num_rows=256)
    order_of(leader, 1, 2, to=follower)
    for coordinator in (leader, follower):
        large.work = StepWork(iter(()))
        assert coordinator.next(pending(large, small)) is large
        large.work = None
        assert coordinator.next(pending(small)) is small
    assert Independent().next(pending(large, small)) is small
    large.work = StepWork(iter(()))
    assert Independent().next(pending(large, small)) is small


@pytest.mark.parametrize("where", ["at its address", "elsewhere"])
def test_a_follower_of_a_new_leader_forgets_the_old_one(where, leader, make_follower):
    follower, port = make_follower(), ANY_PORT
    order_of(leader, 1, to=follower)
    if where == "at its address":
        leader.close()
        port = TcpPort(int(leader.address.rpartition(":")[2]), "a stage")
    successor = Leader("127.0.0.1", port=port)
    assert (successor.address == leader.address) == (where == "at its address") and successor.badge != leader.badge
    follower.follow(successor.address, badge_of(successor.badge, 1))
    assert not follower._queue
    until(lambda: successor.next({}) is None and successor.followers == 1, "the successor to count it")
    if where == "elsewhere":
        order_of(leader, 2)
    order_of(successor, 3, to=follower)
    assert follower.next(pending(step(2), step(3))).connection.grant.client == 3
    successor.close()


def test_a_stage_of_real_shards_serves_alike(leader, make_follower, tiny_adapters):
    """Two shards with all weights, one leads: the same client's step is served on both."""
    rigs = [make_rig(), make_rig()]
    rigs[0].shard.coordinator, rigs[1].shard.coordinator = leader, make_follower()
    for rig in rigs:
        assert rig.load(LOADED, tiny_adapters["all"]).result() is None
    pairs = [[Client(rig.shard, client) for rig in rigs] for client in (1, 2)]
    for led, following in pairs * 5:
        following_seq = following.push(following.request())
        assert rigs[1].shard.serve_once() is False, "not before the leader says so"
        healthy(led)
        following.answer(following_seq)
    for rig in rigs:
        rig.shard.store.close()
