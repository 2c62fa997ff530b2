"""Shared memory between real processes: what is sealed, whose death is noticed, bells, and mirrors in device memory."""

import contextlib
import gc
import math
import os
import random
import signal
import socket
import threading
import time
from pathlib import Path

import psutil
import pytest

from lora_server.errors import ConfigError, LeaseError, ProtocolError, ShardUnavailableError
from lora_server.transport import bells, park
from lora_server.transport.base import Grant
from lora_server.transport.rows import SlotRows
from lora_server.transport.shm import ShmLink
from lora_server.wire import messages
from lora_server.wire.messages import Hello, Mapped, Refused, Welcome
from tests.support.echo import echo_shard, handshake
from tests.support.echo_client import LAYOUT, SECONDS, SHARD, Echo
from tests.support.gpu.emulated_link import MemfdMemory
from tests.support.processes import line_of, running
from tests.support.serving import until

HELLO = Hello(1, 1, b"key")


@pytest.fixture
def shard(request, tmp_path):
    with echo_shard("shm", tmp_path, max_watched=getattr(request, "param", bells.MAX_WATCHED)) as found:
        yield found


CLIENT = """
import sys, time
from lora_server.transport.shm import ShmLink
from lora_server.wire.messages import Hello
from tests.support.echo_client import Echo
client = Echo(ShmLink(sys.argv[1], Hello(1, 1, b"key"), 7, 60), seed=1)
for _ in range(300):
    client.step()
print("served", flush=True)
client.push()
time.sleep(600)
"""

SERVER = """
import sys, threading
from pathlib import Path
from lora_server.transport.base import Grant
from tests.support.echo import EchoShard
shard = EchoShard("shm", Path(sys.argv[1]))
shard.port.grant(Grant(1, 1, b"key"))
print("up", flush=True)
threading.Event().wait(600)
"""


def test_a_killed_client_is_noticed_and_others_are_served(shard):
    other = shard.client(2)
    shard.port.grant(Grant(1, 1, b"key"))
    with running(CLIENT, shard.listener.address) as process:
        assert line_of(process) == "served"
        process.kill()
        until(lambda: shard.gone == [(1, 1)], "on_gone of the killed client", 30)
    other.step()


@pytest.mark.parametrize("how", ["while it serves", "while it is stopped"])
def test_a_killed_server_ends_a_wait_promptly(how, tmp_path):
    address = str(tmp_path / "shard.sock")
    with running(SERVER, tmp_path) as process:
        assert line_of(process) == "up"
        client = Echo(ShmLink(address, HELLO, SHARD, SECONDS), seed=3)
        for _ in range(200):
            client.step()
        if how == "while it is stopped":
            process.send_signal(signal.SIGSTOP)
            until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, "the stop")
            client.push()
        threading.Timer(0.05, process.kill).start()
        began = time.monotonic()
        with pytest.raises(ShardUnavailableError, match=rf"shard {SHARD} slot \d seq 201"):
            client.link.wait(201, began + 60)
        assert time.monotonic() - began < 30
        client.link.close()
    with pytest.raises(ShardUnavailableError, match=str(tmp_path)):
        ShmLink(address, HELLO, SHARD)


def test_regions_have_no_name_and_cannot_be_resized(shard):
    before = set(Path("/dev/shm").iterdir())
    shard.port.grant(Grant(1, 1, b"key"))
    with handshake(shard, messages.encode(HELLO)) as (_, data, fds):
        assert messages.decode_welcome(data) == Welcome(LAYOUT.depth, LAYOUT.request_bytes, LAYOUT.response_bytes)
        assert set(Path("/dev/shm").iterdir()) == before
        region, _ = fds
        assert os.fstat(region).st_size == LAYOUT.nbytes
        assert str(Path(f"/proc/self/fd/{region}").readlink()).startswith("/memfd:")
        for nbytes in (0, 100, 10 * LAYOUT.nbytes):
            with pytest.raises(PermissionError):
                os.ftruncate(region, nbytes)
    assert Path(shard.listener.address).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("hello", [b"\x00", b"\xc1garbage", messages.encode(Refused("a", "b")), b"x" * 60_000])
def test_a_garbled_hello_is_refused_and_harms_no_other_client(shard, hello):
    with handshake(shard, hello) as (_, data, fds):
        assert fds == []
        with pytest.raises(ProtocolError):
            messages.decode_welcome(data)
    shard.client(1).step()


def test_clients_that_leave_during_the_handshake_are_noticed(shard):
    """Their end of file may come before the Welcome can be sent."""
    for client in range(1, 21):
        shard.port.grant(Grant(client, 1, b"key"))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.connect(shard.listener.address)
            sock.send(messages.encode(Hello(client, 1, b"key")))
    until(lambda: len(shard.gone) == 20, "on_gone of all")
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
            ShmLink(shard.listener.address, HELLO, SHARD, SECONDS)
    until(lambda: psutil.Process().num_fds() <= descriptors, "refused sockets to be closed")


def test_a_parked_wait_is_bounded_and_says_whether_it_is_ready():
    word = memoryview(bytearray(4))
    parker, began = park.Parker(word), time.monotonic()
    assert not parker.wait(lambda: False, began + 0.01)
    assert time.monotonic() - began >= 0.01
    assert not parker.wait(lambda: False, began + 600)
    assert time.monotonic() - began < 60
    assert parker.wait(lambda: True, began - 1)
    assert word.cast("I")[0] == 0, "no thread is parked now"


# -- device memory of a shard: see emulated_link


@pytest.fixture
def device_shard(tmp_path):
    """Make a shard that has some device memory, and two clients."""
    with contextlib.ExitStack() as stack:

        def make(memory=None, **options):
            shard = stack.enter_context(echo_shard("device mirror", tmp_path, memory, **options))
            for client in (1, 2):
                shard.port.grant(Grant(client, 1, b"key"))
            return shard

        yield make


def test_a_mirror_is_made_when_it_is_asked_for_and_freed_some_time_after_the_client_went(device_shard):
    shard = device_shard(quarantine_seconds=0.2)
    plain = ShmLink(shard.listener.address, HELLO, SHARD, SECONDS)
    asking = shard.link(2)
    (mirror,) = shard.device.mirrors
    assert shard.connection(2).rows is mirror.rows and shard.device.pinned == 1, "the slots of client 1"
    assert shard.connection(2).pause() < 1 and shard.connection(1).pause() == math.inf
    cut_off = time.monotonic()
    shard.port.revoke(2)
    assert mirror.freed.wait(SECONDS) and time.monotonic() - cut_off >= 0.2
    plain.close(), asking.close()
    until(lambda: gc.collect() >= 0 and shard.device.pinned == 0, "the slots to be unpinned")


def test_a_shard_without_room_serves_from_the_slots(device_shard):
    """Review item 2: it was an error of the join."""
    shard = device_shard(MemfdMemory(full=True))
    link = shard.link(1, mirror="may")
    assert link.transport == "shm" and link._puts.welcome.why == "no room on this device"
    assert isinstance(shard.connection(1).rows, SlotRows) and shard.gone == []


def test_a_client_that_cannot_map_a_mirror_keeps_its_lease(device_shard):
    """Review item 1: the shard took its end for the client's, and the next try met no such lease."""
    shard = device_shard()
    with pytest.raises(ConfigError, match="this device cannot map it"):
        shard.link(1, can_map=False)
    link = ShmLink(shard.listener.address, HELLO, SHARD, SECONDS)
    assert shard.connection(1) and shard.gone == []
    link.close()
    until(lambda: shard.gone == [(1, 1)], "its end")
    shard.link(2, mirror="may", can_map=False)
    assert isinstance(shard.connection(2).rows, SlotRows)
    assert shard.device.mirrors[1].freed.wait(SECONDS), "no client will use it"


def test_nothing_is_served_before_the_client_says_what_it_mapped(device_shard):
    shard = device_shard(handshake_seconds=2.0)
    with handshake(shard, messages.encode(Hello(1, 1, b"key", device=True, mirror=True))) as (sock, data, fds):
        assert messages.decode_welcome(data).mirror == "fd" and len(fds) == 3
        assert shard.port.connections == ()
        assert sock.recv(100) == b"", "a client that says nothing is cut off in time"
    assert shard.gone == [] and shard.port.connections == ()


@pytest.mark.parametrize("answer", [Mapped(True), Refused("a", "b"), HELLO])
def test_a_client_that_mapped_what_it_was_not_given_is_cut_off(device_shard, answer):
    shard = device_shard(MemfdMemory(full=True))
    with handshake(shard, messages.encode(Hello(1, 1, b"key", device=True, mirror=True))) as (sock, _, _):
        sock.send(messages.encode(answer))
        with pytest.raises(ProtocolError):
            messages.decode_welcome(sock.recv(messages.MAX_MESSAGE_BYTES))
        assert sock.recv(100) == b""
    assert shard.gone == [] and shard.port.connections == ()
    ShmLink(shard.listener.address, Hello(2, 1, b"key"), SHARD, SECONDS).close()


def test_a_client_without_a_device_gets_no_mirror(device_shard):
    """It was freed before its descriptor was sent: a lying client might have got another's."""
    shard = device_shard()
    with handshake(shard, messages.encode(Hello(1, 1, b"key", mirror=True))) as (_, data, fds):
        with pytest.raises(ProtocolError, match="asks for a mirror and has no device"):
            messages.decode_welcome(data)
        assert fds == [] and shard.gone == [] and shard.port.connections == ()


def test_a_device_that_fails_ends_no_listener(device_shard, quiet):
    class Broken(MemfdMemory):
        def pin(self, memory):
            raise RuntimeError("the GPU is lost")

    shard = device_shard(Broken())
    with pytest.raises(ShardUnavailableError, match="the GPU is lost"):
        ShmLink(shard.listener.address, HELLO, SHARD, SECONDS)
    shard.link(2)


def test_a_client_that_joins_again_and_again_does_not_fill_the_device(device_shard):
    shard = device_shard()
    links = [shard.link(1, mirror="may") for _ in range(6)]
    made = [link.transport == "cuda_ipc" for link in links]
    assert made[0] and not all(made) and len(shard.device.mirrors) < 6
    assert "earlier mirrors" in links[made.index(False)]._puts.welcome.why


# ---- bells: idle clients cost the loop nothing, none holds what another needs, and none is missed

IDLE, STEPS = 300, 300


def test_the_loop_looks_at_no_idle_client(shard, monkeypatch):
    """Each was looked at in every round once: 300 of them made a step several times as long."""
    looks, look = [], bells.Bells._watch
    monkeypatch.setattr(bells.Bells, "_watch", lambda self, one: looks.append(one.grant.client) or look(self, one))
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
park.SLEEP_SECONDS, park.LOOK_SECONDS, park.SPIN_SECONDS = 10, 10, float(sys.argv[3])
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
    live = {connection.grant.client for connection in shard.port.connections}
    assert {one.grant.client for one in shard.port._bells._by_fd.values()} <= live
    for fd in kept:
        os.close(fd)
