"""An attacking process, as a client or unauthenticated: `python -m tests.chaos.attacker KIND ADDRESS COUNT`.

It says "busy" when it is at it, and goes on until it is killed. An attacker has a machine of its own: here it takes
what server and bystanders leave of theirs (nice 19), so that what they notice is what the server lets it do to them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import grpc
import psutil
import torch

from client_connector.client import Client
from client_connector.remote import RemoteServer
from lora_server import logs
from lora_server.errors import LoraServerError
from lora_server.transport.frames import HEADER, MESSAGE
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire import lora_server_pb2_grpc as rpc
from lora_server.wire.rpc import call, open_channel
from tests.chaos.caller import LARGE, MANY, Caller
from tests.support.serving import listening

OTHERS = 64  # adapters that are prefetched
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def busy() -> None:
    print("busy", flush=True)


def joined(address: str) -> Client:
    return Client(RemoteServer(address, "shm"), timeout_seconds=60)


def on_and_on(callers: Sequence[Caller]) -> None:
    while True:
        for caller in callers:
            with contextlib.suppress(LoraServerError):
                caller.step()


def big_steps(address: str, count: int) -> None:
    """Push decode steps of the largest size; each client has the next one ready when one is answered."""

    callers = [Caller(joined(address), LARGE) for _ in range(count)]
    for caller in callers:
        threading.Thread(target=on_and_on, args=([caller],), daemon=True).start()
    busy()
    threading.Event().wait()


def full_slots(address: str, count: int) -> None:
    """Push steps of the largest size into all slots at once."""
    callers = [Caller(joined(address), MANY) for _ in range(count)]
    busy()
    on_and_on(callers)


def idle_clients(address: str, count: int) -> None:
    """Join as `count` clients, which then do nothing."""
    kept = []
    for _ in range(count):
        with contextlib.suppress(LoraServerError):
            kept.append(RemoteServer(address, "shm").join(60.0))
    busy()
    threading.Event().wait()


def rings(address: str, count: int) -> None:
    """Ring doorbells and signal without a step, and push headers of zeros."""
    links = [link for _ in range(count) for link in joined(address).session.links]
    seqs = dict.fromkeys(range(len(links)), 0)
    busy()
    while True:
        for index, link in enumerate(links):
            link._bell.unwatched[0] = 1
            if link.responded() >= seqs[index]:
                seqs[index] += 1
                link.region.request(seqs[index])[:128] = bytes(128)
                link.push(seqs[index], 128)
            else:
                link.ring()


def prefetches(address: str, count: int) -> None:
    """Ask to prefetch all adapters, again and again, in changing order."""
    client = joined(address)
    names = [f"other-{index}" for index in range(count)]
    held = client.acquire(names)
    wanted = itertools.cycle([held, held[::-1]])
    busy()
    with open_channel(address) as channel:
        stub = rpc.ClientsStub(channel)
        while True:
            needs = [pb.Need(handle=one.handle) for one in next(wanted)]
            client.session.calls.sign(request := pb.PrefetchRequest(needs=needs))
            with contextlib.suppress(LoraServerError):
                call(stub.Prefetch, request, server=address, seconds=10)


def acquires(address: str, count: int) -> None:
    """One name, again and again, and never let go."""
    client = joined(address)
    busy()
    for _ in range(count):
        with contextlib.suppress(LoraServerError):
            client.session.acquire(["tenant"])
    threading.Event().wait()


def giant_messages(address: str, count: int) -> None:
    """More than a message takes, 400,000 names in one call, and a join of 3.9 MB, over and over."""
    client = joined(address)
    request = pb.AcquireRequest(names=["tenant"] * 400_000)
    with open_channel(address) as channel:
        stub = rpc.ClientsStub(channel)
        says = channel.unary_unary("/lora_server.v1.Clients/Heartbeat")
        join = stub.Join, pb.JoinRequest(instance="x" * 3_900_000)
        large = ((says, bytes(8 << 20)), (says, b"\x0a" + b"\xff" * 4_000_000), (stub.Acquire, request), join)
        for turn in itertools.count():
            client.session.calls.sign(request)
            for one, message in large:
                with contextlib.suppress(LoraServerError):
                    call(one, message, server=address, seconds=10)
            if turn == count:
                busy()


def nothing() -> Iterator[bytes]:
    """Send no message, ever."""
    threading.Event().wait()
    yield b""


def silent_streams(address: str, count: int) -> None:
    """Calls that never send a message, and others when they are ended."""

    def hold() -> None:
        with open_channel(address) as channel:
            while True:
                with contextlib.suppress(grpc.RpcError, StopIteration):
                    next(channel.stream_stream("/lora_server.v1.Shards/Register")(nothing()))

    for _ in range(count):
        threading.Thread(target=hold, daemon=True).start()
    busy()
    threading.Event().wait()


def silent_checks(address: str, count: int) -> None:
    """Calls that need no token and never send their message, over few connections; others when they are ended."""
    with contextlib.ExitStack() as stack:
        channels = [stack.enter_context(open_channel(address, apart=True)) for _ in range(7)]
        checks = itertools.cycle([one.stream_stream("/grpc.health.v1.Health/Check") for one in channels])
        calls = [next(checks)(nothing()) for _ in range(count)]
        busy()
        while True:
            calls = [next(checks)(nothing()) if one.done() else one for one in calls]
            time.sleep(0.01)


def idle_connections(address: str, count: int) -> None:
    """Keep `count` connections that answer pings and call nothing; open new ones when some are closed."""
    host, _, port = address.rpartition(":")
    selector, settings = selectors.DefaultSelector(), bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
    for turn in itertools.count():
        while len(selector.get_map()) < count:
            with contextlib.suppress(OSError):
                one = socket.create_connection((host, port), 5)
                one.sendall(PREFACE + settings)
                selector.register(one, selectors.EVENT_READ)
        if not turn:
            busy()
        for key, _ in selector.select(0.1):
            try:
                said = key.fileobj.recv(4096)  # type: ignore[union-attr]
                if said[3:5] == b"\6\0":
                    key.fileobj.sendall(said[:4] + b"\1" + said[5:17])  # type: ignore[union-attr]
            except OSError:
                said = b""
            if not said:
                selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]


def half_requests(address: str, count: int) -> None:
    """To every port of the controller, HTTP's among them; others all the time."""
    keep_connecting(listening(servers(address)[0]), (b"GET /livez HT",), count)


def keep_connecting(listened: set[int], said: Sequence[bytes], count: int) -> None:
    """So many connections at a time, to each port in turn, and the oldest of them closed for a new one."""
    ports, open_ones = sorted(listened), list[socket.socket]()
    for turn in itertools.count():
        while len(open_ones) >= count:
            open_ones.pop(0).close()
        with contextlib.suppress(OSError):
            open_ones.append(socket.create_connection(("127.0.0.1", ports[turn % len(ports)]), 5))
            open_ones[-1].sendall(said[turn // len(ports) % len(said)])
        if turn == count:
            busy()
        time.sleep(1e-3)


def servers(address: str) -> list[psutil.Process]:
    """The processes that listen."""
    with open_channel(address) as channel:
        reply = call(rpc.ServerStub(channel).Status, pb.StatusRequest(), server=address, seconds=10)
    return [psutil.Process(pid) for pid in (reply.pid, *(shard.pid for shard in reply.shards))]


def no_descriptors(address: str, count: int) -> None:
    """Connections on every port of a server that may have eight descriptors more than it has."""
    for process in servers(address):
        _, most = process.rlimit(psutil.RLIMIT_NOFILE)
        process.rlimit(psutil.RLIMIT_NOFILE, (process.num_fds() + 8, most))
    strangers(address, count)


def strangers(address: str, count: int) -> None:
    """Connections that stay silent, and frames without an end, on every port."""
    said = (b"", HEADER.pack(MESSAGE, 2**32 - 1, 0) + bytes(4096), b"\x16\x03\x01" + bytes(64), PREFACE)
    keep_connecting(set().union(*map(listening, servers(address))), said, count)


# what comes, and how many in the short form, and in the long one
KINDS: dict[str, tuple[Callable[[str, int], None], int, int]] = {
    "big steps called decode": (big_steps, 16, 16),
    "every slot full of the largest": (full_slots, 1, 1),
    "idle clients": (idle_clients, 100, 1000),
    "rings and signals for nothing": (rings, 16, 64),
    "prefetches of everything": (prefetches, OTHERS, OTHERS),
    "one name acquired": (acquires, 5_000, 100_000),
    "giant messages": (giant_messages, 1, 1),
    "silent streams": (silent_streams, 80, 80),
    "silent health checks": (silent_checks, 1400, 1400),
    "idle connections": (idle_connections, 1300, 1300),
    "half requests": (half_requests, 700, 2000),
    "strangers on every port": (strangers, 200, 1000),
    "no descriptors left": (no_descriptors, 200, 1000),
}

if __name__ == "__main__":
    logs.configure()
    os.nice(19)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    KINDS[sys.argv[1]][0](sys.argv[2], int(sys.argv[3]))
