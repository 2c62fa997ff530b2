"""A shard's loop leaves the core of a client that rings there, and keeps to the cores that it is given."""

import os
import socket
import threading

import pytest

from lora_server.transport import park
from lora_server.transport.base import Grant
from lora_server.transport.bells import Bell, Bells, make_bell
from lora_server.transport.shm import ShmConnection
from lora_server.wire.region import Region, RegionLayout

LAYOUT = RegionLayout(depth=1, request_bytes=4096, response_bytes=4096)
RINGS = 100


@pytest.fixture
def moves():
    """On these cores, a thread that is client and loop in one rings and hears it: how often it is on another core then.
    Also returns the cores that it may have in the end."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        region = Region(memoryview(bytearray(LAYOUT.nbytes)), LAYOUT)
        bells, bell = Bells(), Bell(region, make_bell())
        bells.add(ShmConnection(Grant(1, 1, b"key"), region, ours, bell))
        bells.rung()
        client, found = Bell(region, os.dup(bell.fd)), []

        def ring(cores):
            os.sched_setaffinity(0, cores)  # of this thread, which ends
            moved = 0
            for _ in range(RINGS):
                client.unwatched[0] = 1
                client.ring()
                bells.rung()
                moved += park.this_core() + 1 != client.rung_on[0]
            found.append((moved, os.sched_getaffinity(0)))

        def moves(cores):
            thread = threading.Thread(target=ring, args=(cores,))
            thread.start()
            thread.join(60)
            return found.pop()

        yield moves
        client.close()
        bell.close()


def test_a_loop_leaves_the_core_of_a_client_that_rang_there(moves):
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        pytest.skip("there is one core alone")
    moved, allowed = moves(cores)
    assert moved > RINGS / 2, "now and then the system moves it back before the look"
    assert allowed == cores


def test_a_loop_keeps_to_the_cores_that_an_operator_gives_it(moves):
    one = {min(os.sched_getaffinity(0))}
    assert moves(one) == (0, one)
