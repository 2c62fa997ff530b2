"""TCP, for clients on another host: one-sided writes as far as a socket can.

The shard's side runs a thread that does what a network card would: it receives straight into the client's slots, sets
the signal word and wakes the loop, so the shard's loop cannot tell it from shared memory. Small responses are sent
by the loop itself, large ones by that thread; a client likewise sends large frames from a thread of its own, beside the
engine's GEMM.

A frame is (kind, bytes, seq) and its payload, and nobody stores more of it than the slot that it is for. Client and
shard prove to each other that they know the lease's key, which is never sent: see wire.messages.Challenge. Where the
controller has TLS all of that is inside TLS: see tls.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time

from typing_extensions import override

from lora_server.errors import ProtocolError, ShardUnavailableError
from lora_server.timings import Timings
from lora_server.transport.address import parse, readable, watch, writable
from lora_server.transport.base import Link
from lora_server.transport.frames import BYE, DIRECT_BYTES, HEADER, MESSAGE, STEP, Outbox, frame
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
        """`certificate`: of the shard, which speaks TLS alone; nothing else is believed then."""
        self.shard, self.epoch = shard, hello.epoch
        self.transport = "tls" if certificate else "tcp"
        self._memory: Mapping | None = None
        self._socket: Stream | None = None
        self._sender: _Sender | None = None
        try:
            self._socket = sock = socket.create_connection(parse(address), seconds)
            watch(sock)
            sock.setblocking(False)
            deadline = time.monotonic() + seconds
            if certificate:
                self._socket = connect(sock, certificate, lambda stream: _wait(stream, deadline))
            layout = self._shake_hands(hello, deadline)
            self._memory = Mapping(layout.nbytes)
        except OSError as error:
            self.close()
            raise ShardUnavailableError(f"shard {shard} at {address}: {error.strerror or error}") from error
        except BaseException:
            self.close()
            raise
        self.region = Region(self._memory.view, layout)
        self._sender = _Sender(self._socket)

    def _shake_hands(self, hello: Hello, deadline: float) -> RegionLayout:
        challenge = messages.decode(self._message(deadline), Challenge)
        answer = Answer.to(challenge, hello)
        self._connected().sendmsg(frame(MESSAGE, messages.encode(answer)))
        welcome = messages.decode_welcome(self._message(deadline))
        if not proves(welcome.proof, hello.key, b"shard", answer.nonce, challenge.nonce):
            raise ShardUnavailableError(f"shard {self.shard}: what answers there does not know this lease")
        return RegionLayout(welcome.depth, welcome.request_bytes, welcome.response_bytes)

    def _message(self, deadline: float) -> bytes:
        kind, nbytes, _ = HEADER.unpack(self._receive(bytearray(HEADER.size), deadline))
        if kind != MESSAGE or nbytes > messages.MAX_MESSAGE_BYTES:
            raise ProtocolError(f"shard {self.shard}: got frame {kind} of {nbytes} bytes, expected a message")
        return bytes(self._receive(bytearray(nbytes), deadline))

    def _connected(self) -> Stream:
        if self._socket is None:
            raise self._gone(self.responded() + 1)
        return self._socket

    def _receive(self, memory: bytearray | memoryview, deadline: float) -> memoryview:
        """All of it; raises TimeoutError at the deadline, ConnectionError at the end of the connection."""
        left = view = memoryview(memory)
        while left:
            try:
                received = self._connected().recv_into(left)
            except BlockingIOError:
                _wait(self._connected(), deadline)
                continue
            if not received:
                raise ConnectionResetError("the connection was closed")
            left = left[received:]
        return view

    @override
    def push(self, seq: int, nbytes: int) -> None:
        """The slot is not written again before the response, so its memory itself is sent."""
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
        kind, nbytes, seq = HEADER.unpack(self._receive(bytearray(HEADER.size), deadline))
        if kind != STEP or nbytes > self.region.layout.response_bytes:
            raise ConnectionResetError("the shard said goodbye")
        self._receive(self.region.response(seq)[:nbytes], deadline)
        self.region.response_signal[0] = slot.signal(self.epoch, seq)

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


def _wait(sock: Stream, deadline: float) -> None:
    """Until there may be something to read; raises TimeoutError."""
    if not readable(sock, max(0.0, deadline - time.monotonic())):
        raise TimeoutError("it is silent; is it overloaded, or does one of the two speak TLS alone?")


class _Sender:
    """The client's: small frames go at once, the rest from a thread, which is started when there is the first."""

    def __init__(self, sock: Stream, seconds: float = Timings.send) -> None:
        self._socket, self._outbox, self._seconds = sock, Outbox(sock), seconds
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None
        self._closed = False

    def send(self, frames: list[bytes | memoryview]) -> None:
        """Raises OSError where the connection is gone, as far as is known."""
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
        """What is left is sent if that is soon done."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(0.2)
