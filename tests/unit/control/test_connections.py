"""Which connections of a port end when there are too many of them."""

import contextlib
import resource
import socket
from pathlib import Path

import pytest

from lora_server.control.connections import ConnectionLimit, Peer
from tests.support.serving import HANG_SECONDS, has_ended, until


@contextlib.contextmanager
def port():
    """(a function that connects to it from an address, how this process sees that connection)."""
    with contextlib.ExitStack() as stack:
        own = stack.enter_context(socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True))

        def connect(host):
            there = stack.enter_context(socket.create_connection((host, own.getsockname()[1]), HANG_SECONDS))
            here, peer = own.accept()
            stack.enter_context(here)
            return there, Peer.of(*peer[:2])

        yield own.getsockname()[1], connect


def open_ones(connections):
    """Indices of those with an open other end.

    The age of those that came between two looks cannot be told: descriptors that anything else of this process closes
    meanwhile are given out again, in another order. So cases with many per look count them.
    """
    return [index for index, (sock, _) in enumerate(connections) if not has_ended(sock)]


def test_the_oldest_of_a_host_end_and_those_that_proved_something_stay():
    with port() as (number, connect), port() as (_, connect_elsewhere):
        limit = ConnectionLimit(number, max_of_a_host=3)
        here, elsewhere = [connect("127.0.0.1")], [connect_elsewhere("127.0.0.1") for _ in range(9)]
        limit.proven.add(here[0][1])
        for _ in range(7):
            here.append(connect("127.0.0.1"))
            limit.enforce()
        until(lambda: open_ones(here) == [0, 5, 6, 7], "the others have ended")
        assert len(open_ones(elsewhere)) == 9, "connections of other ports are not counted"
        here[0][0].close()
        limit.enforce()
        assert here[0][1] in limit.proven, "its end here is open still"


def test_a_peer_that_opens_a_connection_for_each_that_is_ended_opens_few():
    with port() as (number, connect):
        limit = ConnectionLimit(number, max_of_a_host=3, max_ended=2)
        connections = [connect("127.0.0.1") for _ in range(30)]
        for _ in range(5):
            limit.enforce()
            until(lambda: len(open_ones(connections)) == 28, "two end per look")
            connections.extend(connect("127.0.0.1") for _ in range(2))
        assert open_ones(connections)[-10:] == list(range(30, 40)), "those of later looks outlive those of the first"


def test_connections_that_are_far_too_many_end_at_once():
    with port() as (number, connect):
        limit = ConnectionLimit(number, max_of_a_host=3, max_ended=2, max_excess=10)
        connections = [connect("127.0.0.1") for _ in range(30)]
        limit.enforce()
        until(lambda: len(open_ones(connections)) == 13, "three may stay, ten wait to be ended")
        for _ in range(5):
            limit.enforce()
        until(lambda: len(open_ones(connections)) == 3, "the others have ended")


def test_few_free_descriptors_let_few_excess_connections_wait():
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with port() as (number, connect):
        limit = ConnectionLimit(number, max_of_a_host=3, max_ended=2)
        used = max(int(one.name) for one in Path("/proc/self/fd").iterdir())
        quarter = used // 2 + 50  # room for both ends of each connection, whatever else is open
        connections = [connect("127.0.0.1") for _ in range(quarter + 18)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (4 * quarter, most[1]))
        try:
            limit.enforce()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, most)
        until(lambda: len(open_ones(connections)) == 3 + quarter, "three, and a quarter of the descriptors")


@pytest.mark.parametrize(
    ("of_a_host", "in_all", "left"), [(2, 100, [0, 4, 5]), (100, 3, [0, 4, 5]), (100, 100, [*range(6)])]
)
def test_one_hosts_connections_end_no_other_hosts(of_a_host, in_all, left):
    with port() as (number, connect):
        limit = ConnectionLimit(number, of_a_host, in_all)
        connections = []
        for host in ("127.0.0.1", *["::1"] * 5):
            connections.append(connect(host))
            limit.enforce()
        until(lambda: open_ones(connections) == left, "the others have ended")


@pytest.mark.parametrize(("said", "peer"), [
    ("ipv4:10.0.0.1:50000", Peer.of("10.0.0.1", 50000)),
    ("ipv4:10.0.0.1:50000", Peer.of("::ffff:10.0.0.1", 50000)),
    ("ipv6:%5B::1%5D:7", Peer.of("::1", 7)),
    ("ipv6:%5Bfe80::1%252%5D:7", Peer.of("fe80::1%eth0", 7)),
    ("unix:", Peer("", 0)),  # no address is no peer of a socket
])  # fmt: skip
def test_grpc_and_sockets_mean_the_same_peer(said, peer):
    assert Peer.of_grpc(said) == peer
