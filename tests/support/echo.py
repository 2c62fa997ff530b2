"""A shard that answers with what it was sent, reversed, over any transport."""

import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lora_server.access.tls import shard_certificate
from lora_server.transport.base import Connection, Grant, Link, Port
from lora_server.transport.bells import MAX_WATCHED
from lora_server.transport.inproc import InprocLink
from lora_server.transport.shm import ShmLink
from lora_server.transport.shm_listener import ShmListener
from lora_server.transport.tcp import TcpLink
from lora_server.transport.tcp_listener import TcpListener
from lora_server.wire import messages
from lora_server.wire.messages import Hello
from tests.support.echo_client import LAYOUT, SECONDS, SHARD, Echo
from tests.support.gpu.emulated_link import MemfdMemory, emulated_link
from tests.support.serving import until

# `device`: its steps are put by kernels, which are emulated; rows in the slots, or in a mirror
DEVICES = [pytest.param(kind, marks=pytest.mark.emulator) for kind in ("device slots", "device mirror")]
KINDS = ["inproc", "shm", "tcp", "tls", *DEVICES]


def reverse(connection: Connection, seq: int) -> int:
    """The request's bytes from the end to the beginning, in its response; their number comes first."""
    request = connection.region.request(seq)
    nbytes = int.from_bytes(request[:4], "little")
    connection.region.response(seq)[:nbytes] = bytes(request[:nbytes])[::-1]
    return nbytes


class EchoShard:
    """A loop over a Port that answers each request: with its bytes reversed, unless `answer` is another."""

    def __init__(self, kind: str, directory: Path, device: MemfdMemory | None = None, **options: Any) -> None:
        """`options`: of its listener, or `max_watched` of its port."""
        self.answer: Callable[[Connection, int], int] = reverse
        self.gone: list[tuple[int, int]] = []
        self._links: list[Link] = []
        watched = options.pop("max_watched", MAX_WATCHED)
        self.port = Port(LAYOUT, lambda client, epoch: self.gone.append((client, epoch)), watched)
        self.paused = threading.Event()
        self._waiting: deque[Connection] = deque()
        self.kind, self.listener = kind, None
        self._stop = threading.Event()
        self.device = (device or MemfdMemory()) if kind.startswith("device") else None
        if kind == "shm" or self.device is not None:
            self.listener = ShmListener(self.port, directory / "shard.sock", self.device, **options)
        self.certificate = shard_certificate(SHARD) if kind == "tls" else None
        if kind in ("tcp", "tls"):
            self.listener = TcpListener(self.port, "127.0.0.1", certificate=self.certificate, **options)
        if self.listener is not None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    @property
    def der(self) -> bytes:
        """The certificate as clients get it; empty without TLS."""
        return self.certificate.der if self.certificate is not None else b""

    def link(
        self,
        client: int,
        epoch: int = 1,
        key: bytes = b"key",
        seconds: float = SECONDS,
        at: str = "",
        generation: int = 1,
        **device: Any,
    ) -> Link:
        """Connect; the shard closes the link at its end. `at`: an address other than the listener's."""
        hello = Hello(client, epoch, key, generation=generation)
        address = at or (self.listener.address if self.listener is not None else "")
        link: Link
        if self.kind == "inproc":
            link = InprocLink(self.port, hello, SHARD, self.serve_once)
        elif self.device is not None:
            mirror = "must" if self.kind == "device mirror" else "no"
            link = emulated_link(address, hello, SHARD, **{"mirror": mirror, **device})
        elif self.kind == "shm":
            link = ShmLink(address, hello, SHARD, seconds)
        else:
            link = TcpLink(address, hello, SHARD, seconds, self.der)
        self._links.append(link)
        return link

    def join(self, client: int, epoch: int = 1, at: str = "") -> Link:
        self.port.grant(Grant(client, epoch, b"key"))
        return self.link(client, epoch, at=at)

    def client(self, number: int, epoch: int = 1, at: str = "") -> Echo:
        return Echo(self.join(number, epoch, at), seed=number)

    def connection(self, client: int) -> Connection:
        """Wait for a joined client's connection and return it. A client with a device connects once it has mapped."""

        def found() -> list[Connection]:
            return [connection for connection in self.port.connections if connection.grant.client == client]

        until(found, f"client {client} to be connected")
        return found()[0]

    def serve_once(self) -> bool:
        self._waiting += self.port.rung()
        if self.paused.is_set() or not self._waiting:
            return False
        connection = self._waiting.popleft()
        seq = connection.served + 1
        if connection.requested() >= seq and not connection.gone:
            self.port.respond(connection, seq, self.answer(connection, seq))
        return True

    def _run(self) -> None:
        while not self._stop.is_set():
            if not self.serve_once():
                self.port.wait(0.05)

    def resume(self) -> None:
        self.paused.clear()
        self.port.ring()

    def close(self) -> None:
        for link in self._links:
            link.close()
        self._stop.set()
        if self.listener is not None:
            self.port.ring()
            self._thread.join(SECONDS)
            self.listener.close()
            self.listener.close()


@contextmanager
def echo_shard(kind: str, directory: Path, device: MemfdMemory | None = None, **options: Any) -> Iterator[EchoShard]:
    shard = EchoShard(kind, directory, device, **options)
    try:
        yield shard
    finally:
        shard.close()


@contextmanager
def handshake(shard: EchoShard, hello: bytes) -> Iterator[tuple[socket.socket, bytes, list[int]]]:
    """A connection to a Unix socket, and what a client gets for its hello: the answer, and descriptors."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(SECONDS)
        sock.connect(shard.listener.address)
        sock.send(hello)
        data, fds, _, _ = socket.recv_fds(sock, messages.MAX_MESSAGE_BYTES, 8)
        try:
            yield sock, data, fds
        finally:
            for fd in fds:
                os.close(fd)
