"""A shard's loop leaves the core of a client that rings there, and keeps to the cores that it is given."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from lora_server.transport import park
from lora_server.transport.base import Grant
from lora_server.transport.bells import Bell, Bells, make_bell
from lora_server.transport.shm import ShmConnection
from lora_server.wire.region import Region, RegionLayout

LAYOUT = RegionLayout(depth=1, request_bytes=4096, response_bytes=4096)
CORES = os.sched_getaffinity(0)
pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="a single core cannot be left")


@pytest.fixture
def rings():
    """Run a function on a thread that is client and loop in one. It gets a function that rings and hears it, until the
    thread's cores change, and returns the core on which it rang; None where they do not change."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        region = Region(memoryview(bytearray(LAYOUT.nbytes)), LAYOUT)
        bells, bell = Bells(), Bell(region, make_bell())
        bells.add(ShmConnection(Grant(1, 1, b"key"), region, ours, bell))
        bells.rung()
        client = Bell(region, os.dup(bell.fd))

        def ring(tries=100):
            for _ in range(tries):  # the thread may move between the two
                before, core = os.sched_getaffinity(0), park.this_core()
                client.unwatched[0] = 1
                client.ring()
                bells.rung()
                if client.rung_on[0] == core + 1 and os.sched_getaffinity(0) != before:
                    return core
            return None

        with ThreadPoolExecutor(1) as thread:  # whose cores end with it
            yield lambda act: thread.submit(act, ring).result(60)
        client.close()
        bell.close()


def test_a_loop_leaves_the_core_of_a_client_that_rang_there(rings):
    def act(ring):
        first = ring()
        left = os.sched_getaffinity(0)
        second = ring()
        return first, left, second, os.sched_getaffinity(0)

    first, left, second, again = rings(act)
    assert first in CORES and left == CORES - {first}
    assert second in left and again == CORES - {second}, "it may have the core that it left before"


def test_a_loop_keeps_to_the_cores_that_an_operator_gives_it(rings):
    def act(ring):
        one = {ring()}  # not those that it keeps to by itself
        os.sched_setaffinity(0, one)
        return ring(), os.sched_getaffinity(0) == one

    assert rings(act) == (None, True)
