"""What clients say that they will need: in which order it is said, who is believed, what it does on a shard."""

from __future__ import annotations

import random
import time

import msgspec
import pytest
import zmq
from structlog.testing import capture_logs

from client_connector.serving.lookahead import AGAIN_SECONDS, EVERY_SECONDS, MOST, SPACING_SECONDS, Lookahead
from lora_server.control.prefetch import MAX_AHEAD_US, MIN_SECONDS, PrefetchListener
from lora_server.daemon.shard_main import STEP_SECONDS
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire import messages
from lora_server.wire.messages import MAX_PREFETCHED, Prefetch
from tests.controllers import ToldShard, kept, make_controller
from tests.serving import until


class Told(ToldShard):
    """Also writes down the prefetches that reached it."""

    def _run(self):
        self.prefetches = []
        for command in self.handle.commands():
            if command.HasField("prefetch"):
                asked = command.prefetch
                self.prefetches.append((asked.client, [(need.handle, need.in_us) for need in asked.needs]))
            self.handle.finish(pb.Done(command=command.id))


@pytest.fixture
def rig():
    """A controller with one shard, a client that holds handles 3 and 5, and one that holds nothing."""
    controller = make_controller()
    controller.adapters.adopt([kept("law", 3), kept("art", 5), kept("code", 7)], (), 7)
    shard = Told(controller)
    shard.lives()
    lease, _ = controller.clients.join("an engine")
    controller.clients.acquire(lease.proof, ["law", "art"])
    yield controller.clients, shard, lease
    shard.close()


def said(lease, *needs, **other):
    fields = {"client": lease.client, "epoch": lease.epoch, "key": lease.key} | other
    return messages.encode(Prefetch(needs=list(needs), **fields))


def soon_after(clients):
    """As if a client had been quiet for long enough."""
    clients.prefetches._quiet_until.clear()


def test_hostile_messages_change_nothing_and_stop_nobody(rig):
    """Random bytes, other messages, forged clients, wrong keys, too many handles; by way of a socket."""
    clients, shard, lease = rig
    other, dice = clients.leases.grant("another"), random.Random(4)
    listener = PrefetchListener("127.0.0.1", "", clients.prefetches.receive)
    hostile = [dice.randbytes(dice.randrange(200)) for _ in range(200)]
    genuine = said(lease, (3, 0))
    hostile += [genuine[:at] + bytes([genuine[at] ^ 1 << dice.randrange(8)]) + genuine[at + 1 :] for at in range(40)]
    hostile += [genuine[:at] for at in range(len(genuine))]
    hostile += [
        messages.encode(messages.Welcome(1, 2, 3)),
        said(lease, (3, 0), key=other.key),
        said(lease, (3, 0), key=b""),
        said(lease, (3, 0), epoch=lease.epoch + 1),
        said(lease, (3, 0), client=99),
        said(lease, (3, 0), client=other.client),
        said(lease, *((3, 0) for _ in range(MAX_PREFETCHED + 1))),
        said(lease, (3, -1)),
        said(lease, (2**32, 0)),
        msgspec.msgpack.encode({"type": "prefetch", "handles": [3]}),
    ]
    with zmq.Context.instance().socket(zmq.PUSH) as sender, capture_logs() as lines:
        sender.connect(listener.address)
        for bad in hostile:
            sender.send(bad)
        until(lambda: sum(clients.prefetches.ignored.values()) == len(hostile), "all of them judged", 60)
        assert shard.prefetches == []
        sender.send(genuine)
        until(lambda: shard.prefetches, "the good one arrives", 60)
        listener.close()
    assert shard.prefetches == [(lease.client, [(3, 0)])]
    assert len(lines) < 20, "what anybody can cause at will is not a line each"


def test_only_what_is_held_is_passed_on_and_no_more_often_than_allowed(rig):
    clients, shard, lease = rig
    receive, ignored = clients.prefetches.receive, clients.prefetches.ignored
    receive(said(lease, (7, 0), (5, 2**61), (99, 0), (3, 7)))
    began = time.monotonic()
    for _ in range(1000):
        receive(said(lease, (3, 0)))
    most = 2 + (time.monotonic() - began) / MIN_SECONDS
    until(lambda: shard.prefetches, "the first", 60)
    assert shard.prefetches[0] == (lease.client, [(5, MAX_AHEAD_US), (3, 7)])
    assert ignored["not held"] == 1 and ignored["too many"] >= 1000 - most
    assert len(shard.prefetches) <= most


def test_who_lets_go_of_all_that_it_announced_needs_nothing(rig):
    clients, shard, lease = rig
    clients.prefetches.receive(said(lease, (3, 0), (5, 0)))
    clients.release(lease.proof, [3])
    clients.release(lease.proof, [5])
    until(lambda: len(shard.prefetches) == 2, "the second", 60)
    assert shard.prefetches[1] == (lease.client, [])
    clients.leave(lease.proof)
    soon_after(clients)
    clients.prefetches.receive(said(lease, (3, 0)))
    assert clients.prefetches.ignored["no lease"] == 1 and not clients.prefetches._announced


def test_the_queue_is_told_in_order_when_it_changes_and_no_more_often_than_allowed():
    sent, clock = [], [0.0]
    ahead = Lookahead(sent.append, lambda: clock[0])

    def later(seconds):
        clock[0] += seconds

    ahead.arrived(4)
    ahead.arrived(6)  # too soon: the queue has it
    assert sent == [{4: 0.0}] and ahead.is_due()
    ahead.follow([6, 4, 6, 9])
    assert list(sent[-1].items()) == [(6, 0.0), (4, SPACING_SECONDS), (9, 2 * SPACING_SECONDS)]
    assert not ahead.is_due()
    later(EVERY_SECONDS)
    assert ahead.is_due()
    ahead.follow([6, 4, 9])
    assert len(sent) == 2, "nothing changed"
    later(AGAIN_SECONDS)
    ahead.follow([6, 4, 9])
    assert len(sent) == 3, "before the server forgets it"
    ahead.follow([4, 9])
    assert list(sent[-1]) == [4, 9], "what started waits no more"
    later(EVERY_SECONDS)
    ahead.arrived(6)
    assert list(sent[-1]) == [4, 9, 6], "the rest waits on"
    ahead.follow(range(1000))
    assert list(sent[-1]) == list(range(MOST))
    ahead.follow([])
    later(AGAIN_SECONDS)
    ahead.follow([])
    assert sent[-1] == {} and len(sent) == 7, "an empty queue is said once"
    assert AGAIN_SECONDS < STEP_SECONDS and MIN_SECONDS < EVERY_SECONDS and MOST <= MAX_PREFETCHED
