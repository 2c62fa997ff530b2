"""What every transport promises; what only one of them has is in test_transport_shm.py and test_transport_tls.py."""

import contextlib
import gc
import os
import random
import resource
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from structlog.testing import capture_logs

from client_connector.connect import connect, tell_far, why_far
from lora_server.access.tls import shard_certificate
from lora_server.errors import LeaseError, ShardUnavailableError, StepTimeoutError
from lora_server.timings import Timings
from lora_server.transport.address import parse
from lora_server.transport.base import Grant, Port
from lora_server.transport.frames import HEADER
from lora_server.transport.tcp import TcpLink
from lora_server.transport.tcp_listener import TcpListener
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire import messages
from lora_server.wire.host import host_identity
from lora_server.wire.messages import Hello
from lora_server.wire.region import RegionLayout
from tests.support.clocks import VirtualClock
from tests.support.echo import KINDS, echo_shard
from tests.support.echo_client import LAYOUT, SECONDS, SHARD
from tests.support.serving import heard, until

on_tcp = pytest.mark.parametrize("shard", ["tcp", "tls"], indirect=True)
on_sockets = pytest.mark.parametrize("shard", ["shm", "tcp", "tls"], indirect=True)


@pytest.fixture(params=KINDS)
def shard(request, tmp_path):
    with echo_shard(request.param, tmp_path) as found:
        yield found


@pytest.fixture
def other(shard):
    """A client that is served before a test does its worst, and afterwards."""
    other = shard.client(9)
    other.step()
    yield other
    other.step()


def wait_of(client, seq):
    return client.link.wait(seq, time.monotonic() + SECONDS)


def test_steps_of_two_clients_in_flight_wrap_all_slots(shard):
    pick, clients = random.Random(2), [shard.client(1), shard.client(2)]
    for _ in range(300 if shard.kind.startswith("device") else 3000):
        client = pick.choice(clients)
        if len(client.sent) == LAYOUT.depth or (client.sent and pick.random() < 0.5):
            client.check(min(client.sent))
        else:
            client.push()
    for client in clients:
        for seq in sorted(client.sent):
            client.check(seq)
        client.step(4), client.step(LAYOUT.response_bytes)


@on_sockets
def test_clients_are_served_in_threads_of_their_own(shard):
    def work(client):
        for _ in range(500):
            client.step()

    clients = [shard.client(number) for number in (1, 2, 3)]
    with ThreadPoolExecutor(len(clients)) as pool:
        assert list(pool.map(work, clients)) == [None] * 3


def test_a_timeout_names_shard_slot_and_seq(shard):
    client = shard.client(1)
    client.step()
    shard.paused.set()
    seq, began = client.push(), time.monotonic()
    with pytest.raises(StepTimeoutError, match=rf"shard {SHARD} slot 2 seq 2: .*last answered: seq 1"):
        client.link.wait(seq, began + 0.2)
    assert 0.2 <= time.monotonic() - began < 30
    with pytest.raises(StepTimeoutError):
        client.link.wait(seq, began)
    shard.resume()
    client.check(seq)
    client.step()


@pytest.mark.parametrize(
    ("client", "epoch", "key"), [(1, 2, b"wrong"), (1, 1, b"key"), (1, 3, b"key"), (9, 2, b"key"), (1, 2, b"")]
)
def test_only_the_granted_lease_connects(shard, client, epoch, key):
    shard.port.grant(Grant(1, 1, b"key"))
    shard.port.grant(Grant(1, 2, b"key"))
    with pytest.raises(LeaseError, match=f"client {client} epoch {epoch}"):
        shard.link(client, epoch, key)
    assert shard.port.connections == () and shard.gone == []
    shard.link(1, 2).push(1, 64)


def test_a_client_that_was_told_another_placement_is_refused(shard):
    """Nor are its steps served once its lease is granted for the next generation."""
    shard.port.grant(Grant(1, 1, b"key"))
    with pytest.raises(LeaseError, match="got placement generation 2, expected 1; join again"):
        shard.link(1, generation=2)
    client = shard.client(2)
    client.step()
    shard.port.grant(Grant(2, 1, b"key", generation=2))
    with pytest.raises(ShardUnavailableError):
        client.step()
    with pytest.raises(LeaseError, match="got placement generation 1, expected 2; join again"):
        shard.link(2)
    shard.link(2, generation=2).push(1, 64)


def test_revocation_ends_a_wait_promptly(shard):
    other, client = shard.client(2), shard.client(1)
    client.step()
    shard.paused.set()
    seq, revoked = client.push(), []

    def revoke():
        revoked.append(time.monotonic())
        shard.port.revoke(1)

    if shard.kind == "inproc":  # one thread: the wait itself runs the shard, which hears of the revocation
        client.link._pump = lambda: bool(revoke())
    else:
        threading.Timer(0.05, revoke).start()
    with pytest.raises(ShardUnavailableError, match=rf"shard {SHARD} .*seq {seq}"):
        wait_of(client, seq)
    assert time.monotonic() - revoked[0] < 30
    with pytest.raises(LeaseError):
        shard.link(1)
    shard.resume()
    other.step()
    assert shard.gone == [], "the one that revokes knows already"


def test_a_close_is_noticed_and_idempotent(shard):
    stays, leaves = shard.client(1, epoch=4), shard.client(2, epoch=5)
    leaves.step()
    leaves.link.close()
    leaves.link.close()
    until(lambda: shard.gone == [(2, 5)], "on_gone(client, epoch)")
    assert [c.grant.client for c in shard.port.connections] == [1]
    stays.step()
    stays.link.close()
    until(lambda: shard.gone == [(2, 5), (1, 4)], "on_gone of the last")
    assert shard.port.connections == ()


def test_late_pushes_of_an_old_epoch_are_never_seen(shard):
    old = shard.client(1, epoch=1)
    old.step()
    new = shard.client(1, epoch=2)
    for _ in range(50):
        try:
            old.push()
        except ShardUnavailableError:  # allowed to say so at once
            break
        new.step()
    (connection,) = shard.port.connections
    assert (connection.grant.epoch, connection.served) == (2, new.seq)
    with pytest.raises(ShardUnavailableError):
        wait_of(old, old.seq)
    new.link.close()
    until(lambda: shard.gone == [(1, 2)], "only the new epoch's end is news")


def test_a_push_beyond_depth_overwrites_nothing(shard, other):
    """The client breaks the rule of the window; what it pushed by the rule stays, or it is cut off."""
    client = shard.client(1)
    shard.paused.set()
    for _ in range(LAYOUT.depth):
        client.push(64)
    connection = shard.connection(1)
    until(lambda: connection.requested() == LAYOUT.depth, "the pushes to land")

    def stored():
        return [bytes(connection.region.request(seq)[:64]) for seq in range(1, LAYOUT.depth + 1)]

    before = stored()
    if shard.kind in ("tcp", "tls"):  # elsewhere the slot is the client's own memory
        client.push(64)
        with pytest.raises(ShardUnavailableError):
            wait_of(client, client.seq)
        assert stored() == before and connection.requested() == LAYOUT.depth
        assert shard.gone == [(1, 1)]
    shard.resume()


STRANGE = [b"GET / HTTP/1.1\r\n\r\n", HEADER.pack(1, 5, 0) + b"\xc1abcd", HEADER.pack(1, 2**32 - 1, 0)]
STRANGE += [HEADER.pack(1, messages.MAX_MESSAGE_BYTES + 1, 0), HEADER.pack(9, 1, 2**64 - 1) + b"x"]
STRANGE += [HEADER.pack(3, 0, 0), HEADER.pack(2, 4, 1) + b"xxxx"]  # the last is a step, without a lease


@on_tcp
@pytest.mark.parametrize("sent", STRANGE)
def test_what_an_unauthenticated_peer_sends_costs_its_connection(shard, other, sent):
    with socket.create_connection(parse(shard.listener.address), SECONDS) as stranger:
        stranger.sendall(sent)
        assert_ends(stranger)


HALF_A_HANDSHAKE = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"


def assert_ends(stranger):
    """After the challenge, and perhaps a refusal."""
    stranger.settimeout(SECONDS)
    heard(stranger)


@on_tcp
@pytest.mark.parametrize(
    ("seq", "nbytes"), [(2, LAYOUT.request_bytes + 1), (1, 4), (2 + LAYOUT.depth, 4), (2**64 - 1, 4), (2, 2**32 - 1)]
)
def test_a_client_that_pushes_what_it_may_not_is_cut_off(shard, other, seq, nbytes):
    """More than its slot takes, what was pushed before, beyond its slots: no byte of it is stored."""
    client = shard.client(1)
    client.step()
    client.link._socket.sendmsg([HEADER.pack(2, nbytes, seq), b"abcd"])
    with pytest.raises(ShardUnavailableError):
        wait_of(client, 2)
    until(lambda: shard.gone == [(1, 1)], "its lease to end")


@pytest.mark.parametrize("kind", ["tcp", "tls"])
def test_unauthenticated_peers_are_few_and_end_soon(kind, tmp_path):
    clock = VirtualClock()
    with contextlib.ExitStack() as stack:
        shard = stack.enter_context(echo_shard(kind, tmp_path, max_unauthenticated=4, clock=clock))
        client = shard.client(1)
        client.step()
        connect = lambda: stack.enter_context(socket.create_connection(parse(shard.listener.address), SECONDS))  # noqa: E731
        strangers = [connect() for _ in range(50)]
        for one in strangers if kind == "tls" else ():
            with contextlib.suppress(OSError):
                one.sendall(HALF_A_HANDSHAKE)
        shard.client(2).step()
        for one in strangers[:46]:  # the oldest had to go
            assert_ends(one)
        clock.advance(Timings.handshake + 1)
        for one in strangers[46:]:
            assert_ends(one)
        client.step()


def test_over_tcp_both_sides_prove_the_lease_and_neither_sends_its_key(tmp_path):
    """A process that listens in place of a dead shard learns nothing that it could use there, and is no shard."""
    with echo_shard("tcp", tmp_path) as shard, socket.create_server(("127.0.0.1", 0)) as impostor:
        told: list[bytes] = []

        def pose():
            victim, _ = impostor.accept()
            with victim, socket.create_connection(parse(shard.listener.address), SECONDS) as true:
                challenge = true.recv(4096)
                victim.sendall(challenge)
                told.append(victim.recv(4096))
                welcome = messages.encode(messages.Welcome(3, 8192, 4096, proof=bytes(32)))
                victim.sendall(HEADER.pack(1, len(welcome), 0) + welcome)
                victim.recv(1)

        thread = threading.Thread(target=pose, daemon=True)
        thread.start()
        with pytest.raises(ShardUnavailableError, match="does not know this lease"):
            shard.join(1, at=f"tcp://127.0.0.1:{impostor.getsockname()[1]}")
        thread.join(SECONDS)
        assert told and b"key" not in told[0]
        with socket.create_connection(parse(shard.listener.address), SECONDS) as replay:
            replay.recv(4096)
            replay.sendall(told[0])  # an answer to another challenge
            replay.settimeout(SECONDS)
            assert b"no such lease" in replay.recv(4096)


@pytest.mark.parametrize("certificate", [None, shard_certificate(SHARD)], ids=["clear", "tls"])
def test_large_frames_do_not_hold_the_engine_up(certificate):
    """A shard that is busy elsewhere takes its time; the push returns, and the answer is complete."""
    nbytes = 32 << 20
    port = Port(RegionLayout(depth=2, request_bytes=nbytes, response_bytes=nbytes))
    port.grant(Grant(1, 1, b"key"))
    listener = TcpListener(port, "127.0.0.1", certificate=certificate)
    try:
        link = TcpLink(listener.address, Hello(1, 1, b"key"), SHARD, SECONDS, certificate.der if certificate else b"")
        data = random.Random(3).randbytes(nbytes)
        for seq in (1, 2, 3):
            link.region.request(seq)[:] = data
            link.push(seq, nbytes)
            until(lambda: port.connections and port.connections[0].requested() == seq, "it is there")  # noqa: B023
            (connection,) = port.connections
            connection.region.response(seq)[:] = connection.region.request(seq)
            connection.served = seq
            connection.respond(seq, nbytes)
            link.wait(seq, time.monotonic() + SECONDS)
            assert bytes(link.region.response(seq)) == data
        link.close()
        until(lambda: not port.connections, "it said goodbye")
    finally:
        listener.close()


@on_sockets
def test_a_listener_that_closes_ends_waits(shard):
    client = shard.client(1)
    client.step()
    shard.paused.set()
    seq = client.push()
    closer = threading.Timer(0.05, shard.listener.close)
    closer.start()
    began = time.monotonic()
    with pytest.raises(ShardUnavailableError):
        wait_of(client, seq)
    assert time.monotonic() - began < 30
    closer.join(SECONDS)
    with pytest.raises((ShardUnavailableError, LeaseError)):
        shard.link(1, seconds=0.3)


@on_sockets
def test_joining_and_leaving_leaks_no_descriptor(shard):
    process = psutil.Process()

    def join_and_leave(number):
        client = shard.client(number)
        client.step()
        client.link.close()

    def settled():
        gc.collect()
        return not shard.port.connections

    join_and_leave(1)
    until(settled, "the warm-up to leave")
    before = process.num_fds()
    for number in range(2, 52):
        join_and_leave(number)
    until(settled, "all to leave")
    until(lambda: process.num_fds() <= before, f"{process.num_fds()} descriptors to become {before}")


def test_a_link_may_have_any_descriptor(tmp_path):
    """Engines have many, and select(2) takes none above 1023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1024):
            stack.enter_context(Path("/dev/null").open())
        stack.enter_context(echo_shard("tcp", tmp_path)).client(1).step()


# ---- what `auto` takes


def test_auto_says_why_it_goes_over_tcp(tmp_path):
    (tmp_path / "shard-0.sock").touch()
    here = {"host": host_identity(), "tcp": "tcp://h:1"}
    near = pb.Endpoint(shard=0, shm=str(tmp_path / "shard-0.sock"), **here)
    unseen = [pb.Endpoint(shard=shard, shm=f"/run/elsewhere/shard-{shard}.sock", **here) for shard in (1, 2)]
    arm = pb.Endpoint(shard=3, **here)
    far = pb.Endpoint(shard=4, host="another", shm=near.shm, tcp="tcp://h:1")
    assert (why_far(near), bool(why_far(arm))) == ("", True)
    with capture_logs() as lines:
        tell_far([near, *unseen, arm, far])
    assert {line["event"] for line in lines} == {"activations go over TCP"}
    levels = [(line["log_level"], line["shards"]) for line in lines]
    assert levels == [("warning", [1, 2]), ("warning", [3]), ("info", [4])]
    assert "/run/elsewhere cannot be seen" in lines[0]["reason"] and "--data-dir" in lines[0]["reason"]
    with capture_logs() as lines:
        tell_far([near])
    assert lines == []


@pytest.mark.parametrize("transport", ["auto", "shm"])
def test_a_shard_that_ended_is_unavailable_and_not_elsewhere(tmp_path, transport):
    """Its socket is gone before the controller knows, and an engine that joins meanwhile tries again."""
    gone = pb.Endpoint(shard=0, host=host_identity(), shm=str(tmp_path / "shard-0.sock"), tcp="tcp://127.0.0.1:1")
    with pytest.raises(ShardUnavailableError):
        connect(gone, Hello(1, 1, b""), transport, seconds=1.0)


def test_an_engine_of_another_user_goes_over_tcp(tmp_path):
    """It may not look into the server's directory."""
    (tmp_path / "shard").touch()
    near = pb.Endpoint(shard=0, host=host_identity(), shm=str(tmp_path / "shard"), tcp="tcp://127.0.0.1:1")
    with another_user(tmp_path):
        assert "is another user's" in why_far(near)
    assert why_far(near) == ""


@contextlib.contextmanager
def another_user(directory):
    """For root in earnest; for others the directory is nobody's."""
    user = os.geteuid()
    directory.chmod(0o700 if user == 0 else 0)
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)
        directory.chmod(0o700)
