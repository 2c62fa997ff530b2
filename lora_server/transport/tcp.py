"""TCP, for clients on another host: as close to one-sided writes as a socket gets.

The shard's side runs a thread that acts as a network card: it receives straight into the client's slots, sets
the signal word and wakes the loop, so the shard's loop cannot tell it from shared memory. Small responses are sent
by the loop itself, large ones by that thread; a client likewise sends large frames from a thread of its own, beside the
engine's GEMM.

A frame is (kind, bytes, seq) and its payload, of which no more is stored than its slot holds. Client and
shard prove to each other that they know the lease's key, which is never sent: see wire.messages.Challenge. Where the
controller has TLS all of that is inside TLS: see tls.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from functools import partial

from typing_extensions import override

from lora_server.errors import ShardUnavailableError
from lora_server.timings import Timings
from lora_server.transport.address import parse, readable, watch, writable
from lora_server.transport.base import Link
from lora_server.transport.frames import (
    BYE,
    DIRECT_BYTES,
    HEADER,
    MESSAGE,
    STEP,
    FrameReceiver,
    Outbox,
    frame,
    receive_message,
)
from lora_server.transport.mapping import Mapping
from lora_server.transport.tls import Stream, connect
from lora_server.wire import messages, slot
from lora_server.wire.messages import Answer, Challenge, Hello, proves
from lora_server.wire.region import Region, RegionLayout


class TcpLink(Link):
    """The client's end; its region is private memory that mirrors the shard's."""

    def __init__(
        self, address: str, hello: Hello, shard: int, seconds: float = Timings.handshake, certificate: bytes = b""
    ) -> None:
        """`certificate`: the shard's; with it the connection uses TLS and accepts no other certificate."""
        self.shard, self.epoch, self.host = shard, hello.epoch, parse(address)[0]
        self.transport = "tls" if certificate else "tcp"
        self._memory: Mapping | None = None
        self._socket: Stream | None = None
        self._sender: _Sender | None = None
        try:
            self._socket = sock = socket.create_connection(parse(address), seconds)
            watch(sock)
            sock.setblocking(False)
            wait = partial(_wait, deadline=time.monotonic() + seconds)
            if certificate:
                self._socket = connect(sock, certificate, wait)
            layout = _authenticate(self._socket, hello, shard, wait)
            self._memory = Mapping(layout.nbytes)
        except OSError as error:
            self.close()
            raise ShardUnavailableError(f"shard {shard} at {address}: {error.strerror or error}") from error
        except BaseException:
            self.close()
            raise
        self.region = Region(self._memory.view, layout)
        self._sender, self._frames = _Sender(self._socket), FrameReceiver(self._socket)

    def _connected(self) -> Stream:
        if self._socket is None:
            raise self._gone(self.responded() + 1)
        return self._socket

    @override
    def push(self, seq: int, nbytes: int) -> None:
        """Send the slot's own memory: the client does not write to it before the response."""
        try:
            assert self._sender is not None
            self._sender.send(frame(STEP, self.region.request(seq)[:nbytes], seq))
        except (OSError, AssertionError):
            raise self._gone(seq) from None

    @override
    def wait(self, seq: int, deadline: float) -> None:
        while self.responded() < seq:
            try:
                self._respond(deadline)
            except TimeoutError:
                raise self._timeout(seq) from None
            except OSError:
                raise self._gone(seq) from None

    def _respond(self, deadline: float) -> None:
        """Receive one response; after a TimeoutError, as much of it as came stays received."""
        sock, frames = self._connected(), self._frames
        while True:
            try:
                if frames.receive(self._place):
                    break
            except BlockingIOError:
                _wait(sock, deadline)
        _, seq, _ = frames.take()
        self.region.response_signal[0] = slot.signal(self.epoch, seq)

    def _place(self, kind: int, nbytes: int, seq: int) -> memoryview:
        if kind != STEP or nbytes > self.region.layout.response_bytes:
            raise ConnectionResetError("the shard said goodbye")
        return self.region.response(seq)[:nbytes]

    @override
    def check(self) -> None:
        try:
            head = self._connected().recv(HEADER.size, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            head = b""
        if not head or head[:4] == HEADER.pack(BYE, 0, 0)[:4]:
            raise self._gone(self.responded() + 1)

    @override
    def close(self) -> None:
        sock, self._socket = self._socket, None
        if sock is None:
            return
        if self._sender is not None:
            with contextlib.suppress(OSError):
                self._sender.send(frame(BYE))
            self._sender.close()
        sock.close()
        if self._memory is not None:
            self._memory.drop()


def _authenticate(sock: Stream, hello: Hello, shard: int, wait: Callable[[Stream], None]) -> RegionLayout:
    """Have both ends prove that they know the lease's key; return the layout of the client's region."""
    challenge = messages.decode(receive_message(sock, messages.MAX_MESSAGE_BYTES, wait), Challenge)
    answer = Answer.to(challenge, hello)
    sock.sendmsg(frame(MESSAGE, messages.encode(answer)))
    welcome = messages.decode_welcome(receive_message(sock, messages.MAX_MESSAGE_BYTES, wait))
    if not proves(welcome.proof, hello.key, b"shard", answer.nonce, challenge.nonce):
        raise ShardUnavailableError(f"shard {shard}: the peer does not know this lease")
    return RegionLayout(welcome.depth, welcome.request_bytes, welcome.response_bytes)


def _wait(sock: Stream, deadline: float) -> None:
    """Block until there may be something to read; raises TimeoutError."""
    if not readable(sock, max(0.0, deadline - time.monotonic())):
        raise TimeoutError("the shard is silent; is it overloaded, or does only one of the two speak TLS?")


class _Sender:
    """A client's sender: sends small frames at once, the others from a thread that starts with the first of them."""

    def __init__(self, sock: Stream, seconds: float = Timings.send) -> None:
        self._socket, self._outbox, self._seconds = sock, Outbox(sock), seconds
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None
        self._closed = False

    def send(self, frames: list[bytes | memoryview]) -> None:
        """Send frames, or queue them for the thread; raises OSError if the connection is known to be gone."""
        with self._changed:
            if self._error is not None:
                raise self._error
            idle = not self._outbox
            self._outbox.put(frames)
            if idle and len(frames[-1]) <= DIRECT_BYTES and self._outbox.go_on():
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tcp-sender", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    while not self._outbox and not self._closed:
                        self._changed.wait()
                    if not self._outbox or self._outbox.go_on():
                        if self._closed:
                            return
                        continue
                if not writable(self._socket, self._seconds):
                    raise TimeoutError(f"the shard took nothing for {self._seconds:g} s")
        except (OSError, ValueError) as error:  # ValueError: it was closed
            with self._changed:
                self._error = ConnectionResetError(str(error))

    def close(self) -> None:
        """Stop the thread; bytes that are left are sent only if that takes a moment."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(0.2)
