"""One conformance suite over every transport; what only one of them has is in test_transport_shm.py."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import resource
import socket
import threading
import time

import psutil
import pytest
import torch
from structlog.testing import capture_logs

from lora_server.access.certificate import shard_certificate
from lora_server.errors import LeaseError, ProtocolError, ShardUnavailableError, StepTimeoutError
from lora_server.transport import tcp_listener
from lora_server.transport.address import parse
from lora_server.transport.base import Grant, Port
from lora_server.transport.connect import tell_far, why_far
from lora_server.transport.frames import HEADER
from lora_server.transport.rows import TORCH_DTYPES
from lora_server.transport.tcp import TcpLink
from lora_server.transport.tcp_listener import TcpListener
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire import messages, slot
from lora_server.wire.host import host_identity
from lora_server.wire.messages import Hello
from lora_server.wire.region import RegionLayout
from tests.support.echo import DEVICES, KINDS, LAYOUT, SECONDS, SHARD, Echo, double, echo_shard, header_of
from tests.support.serving import until


@pytest.fixture(params=KINDS)
def shard(request, tmp_path):
    with echo_shard(request.param, tmp_path) as found:
        yield found


def test_thousands_of_steps_wrap_all_slots(shard):
    client = Echo(shard.join(1), seed=1)
    for _ in range(300 if shard.kind.startswith("device") else 3000):
        client.check(client.push())
    client.check(client.push(4)), client.check(client.push(LAYOUT.response_bytes))
    client.link.close()


def test_two_clients_interleave_with_steps_in_flight(shard):
    pick = random.Random(2)
    clients = [Echo(shard.join(client), seed=client) for client in (1, 2)]
    for _ in range(200 if shard.kind.startswith("device") else 1500):
        client = pick.choice(clients)
        if len(client.sent) == LAYOUT.depth or (client.sent and pick.random() < 0.5):
            client.check(min(client.sent))
        else:
            client.push()
    for client in clients:
        for seq in sorted(client.sent):
            client.check(seq)
        client.link.close()


@pytest.mark.parametrize("shard", ["shm", "tcp", "tls"], indirect=True)
def test_clients_in_threads_of_their_own(shard):
    failures = []

    def work(client):
        try:
            for _ in range(500):
                client.check(client.push())
        except BaseException as error:  # the test's thread reports it
            failures.append(error)

    clients = [Echo(shard.join(client), seed=client) for client in (1, 2, 3)]
    threads = [threading.Thread(target=work, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for client in clients:
        client.link.close()
    assert not failures


def test_a_timeout_names_shard_slot_and_seq(shard):
    client = Echo(shard.join(1), seed=3)
    client.check(client.push())
    shard.paused.set()
    seq, began = client.push(), time.monotonic()
    with pytest.raises(StepTimeoutError, match=rf"shard {SHARD} slot 2 seq 2: .*last answered: seq 1"):
        client.link.wait(seq, began + 0.2)
    assert 0.2 <= time.monotonic() - began < 30
    with pytest.raises(StepTimeoutError):
        client.link.wait(seq, began)
    shard.resume()
    client.check(seq)
    client.check(client.push())
    client.link.close()


@pytest.mark.parametrize(
    ("client", "epoch", "key"), [(1, 2, b"wrong"), (1, 1, b"key"), (1, 3, b"key"), (9, 2, b"key"), (1, 2, b"")]
)
def test_only_the_granted_lease_connects(shard, client, epoch, key):
    shard.port.grant(Grant(1, 1, b"key"))
    shard.port.grant(Grant(1, 2, b"key"))
    with pytest.raises(LeaseError, match=f"client {client} epoch {epoch}"):
        shard.link(client, epoch, key)
    assert shard.port.connections == () and shard.gone == []
    link = shard.link(1, 2)
    Echo(link, seed=4).push()
    link.close()


def test_revocation_ends_a_wait_promptly(shard):
    other, client = Echo(shard.join(2), seed=5), Echo(shard.join(1), seed=5)
    client.check(client.push())
    shard.paused.set()
    seq, revoked = client.push(), []

    def revoke():
        revoked.append(time.monotonic())
        shard.port.revoke(1)

    if shard.kind == "inproc":  # one thread: the wait itself runs the shard, which hears of the revocation
        client.link._pump = lambda: bool(revoke())
    else:
        revoker = threading.Timer(0.05, revoke)
        revoker.start()
    with pytest.raises(ShardUnavailableError, match=rf"shard {SHARD} .*seq {seq}"):
        client.link.wait(seq, time.monotonic() + 60)
    assert time.monotonic() - revoked[0] < 30
    with pytest.raises(LeaseError):
        shard.link(1)
    shard.resume()
    other.check(other.push())
    assert shard.gone == [], "the one who revokes knows already"
    client.link.close(), other.link.close()


def test_a_close_is_noticed_and_idempotent(shard):
    stays, leaves = Echo(shard.join(1, epoch=4), seed=6), Echo(shard.join(2, epoch=5), seed=6)
    leaves.check(leaves.push())
    leaves.link.close()
    leaves.link.close()
    until(lambda: shard.gone == [(2, 5)], "on_gone(client, epoch)")
    assert [c.client for c in shard.port.connections] == [1]
    stays.check(stays.push())
    stays.link.close()
    until(lambda: shard.gone == [(2, 5), (1, 4)], "on_gone of the last")
    assert shard.port.connections == ()


def test_late_pushes_of_an_old_epoch_are_never_seen(shard):
    old = Echo(shard.join(1, epoch=1), seed=7)
    old.check(old.push())
    new = Echo(shard.join(1, epoch=2), seed=8)
    for _ in range(50):
        try:
            old.push()
        except ShardUnavailableError:  # allowed to say so at once
            break
        new.check(new.push())
    (connection,) = shard.port.connections
    assert (connection.epoch, connection.served) == (2, new.seq)
    with pytest.raises(ShardUnavailableError):
        old.link.wait(old.seq, time.monotonic() + SECONDS)
    old.link.close(), new.link.close()
    until(lambda: shard.gone == [(1, 2)], "only the new epoch's end is news")


def test_a_push_beyond_depth_overwrites_nothing(shard):
    """The client breaks the rule of the window; what it pushed by the rule stays, or it is cut off."""
    client, other = Echo(shard.join(1), seed=9), Echo(shard.join(2), seed=9)
    shard.paused.set()
    for _ in range(LAYOUT.depth):
        client.push(64)
    (connection,) = (c for c in shard.port.connections if c.client == 1)
    until(lambda: connection.requested() == LAYOUT.depth, "the pushes to land")
    before = [bytes(connection.region.request(seq)[:64]) for seq in range(1, LAYOUT.depth + 1)]
    if shard.kind in ("tcp", "tls"):  # elsewhere the slot is the client's own memory
        client.push(64)
        with pytest.raises(ShardUnavailableError):
            client.link.wait(client.seq, time.monotonic() + SECONDS)
        after = [bytes(connection.region.request(seq)[:64]) for seq in range(1, LAYOUT.depth + 1)]
        assert after == before and connection.requested() == LAYOUT.depth
        assert shard.gone == [(1, 1)]
    shard.resume()
    other.check(other.push())
    client.link.close(), other.link.close()


@pytest.mark.parametrize("width", [8, 24, 5])
@pytest.mark.parametrize("dtype", range(len(slot.DTYPES)))
def test_rows_go_there_and_back(shard, dtype, width):
    """Wherever a transport keeps them, both ends find the same rows, in every slot, next to each other's tables."""
    if shard.kind == "device twin" and dtype == 0:
        pytest.skip("a twin holds rows of 16 bits, or of 8")
    shard.answer, link, pick = double, shard.join(1), torch.Generator().manual_seed(dtype)
    for seq in range(1, 2 * LAYOUT.depth + 1):
        x = torch.randn(9, width, generator=pick)
        x = x.to(TORCH_DTYPES[dtype]) if dtype != slot.E4M3 else x.sign() * 3.0  # which 8 bits hold, and their double
        rows = torch.randperm(9, generator=pick)[: seq % 4 * 2]
        header = header_of(link, seq, len(rows), width, width - 1, dtype)
        header.pack_into(link.region.request(seq))
        link.put_rows(header, x, rows)
        link.push(seq, slot.HEADER_BYTES + header.payload_bytes)
        link.wait(seq, time.monotonic() + SECONDS)
        assert torch.equal(link.rows.deltas(header, x), x[rows][:, :-1] * 2)
    link.close()


@pytest.mark.parametrize("shard", DEVICES[1:], indirect=True)
def test_a_twin_refuses_rows_of_32_bits(shard):
    link = shard.join(1)
    with pytest.raises(ProtocolError, match="got float32 rows in GPU memory, expected bfloat16 or float16"):
        link.put_rows(header_of(link, 1, 2, 8, 8, 0), torch.zeros(2, 8), torch.arange(2))
    link.close()


@pytest.mark.parametrize("shard", ["inproc", "shm", "tcp"], indirect=True)
def test_who_has_no_device_routes_nothing(shard):
    link = shard.join(1)
    with pytest.raises(ProtocolError, match="routes nothing"):
        link.put_routed(header_of(link, 1, 2, 8, 8, 1), torch.zeros(2, 8), None, False)
    link.close()


def assert_ends(stranger):
    """After the challenge, and perhaps a refusal."""
    stranger.settimeout(SECONDS)
    with contextlib.suppress(ConnectionResetError):
        while stranger.recv(4096):
            pass


@pytest.mark.parametrize("shard", ["tcp", "tls"], indirect=True)
@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        HEADER.pack(1, 5, 0) + b"\xc1abcd",
        HEADER.pack(1, messages.MAX_MESSAGE_BYTES + 1, 0),
        HEADER.pack(1, 2**32 - 1, 0),
        HEADER.pack(2, 4, 1) + b"xxxx",  # a step, without a lease
        HEADER.pack(3, 0, 0),
        HEADER.pack(9, 1, 2**64 - 1) + b"x",
    ],
)
def test_what_a_stranger_sends_costs_its_connection(shard, sent):
    client = Echo(shard.join(1), seed=10)
    with socket.create_connection(parse(shard.listener.address), SECONDS) as stranger:
        stranger.sendall(sent)
        assert_ends(stranger)
    client.check(client.push())
    client.link.close()


@pytest.mark.parametrize("shard", ["tcp", "tls"], indirect=True)
@pytest.mark.parametrize(
    ("seq", "nbytes"), [(2, LAYOUT.request_bytes + 1), (1, 4), (2 + LAYOUT.depth, 4), (2**64 - 1, 4), (2, 2**32 - 1)]
)
def test_a_client_that_pushes_what_it_may_not_is_cut_off(shard, seq, nbytes):
    """More than its slot takes, what was pushed before, beyond its slots: no byte of it is stored."""
    client, other = Echo(shard.join(1), seed=10), Echo(shard.join(2), seed=11)
    client.check(client.push())
    client.link._socket.sendmsg([HEADER.pack(2, nbytes, seq), b"abcd"])
    with pytest.raises(ShardUnavailableError):
        client.link.wait(2, time.monotonic() + SECONDS)
    until(lambda: shard.gone == [(1, 1)], "its lease ends")
    other.check(other.push())
    for one in (client, other):
        one.link.close()


@pytest.mark.parametrize("shard", ["tcp", "tls"], indirect=True)
def test_strangers_are_few_and_end_soon(shard, monkeypatch):
    monkeypatch.setattr(tcp_listener, "MAX_STRANGERS", 4)
    client = Echo(shard.join(1), seed=12)
    with contextlib.ExitStack() as stack:
        connect = lambda: stack.enter_context(socket.create_connection(parse(shard.listener.address), SECONDS))  # noqa: E731
        strangers = [connect() for _ in range(50)]
        for one in strangers[:46]:  # the oldest had to go
            assert_ends(one)
        monkeypatch.setattr(tcp_listener, "HANDSHAKE_SECONDS", 0.1)
        connect()
        for one in strangers[46:]:
            assert_ends(one)
    client.check(client.push())
    client.link.close()


def test_over_tcp_both_sides_prove_the_lease_and_nobody_sends_its_key(tmp_path):
    """Whoever listens in place of a dead shard learns nothing that it could use there, and is no shard."""
    with echo_shard("tcp", tmp_path) as shard, socket.create_server(("127.0.0.1", 0)) as impostor:
        shard.port.grant(Grant(1, 1, b"key"))
        heard: list[bytes] = []

        def pose():
            victim, _ = impostor.accept()
            with victim, socket.create_connection(parse(shard.listener.address), SECONDS) as true:
                challenge = true.recv(4096)
                victim.sendall(challenge)
                heard.append(victim.recv(4096))
                welcome = messages.encode(messages.Welcome(3, 8192, 4096, proof=bytes(32)))
                victim.sendall(HEADER.pack(1, len(welcome), 0) + welcome)
                victim.recv(1)

        thread = threading.Thread(target=pose, daemon=True)
        thread.start()
        address = f"tcp://127.0.0.1:{impostor.getsockname()[1]}"
        with pytest.raises(ShardUnavailableError, match="does not know this lease"):
            TcpLink(address, Hello(1, 1, b"key"), SHARD, SECONDS)
        thread.join(SECONDS)
        assert heard and b"key" not in heard[0]
        with socket.create_connection(parse(shard.listener.address), SECONDS) as replay:
            replay.recv(4096)
            replay.sendall(heard[0])  # an answer to another challenge
            replay.settimeout(SECONDS)
            assert b"no such lease" in replay.recv(4096)


@pytest.mark.parametrize("certificate", [None, shard_certificate(SHARD)], ids=["clear", "tls"])
def test_large_frames_do_not_hold_the_engine_up(certificate):
    """A shard that is busy elsewhere takes its time; the push returns, and the answer is whole."""
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


@pytest.mark.parametrize("shard", ["shm", "tcp", "tls"], indirect=True)
def test_a_listener_that_closes_ends_waits(shard):
    client = Echo(shard.join(1), seed=11)
    client.check(client.push())
    shard.paused.set()
    seq = client.push()
    closer = threading.Timer(0.05, shard.listener.close)
    closer.start()
    began = time.monotonic()
    with pytest.raises(ShardUnavailableError):
        client.link.wait(seq, began + 60)
    assert time.monotonic() - began < 30
    closer.join(SECONDS)
    client.link.close()
    with pytest.raises((ShardUnavailableError, LeaseError)):
        Echo(shard.connect(Hello(1, 1, b"key"), 0.3), seed=0)


@pytest.mark.parametrize("kind", ["shm", "tcp", "tls"])
def test_joining_and_leaving_leaks_no_descriptor(kind, tmp_path):
    process = psutil.Process()
    with echo_shard(kind, tmp_path) as shard:

        def round_trip(client):
            echo = Echo(shard.join(client), seed=client)
            echo.check(echo.push())
            echo.link.close()

        round_trip(1)
        until(lambda: not shard.port.connections, "the warm-up to leave")
        gc.collect()
        before = process.num_fds()
        for client in range(2, 52):
            round_trip(client)
        until(lambda: not shard.port.connections, "all to leave")
        gc.collect()
        until(lambda: process.num_fds() <= before, f"{process.num_fds()} descriptors to become {before}")


def test_a_link_may_have_any_descriptor(tmp_path):
    """Engines have many, and select(2) takes none above 1023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    taken = [os.open("/dev/null", os.O_RDONLY) for _ in range(1024)]
    try:
        with echo_shard("tcp", tmp_path) as shard:
            client = Echo(shard.join(1), seed=13)
            client.check(client.push())
            client.link.close()
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


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
    assert [(line["log_level"], line["shards"]) for line in lines] == [
        ("warning", [1, 2]),
        ("warning", [3]),
        ("info", [4]),
    ]
    assert "/run/elsewhere cannot be seen" in lines[0]["reason"] and "--data-dir" in lines[0]["reason"]
    with capture_logs() as lines:
        tell_far([near])
    assert lines == []


def test_an_engine_of_another_user_goes_over_tcp(tmp_path):
    """It may not look into the server's directory."""
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    (private / "shard").touch()
    near = pb.Endpoint(shard=0, host=host_identity(), shm=str(private / "shard"), tcp="tcp://127.0.0.1:1")
    assert why_far(near) == ""
    with another_user(private):
        assert "is another user's" in why_far(near)
        with capture_logs() as lines:
            tell_far([near])
    assert [line["event"] for line in lines] == ["activations go over TCP"]


@contextlib.contextmanager
def another_user(directory):
    """For root in earnest; for others the directory is nobody's."""
    if os.geteuid():
        directory.chmod(0)
        yield
        directory.chmod(0o700)
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
