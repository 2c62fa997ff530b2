"""What clients say that they will need: in which order it is said, who is believed, what it does on a shard."""

import time

import pytest
from structlog.testing import capture_logs

from client_connector.serving.lookahead import AGAIN_SECONDS, EVERY_SECONDS, MOST, SPACING_SECONDS, Lookahead
from lora_server.control.prefetch import MAX_AHEAD_US, SPACING_US
from lora_server.errors import LeaseError
from lora_server.timings import Timings
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire.terms import MAX_PREFETCHED
from tests.support.controllers import ToldShard, kept, make_controller
from tests.support.serving import until


class Told(ToldShard):
    """Also writes down the prefetches that reached it."""

    def _run(self):
        self.prefetches = []
        for command in self.handle.commands:
            if command.HasField("prefetch"):
                asked = command.prefetch
                self.prefetches.append((asked.client, [(need.handle, need.in_us) for need in asked.needs]))
            self.handle.commands.finish(pb.Done(command=command.id))


@pytest.fixture
def rig():
    """A controller with one shard, a client that holds handles 3 and 5, and one that holds nothing."""
    controller = make_controller()
    controller.adapters.recovery.adopt([kept("law", 3), kept("art", 5), kept("code", 7)], (), 7)
    shard = Told(controller)
    shard.lives()
    lease, _ = controller.clients.join("an engine")
    controller.requests.acquire(lease.proof, ["law", "art"])
    yield controller.clients, shard, lease
    shard.close()


def test_too_much_too_often_and_what_is_not_held_is_not_passed_on(rig):
    clients, shard, lease = rig
    requests = shard.controller.requests
    ignored, asked = clients.prefetches.ignored, lease.proof
    with capture_logs() as lines:
        requests.prefetch(asked, dict.fromkeys(range(MAX_PREFETCHED + 1), 0))
        assert ignored["too much"] == 1 and shard.prefetches == []
        requests.prefetch(asked, {7: 0, 3: 2**61, 99: 0, 5: 7})
        began = time.monotonic()
        for _ in range(1000):
            requests.prefetch(asked, {3: 0})
    most = 2 + (time.monotonic() - began) / Timings.prefetch_gap
    until(lambda: shard.prefetches, "the first", 60)
    assert shard.prefetches[0] == (lease.client, [(5, 7), (3, MAX_AHEAD_US)])
    assert ignored["not held"] == 1 and ignored["too often"] >= 1000 - most
    assert len(shard.prefetches) <= most and len(lines) < 20
    assert {one["log_level"] for one in lines} == {"info"}, "prefetches that are ignored are no warnings"


def test_announced_adapters_are_spaced_and_those_that_are_released_are_needed_no_more(rig):
    """Whatever it says: one that announced 399 as needed at once went before all that others announced later."""
    clients, shard, lease = rig
    requests = shard.controller.requests
    requests.prefetch(lease.proof, {3: 0, 5: 0})
    until(lambda: shard.prefetches, "the first", 60)
    assert shard.prefetches == [(lease.client, [(3, 0), (5, SPACING_US)])]
    requests.release(lease.proof, [3])
    requests.release(lease.proof, [5])
    until(lambda: len(shard.prefetches) == 2, "the second", 60)
    assert shard.prefetches[1] == (lease.client, [])
    clients.leave(lease.proof)
    clients.prefetches._quiet_until.clear()  # it was quiet for long enough
    with pytest.raises(LeaseError):
        requests.prefetch(lease.proof, {3: 0})
    clients.prefetches.receive(lease.proof, {3: 0})  # it left in between
    assert not clients.prefetches._announced


def test_the_queue_is_told_in_order_when_it_changes_and_no_more_often_than_allowed(clock):
    sent, later = [], clock.advance
    ahead = Lookahead(sent.append, clock.now)
    ahead.follow([])
    assert not sent, "requests that are scheduled before the queue is looked at cost no call"
    later(EVERY_SECONDS)
    ahead.follow([6, 4, 6, 9])
    assert list(sent[-1].items()) == [(6, 0.0), (4, SPACING_SECONDS), (9, 2 * SPACING_SECONDS)]
    assert not ahead.is_due()
    later(EVERY_SECONDS)
    assert ahead.is_due()
    ahead.follow([6, 4, 9])
    assert len(sent) == 1, "nothing changed"
    later(AGAIN_SECONDS)
    ahead.follow([6, 4, 9])
    assert len(sent) == 2, "before the server forgets it"
    ahead.follow([4, 9])
    assert list(sent[-1]) == [4, 9], "what started waits no more"
    ahead.follow(range(1000))
    assert list(sent[-1]) == list(range(MOST))
    ahead.follow([])
    later(AGAIN_SECONDS)
    ahead.follow([])
    assert sent[-1] == {} and len(sent) == 5, "an empty queue is said once"
    assert Timings.expected_step > AGAIN_SECONDS and Timings.prefetch_gap < EVERY_SECONDS
    assert MOST <= MAX_PREFETCHED
