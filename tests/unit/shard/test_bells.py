"""Bells: idle clients cost the loop nothing, none holds what another's wake-up needs, and none is missed."""

from __future__ import annotations

import contextlib
import os
import random
import socket

import pytest

from lora_server.transport import bells
from lora_server.transport.base import Grant
from lora_server.wire import messages
from lora_server.wire.messages import Hello
from tests.support.echo import SECONDS, Echo, echo_shard
from tests.support.processes import end, line_of, start
from tests.support.serving import until

IDLE, STEPS = 300, 300


@pytest.fixture
def shard(tmp_path):
    with echo_shard("shm", tmp_path) as found:
        yield found


def test_nobody_looks_at_idle_clients(shard, monkeypatch):
    """Each was looked at in every round once: 300 of them made a step several times as long."""
    looks, look = [], bells.Bells._watch
    monkeypatch.setattr(bells.Bells, "_watch", lambda self, one: looks.append(one.client) or look(self, one))
    with contextlib.ExitStack() as stack:
        for other in range(1, IDLE + 1):
            idle = Echo(shard.join(other), seed=other)
            stack.callback(idle.link.close)
            idle.check(idle.push(64))
        client = Echo(shard.join(IDLE + 1), seed=1)
        stack.callback(client.link.close)
        client.check(client.push(64))
        until(lambda: len(shard.port._bells._watched) <= bells.MAX_WATCHED, "most are left to ring")
        looks.clear()
        for _ in range(STEPS):
            client.check(client.push(64))
        assert sum(one != IDLE + 1 for one in looks) <= bells.MAX_WATCHED, "an idle one had to ring, at most"


def test_what_one_client_is_given_wakes_nobody_else(shard):
    """A page that all could write, and a word of it that one could keep at zero, made others wait."""
    given = []
    for client in (1, 2):
        shard.port.grant(Grant(client, 1, b"key"))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(SECONDS)
            sock.connect(shard.listener.address)
            sock.send(messages.encode(Hello(client, 1, b"key")))
            given.append(socket.recv_fds(sock, messages.MAX_MESSAGE_BYTES, 8)[1])
    region, bell = zip(*given, strict=True)
    assert len({os.fstat(fd).st_ino for fd in region}) == 2
    os.eventfd_write(bell[0], 5)
    with pytest.raises(BlockingIOError):
        os.eventfd_read(bell[1])  # nobody rang this one
    for fd in (*region, *bell):
        os.close(fd)


def test_who_rings_for_nothing_keeps_nobody_from_being_served(shard):
    client = Echo(shard.join(1), seed=1)
    process = start(RINGER, shard.listener.address, *map(ring_key, range(2, 34), [shard] * 32))
    try:
        assert line_of(process) == "rings"
        for _ in range(STEPS):
            client.check(client.push(64))
    finally:
        end(process)
    client.check(client.push())
    client.link.close()


def ring_key(client, shard):
    shard.port.grant(Grant(client, 1, b"key"))
    return client


RINGER = """
import os, sys
from lora_server.transport.shm import ShmLink
from lora_server.wire.messages import Hello
links = [ShmLink(sys.argv[1], Hello(int(client), 1, b"key"), 7) for client in sys.argv[2:]]
print("rings", flush=True)
while True:
    for link in links:
        link.region.unwatched[:] = bytes(4)
        os.eventfd_write(link._bell.fd, 1)
"""

ROUNDS = """
import sys, time
from lora_server.transport.park import SLEEP_SECONDS
from lora_server.transport.shm import ShmLink
from lora_server.wire.messages import Hello
from tests.support.echo import Echo
clients = [Echo(ShmLink(sys.argv[1], Hello(client, 1, b"key"), 7), seed=client) for client in range(1, 5)]
slow = 0
for turn in range(int(sys.argv[2])):
    client, began = clients[turn * 7 % 5 % 4], time.monotonic()
    client.check(client.push(64))
    slow += time.monotonic() - began > 0.9 * SLEEP_SECONDS
print(slow, flush=True)
"""


@pytest.mark.parametrize("watched", [bells.MAX_WATCHED, 2, 0])
def test_no_push_is_missed_between_processes(shard, monkeypatch, watched):
    """Each that was would cost SLEEP_SECONDS, or the client's deadline. Few watched means that most have to ring."""
    monkeypatch.setattr(bells, "MAX_WATCHED", watched)
    for client in range(1, 5):
        shard.port.grant(Grant(client, 1, b"key"))
    rounds = 10_000
    process = start(ROUNDS, shard.listener.address, rounds)
    try:
        slow = int(line_of(process, 300))
    finally:
        end(process)
    assert slow < 0.01 * rounds


def test_clients_that_come_and_go_while_others_push_are_forgotten(shard):
    """Their bells, too, though a client keeps its own open."""
    dice, client = random.Random(5), Echo(shard.join(1), seed=1)
    kept, stack = [], contextlib.ExitStack()
    for other in range(2, 60):
        link = shard.join(other)
        if dice.random() < 0.5:
            link.push(1, 64) if dice.random() < 0.5 else None
            kept.append(os.dup(link._bell.fd))
            shard.port.revoke(other) if dice.random() < 0.5 else None
            link.close()
        else:
            stack.callback(link.close)
        client.check(client.push(64))
    for fd in kept:
        os.eventfd_write(fd, 1)
    for _ in range(20):
        client.check(client.push(64))
    live = {connection.client for connection in shard.port.connections}
    assert {one.client for one in shard.port._bells._by_fd.values()} <= live
    for fd in kept:
        os.close(fd)
    stack.close()
    client.link.close()
