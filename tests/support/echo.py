"""A shard that answers with what it was sent, reversed, over any transport, and its client."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lora_server.access.certificate import shard_certificate
from lora_server.transport import e4m3
from lora_server.transport.base import Connection, Grant, Link, Port
from lora_server.transport.inproc import InprocLink
from lora_server.transport.rows import SlotRows
from lora_server.transport.shm import ShmLink
from lora_server.transport.shm_listener import ShmListener
from lora_server.transport.tcp import TcpLink
from lora_server.transport.tcp_listener import TcpListener
from lora_server.wire import slot
from lora_server.wire.messages import Hello
from lora_server.wire.region import RegionLayout
from lora_server.wire.slot import RequestHeader
from tests.support.gpu import emulated
from tests.support.gpu.emulated_link import EmulatedLink, MemfdMemory

LAYOUT = RegionLayout(depth=3, request_bytes=8192, response_bytes=4096)
SECONDS = 60.0
SHARD = 7
# `device`: its steps are put by kernels, which are emulated; rows in the slots, or in a twin
needs_emulator = pytest.mark.skipif(bool(emulated.MISSING), reason=emulated.MISSING)
DEVICES = [pytest.param(kind, marks=needs_emulator) for kind in ("device slots", "device twin")]
KINDS = ["inproc", "shm", "tcp", "tls", *DEVICES]


def reverse(connection: Connection, seq: int) -> int:
    """The request's bytes from the end to the beginning, in its response; their number comes first."""
    request = connection.region.request(seq)
    nbytes = int.from_bytes(request[:4], "little")
    connection.region.response(seq)[:nbytes] = bytes(request[:nbytes])[::-1]
    return nbytes


def double(connection, seq):
    """Every row of the request, twice its value, in the response; the slot's bytes are what travels."""
    header = RequestHeader.unpack_from(connection.region.request(seq))
    rows = connection.rows.request(header)
    assert rows.shape == (header.num_rows, header.in_end - header.in_begin)
    if header.dtype == slot.E4M3:
        rows = e4m3.expand(rows, SlotRows(connection.region).request_scales(header))
    connection.rows.answer(header, rows[:, : header.out_width] * 2)
    return slot.response_offsets(header.num_out_rows, header.out_width, header.dtype).end


def header_of(link, seq, rows, width, out_width, dtype):
    nbytes = rows * width * slot.ELEMENT_BYTES[dtype]
    at = slot.request_offsets(0, rows, 0, nbytes, slot.num_scales(rows, dtype))
    numbers = (0, 0, 1, 1, seq, seq % LAYOUT.depth, 0, 0, dtype, rows, rows, 0, rows, 0, width)
    return RequestHeader(*numbers, ((0, out_width),), at.end - slot.HEADER_BYTES, 0, 0)


class EchoShard:
    """A loop over a Port that answers each request: with its bytes reversed, unless `answer` is another."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.answer: Callable[[Connection, int], int] = reverse
        self.gone: list[tuple[int, int]] = []
        self.port = Port(LAYOUT, on_gone=lambda client, epoch: self.gone.append((client, epoch)))
        self.paused = threading.Event()
        self._waiting: deque[Connection] = deque()
        self.kind, self.listener, self.failure = kind, None, None
        self._stop = threading.Event()
        self.device = MemfdMemory() if kind.startswith("device") else None
        if kind == "shm" or self.device is not None:
            self.listener = ShmListener(self.port, directory / "shard.sock", self.device)
        self.certificate = shard_certificate(SHARD) if kind == "tls" else None
        if kind in ("tcp", "tls"):
            self.listener = TcpListener(self.port, "127.0.0.1", certificate=self.certificate)
        if self.listener is not None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def link(self, client: int, epoch: int = 1, key: bytes = b"key") -> Link:
        hello = Hello(client, epoch, key)
        if self.kind == "inproc":
            return InprocLink(self.port, hello, SHARD, self.serve_once)
        if self.device is not None:
            twin = "must" if self.kind == "device twin" else "no"
            return EmulatedLink(self.listener.address, hello, SHARD, twin=twin)
        return self.connect(hello)

    def connect(self, hello: Hello, seconds: float = SECONDS) -> Link:
        """Over a socket."""
        assert self.listener is not None
        if self.kind == "shm":
            return ShmLink(self.listener.address, hello, SHARD, seconds)
        der = self.certificate.der if self.certificate is not None else b""
        return TcpLink(self.listener.address, hello, SHARD, seconds, der)

    def join(self, client: int, epoch: int = 1) -> Link:
        self.port.grant(Grant(client, epoch, b"key"))
        return self.link(client, epoch)

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
        self._stop.set()
        if self.listener is not None:
            self.port.ring()
            self._thread.join(SECONDS)
            self.listener.close()
            self.listener.close()


class Echo:
    """A client of EchoShard; `push` and `check` may be apart by up to depth steps."""

    def __init__(self, link: Link, seed: int) -> None:
        self.link, self.random, self.seq = link, random.Random(seed), 0
        self.sent: dict[int, bytes] = {}

    def push(self, nbytes: int | None = None) -> int:
        self.seq += 1
        nbytes = nbytes or self.random.randint(4, LAYOUT.response_bytes)
        data = nbytes.to_bytes(4, "little") + self.random.randbytes(nbytes - 4)
        self.link.region.request(self.seq)[:nbytes] = data
        self.link.push(self.seq, nbytes)
        self.sent[self.seq] = data
        return self.seq

    def check(self, seq: int) -> None:
        self.link.wait(seq, time.monotonic() + SECONDS)
        data = self.sent.pop(seq)
        assert bytes(self.link.region.response(seq)[: len(data)]) == data[::-1], f"seq {seq}"


@contextmanager
def echo_shard(kind: str, directory: Path) -> Iterator[EchoShard]:
    shard = EchoShard(kind, directory)
    try:
        yield shard
    finally:
        shard.close()
