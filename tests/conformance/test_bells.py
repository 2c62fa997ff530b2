"""Bells: idle clients cost the loop nothing, none holds what another's wake-up needs, and none is missed."""

import contextlib
import os
import random

import pytest

from lora_server.transport import bells, park
from lora_server.transport.base import Grant
from lora_server.wire import messages
from lora_server.wire.messages import Hello
from tests.support.echo import echo_shard, handshake
from tests.support.processes import line_of, running
from tests.support.serving import until

IDLE, STEPS = 300, 300


@pytest.fixture
def shard(request, tmp_path):
    with echo_shard("shm", tmp_path, max_watched=getattr(request, "param", bells.MAX_WATCHED)) as found:
        yield found


def test_the_loop_looks_at_no_idle_client(shard, monkeypatch):
    """Each was looked at in every round once: 300 of them made a step several times as long."""
    looks, look = [], bells.Bells._watch
    monkeypatch.setattr(bells.Bells, "_watch", lambda self, one: looks.append(one.client) or look(self, one))
    for other in range(1, IDLE + 1):
        shard.client(other).step(64)
    client = shard.client(IDLE + 1)
    client.step(64)
    until(lambda: len(shard.port._bells._watched) <= bells.MAX_WATCHED, "most are left to ring")
    looks.clear()
    for _ in range(STEPS):
        client.step(64)
    assert sum(one != IDLE + 1 for one in looks) <= bells.MAX_WATCHED, "an idle one had to ring, at most"


def test_what_one_client_is_given_wakes_no_other(shard):
    """A page that all could write, and a word of it that one could keep at zero, made others wait."""
    given = []
    with contextlib.ExitStack() as stack:
        for client in (1, 2):
            shard.port.grant(Grant(client, 1, b"key"))
            _, _, fds = stack.enter_context(handshake(shard, messages.encode(Hello(client, 1, b"key"))))
            given.append(fds)
        (region, bell), (other_region, other_bell) = given
        assert os.fstat(region).st_ino != os.fstat(other_region).st_ino
        os.eventfd_write(bell, 5)
        with pytest.raises(BlockingIOError):
            os.eventfd_read(other_bell)  # this one was not rung


def test_a_client_that_rings_for_nothing_keeps_no_other_from_being_served(shard):
    client, ringing = shard.client(1), range(2, 34)
    for number in ringing:
        shard.port.grant(Grant(number, 1, b"key"))
    with running(RINGER, shard.listener.address, *ringing) as process:
        assert line_of(process) == "rings"
        for _ in range(STEPS):
            client.step(64)
    client.step()


RINGER = """
import os, sys
from lora_server.transport.shm import ShmLink
from lora_server.wire.messages import Hello
links = [ShmLink(sys.argv[1], Hello(int(client), 1, b"key"), 7, 60) for client in sys.argv[2:]]
print("rings", flush=True)
while True:
    for link in links:
        link.region.unwatched[:] = bytes(4)
        os.eventfd_write(link._bell.fd, 1)
"""

ROUNDS = """
import sys, time
from lora_server.transport import park
from lora_server.transport.shm import ShmLink
from lora_server.wire.messages import Hello
from tests.support.echo_client import Echo
park.SLEEP_SECONDS, park.SPIN_SECONDS = 10, float(sys.argv[3])
park.MAX_SPIN_SECONDS = park.MAX_SPIN_SECONDS if park.SPIN_SECONDS else 0
clients = [Echo(ShmLink(sys.argv[1], Hello(client, 1, b"key"), 7, 60), seed=client) for client in range(1, 5)]
slow = 0
for turn in range(int(sys.argv[2])):
    client, began = clients[turn * 7 % 5 % 4], time.monotonic()
    client.step(64)
    slow += time.monotonic() - began > 9
print(slow, flush=True)
"""


@pytest.mark.parametrize(
    ("shard", "spin"), [(bells.MAX_WATCHED, park.SPIN_SECONDS), (2, 1e-6), (0, 0.0)], indirect=["shard"]
)
def test_no_push_and_no_answer_is_missed_between_processes(shard, spin):
    """One that is costs the client's deadline, or 10 s. Few watched means that most have to ring; no spin, to park."""
    for client in range(1, 5):
        shard.port.grant(Grant(client, 1, b"key"))
    with running(ROUNDS, shard.listener.address, 4000, spin) as process:
        assert line_of(process, 170) == "0"


def test_clients_that_come_and_go_while_others_push_are_forgotten(shard):
    """Their bells, too, though a client keeps its own open."""
    dice, client, kept = random.Random(5), shard.client(1), []
    for other in range(2, 60):
        link = shard.join(other)
        if dice.random() < 0.5:
            link.push(1, 64) if dice.random() < 0.5 else None
            kept.append(os.dup(link._bell.fd))
            shard.port.revoke(other) if dice.random() < 0.5 else None
            link.close()
        client.step(64)
    for fd in kept:
        os.eventfd_write(fd, 1)
    for _ in range(20):
        client.step(64)
    live = {connection.client for connection in shard.port.connections}
    assert {one.client for one in shard.port._bells._by_fd.values()} <= live
    for fd in kept:
        os.close(fd)
