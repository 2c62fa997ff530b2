"""Shared memory between real processes: what is sealed, who notices whose death, and that no wake-up is lost."""

from __future__ import annotations

import gc
import math
import mmap
import os
import signal
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from lora_server.errors import ConfigError, LeaseError, ProtocolError, ShardUnavailableError
from lora_server.transport import park, shm_listener
from lora_server.transport.base import Grant, Port
from lora_server.transport.rows import SlotRows
from lora_server.transport.shm import ShmLink, create_memory
from lora_server.wire import messages
from lora_server.wire.messages import Hello, Mapped, Refused, Welcome
from tests.support.echo import LAYOUT, SECONDS, SHARD, Echo, echo_shard
from tests.support.gpu.emulated_link import EmulatedLink, MemfdMemory
from tests.support.processes import end, line_of, start
from tests.support.serving import until


@pytest.fixture
def shard(tmp_path):
    with echo_shard("shm", tmp_path) as found:
        yield found


CLIENT = """
import sys, time
from lora_server.transport.shm import ShmLink
from lora_server.wire.messages import Hello
from tests.support.echo import Echo
client = Echo(ShmLink(sys.argv[1], Hello(1, 1, b"key"), 7), seed=1)
for _ in range(300):
    client.check(client.push())
print("served", flush=True)
client.push()
time.sleep(600)
"""

SERVER = """
import sys, threading
from pathlib import Path
from types import SimpleNamespace
from lora_server.transport.base import Grant
from tests.support.echo import EchoShard
shard = EchoShard("shm", Path(sys.argv[1]))
shard.port.grant(Grant(1, 1, b"key"))
print("up", flush=True)
threading.Event().wait(600)
"""


def test_a_killed_client_is_noticed_and_others_are_served(shard):
    other = Echo(shard.join(2), seed=2)
    shard.port.grant(Grant(1, 1, b"key"))
    process = start(CLIENT, shard.listener.address)
    try:
        assert line_of(process) == "served"
        process.send_signal(signal.SIGKILL)
        process.wait(SECONDS)
        began = time.monotonic()
        until(lambda: shard.gone == [(1, 1)], "on_gone of the killed client")
        assert time.monotonic() - began < 30
    finally:
        end(process)
    other.check(other.push())
    other.link.close()


@pytest.mark.parametrize("how", ["while it serves", "while it is stopped"])
def test_a_killed_server_ends_a_wait_promptly(how, tmp_path):
    process = start(SERVER, tmp_path)
    try:
        assert line_of(process) == "up"
        client = Echo(ShmLink(str(tmp_path / "shard.sock"), Hello(1, 1, b"key"), SHARD), seed=3)
        for _ in range(200):
            client.check(client.push())
        if how == "while it is stopped":
            process.send_signal(signal.SIGSTOP)
            until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, "the stop")
            client.push()
        killer = threading.Timer(0.05, process.kill)
        killer.start()
        began = time.monotonic()
        with pytest.raises(ShardUnavailableError, match=rf"shard {SHARD} slot \d seq 201"):
            client.link.wait(201, began + 60)
        assert time.monotonic() - began < 30
        client.link.close()
    finally:
        end(process)
    with pytest.raises(ShardUnavailableError, match=str(tmp_path)):
        ShmLink(str(tmp_path / "shard.sock"), Hello(1, 1, b"key"), SHARD)


def handshake(shard, hello):
    """What a client gets on the wire: answer and descriptors."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(SECONDS)
        sock.connect(shard.listener.address)
        sock.send(hello)
        data, fds, _, _ = socket.recv_fds(sock, messages.MAX_MESSAGE_BYTES, 8)
        return data, fds


def test_regions_have_no_name_and_cannot_be_resized(shard):
    before = set(Path("/dev/shm").iterdir())
    shard.port.grant(Grant(1, 1, b"key"))
    data, fds = handshake(shard, messages.encode(Hello(1, 1, b"key")))
    assert messages.decode_welcome(data) == Welcome(LAYOUT.depth, LAYOUT.request_bytes, LAYOUT.response_bytes)
    assert set(Path("/dev/shm").iterdir()) == before
    assert len(fds) == 2 and os.fstat(fds[0]).st_size == LAYOUT.nbytes
    region, bell = fds
    assert str(Path(f"/proc/self/fd/{region}").readlink()).startswith("/memfd:")
    for nbytes in (0, 100, 10 * LAYOUT.nbytes):
        with pytest.raises(PermissionError):
            os.ftruncate(region, nbytes)
    os.close(region), os.close(bell)
    assert Path(shard.listener.address).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("hello", [b"\x00", b"\xc1garbage", messages.encode(Refused("a", "b")), b"x" * 60_000])
def test_a_garbled_hello_is_refused_and_harms_nobody(shard, hello):
    data, fds = handshake(shard, hello)
    assert fds == []
    with pytest.raises(ProtocolError):
        messages.decode_welcome(data)
    client = Echo(shard.join(1), seed=4)
    client.check(client.push())
    client.link.close()


def test_clients_that_leave_during_the_handshake_are_noticed(shard):
    """Their end of file may come before the Welcome can be sent."""
    for client in range(1, 21):
        shard.port.grant(Grant(client, 1, b"key"))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.connect(shard.listener.address)
            sock.send(messages.encode(Hello(client, 1, b"key")))
    until(lambda: len(shard.gone) == 20, f"on_gone of all, got {sorted(shard.gone)}")
    assert shard.port.connections == ()


@pytest.mark.parametrize("machine", ["aarch64", "ppc64le", "riscv64"])
def test_weaker_memory_orders_are_refused(machine):
    with pytest.raises(ConfigError, match=f"got a {machine} CPU, expected x86_64 .*transport tcp"):
        park.require_total_store_order(machine)
    park.require_total_store_order("x86_64")
    park.require_total_store_order("AMD64")


def test_a_lease_error_closes_the_socket(shard):
    descriptors = psutil.Process().num_fds()
    for _ in range(20):
        with pytest.raises(LeaseError):
            ShmLink(shard.listener.address, Hello(1, 1, b"key"), SHARD)
    until(lambda: psutil.Process().num_fds() <= descriptors, "refused sockets to be closed")


PINGPONG = """
import mmap, sys, time
from lora_server.transport import park, shm_listener
from lora_server.transport.park import Parker
fd, side, rounds, spin = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
memory = memoryview(mmap.mmap(fd, 4096))
mine, theirs = memory[128 * side : 128 * side + 8].cast("Q"), memory[128 * (1 - side) : 128 * (1 - side) + 8].cast("Q")
park.SPIN_SECONDS = spin
park.MAX_SPIN_SECONDS = max(spin, park.MAX_SPIN_SECONDS if spin else 0)
own, other = Parker(memory[512 + 128 * side :][:4]), Parker(memory[512 + 128 * (1 - side) :][:4])
mine[0] = 1
other.wake()
began = time.monotonic()
while not own.wait(lambda: theirs[0] >= 1, began + 60):
    assert time.monotonic() < began + 60, "the other side did not come"
began, slow = time.monotonic(), 0
for turn in range(2, rounds + 2):
    if side == 0:
        mine[0] = turn
        other.wake()
    asked = time.monotonic()
    while not own.wait(lambda: theirs[0] >= turn, began + 300):
        assert time.monotonic() < began + 300, f"turn {turn}"
    slow += time.monotonic() - asked > 0.9 * park.SLEEP_SECONDS
    if side == 1:
        mine[0] = turn
        other.wake()
print(slow, flush=True)
"""


@pytest.mark.parametrize("spin", [park.SPIN_SECONDS, 1e-6, 0.0])
def test_no_wake_up_is_lost_between_processes(spin):
    """Each lost one would cost SLEEP_SECONDS: one in a hundred, and this fails. No spin means that all waits park."""
    rounds = 20_000
    fd, _ = create_memory("ping-pong", mmap.PAGESIZE)
    processes = [start(PINGPONG, fd, side, rounds, spin, pass_fds=[fd]) for side in (0, 1)]
    try:
        slow = [int(line_of(process, 300)) for process in processes]
    finally:
        for process in processes:
            end(process)
        os.close(fd)
    assert max(slow) < 0.01 * rounds


def test_a_parked_wait_is_bounded_and_says_whether_it_is_ready():
    word = memoryview(bytearray(4))
    parker, began = park.Parker(word), time.monotonic()
    assert not parker.wait(lambda: False, began + 0.01)
    assert time.monotonic() - began >= 0.01
    assert not parker.wait(lambda: False, began + 600)
    assert time.monotonic() - began < 60
    assert parker.wait(lambda: True, began - 1)
    assert word.cast("I")[0] == 0, "nobody is parked now"


# -- device memory of a shard: see emulated_link


def device_shard(directory, memory):
    gone = []
    port = Port(LAYOUT, on_gone=lambda *client: gone.append(client))
    for client in (1, 2):
        port.grant(Grant(client, 1, b"key"))
    return port, shm_listener.ShmListener(port, directory / "socket", memory), gone


def connection_of(port, client):
    until(lambda: any(c.client == client for c in port.connections), f"client {client} to be connected")
    return next(connection for connection in port.connections if connection.client == client)


def test_a_twin_is_made_for_who_asks_and_freed_some_time_after_the_client_went(tmp_path, monkeypatch):
    monkeypatch.setattr(shm_listener, "QUARANTINE_SECONDS", 0.2)
    memory = MemfdMemory()
    port, listener, _ = device_shard(tmp_path, memory)
    plain = ShmLink(listener.address, Hello(1, 1, b"key"), 0)
    asking = EmulatedLink(listener.address, Hello(2, 1, b"key"), 0)
    (twin,) = memory.twins
    assert connection_of(port, 2).rows is twin.rows and memory.pinned == 1, "the slots of client 1"
    assert connection_of(port, 2).pause() < 1 and connection_of(port, 1).pause() == math.inf
    cut_off = time.monotonic()
    port.revoke(2)
    assert twin.freed.wait(SECONDS) and time.monotonic() - cut_off >= 0.2
    plain.close(), asking.close()
    until(lambda: not port.rung() and gc.collect() >= 0 and memory.pinned == 0, "the slots to be unpinned")
    listener.close()


def test_a_shard_without_room_serves_from_the_slots(tmp_path):
    """Review item 2: it was an error of the join."""
    port, listener, gone = device_shard(tmp_path, MemfdMemory(full=True))
    link = EmulatedLink(listener.address, Hello(1, 1, b"key"), 0, twin="may")
    assert link.twin is None and link.welcome.why == "no room on this device"
    assert isinstance(connection_of(port, 1).rows, SlotRows) and gone == []
    link.close(), listener.close()


def test_who_cannot_map_a_twin_keeps_its_lease(tmp_path):
    """Review item 1: the shard took its end for the client's, and the next try met no such lease."""
    memory = MemfdMemory()
    port, listener, gone = device_shard(tmp_path, memory)
    with pytest.raises(ConfigError, match="this device cannot map it"):
        EmulatedLink(listener.address, Hello(1, 1, b"key"), 0, can_map=False)
    link = ShmLink(listener.address, Hello(1, 1, b"key"), 0)
    assert connection_of(port, 1) and gone == []
    link.close()
    until(lambda: gone == [(1, 1)], "its end")
    link = EmulatedLink(listener.address, Hello(2, 1, b"key"), 0, twin="may", can_map=False)
    assert isinstance(connection_of(port, 2).rows, SlotRows)
    assert memory.twins[1].freed.wait(SECONDS), "nobody will use it"
    link.close(), listener.close()


def test_nothing_is_served_before_the_client_says_what_it_mapped(tmp_path, monkeypatch):
    monkeypatch.setattr(shm_listener, "HANDSHAKE_SECONDS", 0.3)
    memory = MemfdMemory()
    port, listener, gone = device_shard(tmp_path, memory)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(SECONDS)
        sock.connect(listener.address)
        sock.send(messages.encode(Hello(1, 1, b"key", device=True, twin=True)))
        data, fds, _, _ = socket.recv_fds(sock, messages.MAX_MESSAGE_BYTES, 8)
        assert messages.decode_welcome(data).twin == "fd" and len(fds) == 3
        assert port.connections == ()
        assert sock.recv(100) == b"", "who says nothing is cut off in time"
    for fd in fds:
        os.close(fd)
    assert gone == [] and port.connections == ()
    listener.close()


@pytest.mark.parametrize("answer", [Mapped(True), Refused("a", "b"), Hello(1, 1, b"key")])
def test_a_client_that_mapped_what_it_was_not_given_is_cut_off(tmp_path, answer):
    port, listener, gone = device_shard(tmp_path, MemfdMemory(full=True))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(SECONDS)
        sock.connect(listener.address)
        sock.send(messages.encode(Hello(1, 1, b"key", device=True, twin=True)))
        _, fds, _, _ = socket.recv_fds(sock, messages.MAX_MESSAGE_BYTES, 8)
        sock.send(messages.encode(answer))
        with pytest.raises(ProtocolError):
            messages.decode_welcome(sock.recv(messages.MAX_MESSAGE_BYTES))
        assert sock.recv(100) == b""
    for fd in fds:
        os.close(fd)
    assert gone == [] and port.connections == ()
    ShmLink(listener.address, Hello(2, 1, b"key"), 0).close()
    listener.close()


def test_a_twin_is_for_who_has_a_device(tmp_path):
    """It was freed before its descriptor was sent: a lying client might have got another's."""
    port, listener, gone = device_shard(tmp_path, MemfdMemory())
    data, fds = handshake(SimpleNamespace(listener=listener), messages.encode(Hello(1, 1, b"key", twin=True)))
    with pytest.raises(ProtocolError, match="asks for a twin and has no device"):
        messages.decode_welcome(data)
    assert fds == [] and gone == [] and port.connections == ()
    listener.close()


def test_a_device_that_fails_ends_no_listener(tmp_path, quiet):
    class Broken(MemfdMemory):
        def pin(self, memory):
            raise RuntimeError("the GPU is lost")

    _, listener, _ = device_shard(tmp_path, Broken())
    with pytest.raises(ShardUnavailableError, match="the GPU is lost"):
        ShmLink(listener.address, Hello(1, 1, b"key"), 0)
    EmulatedLink(listener.address, Hello(2, 1, b"key"), 0).close()
    listener.close()


def test_a_client_that_joins_again_and_again_does_not_fill_the_device(tmp_path):
    memory = MemfdMemory()
    _, listener, _ = device_shard(tmp_path, memory)
    links = [EmulatedLink(listener.address, Hello(1, 1, b"key"), 0, twin="may") for _ in range(6)]

    made = [link.twin is not None for link in links]
    assert made[0] and not all(made) and len(memory.twins) < 6
    assert "earlier twins" in links[made.index(False)].welcome.why
    for link in links:
        link.close()
    listener.close()
