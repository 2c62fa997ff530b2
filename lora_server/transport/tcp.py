"""TCP, for clients on another host: one-sided writes as far as a socket can.

The shard's side runs a thread that does what a network card would: it receives straight into the client's slots, sets
the signal word and rings the doorbell, so the shard's loop cannot tell it from shared memory. Small responses are sent
by the loop itself, large ones by that thread; a client likewise sends large frames from a thread of its own, beside the
engine's GEMM.

A frame is (kind, bytes, seq) and its payload, and nobody stores more of it than the slot that it is for. Client and
shard prove to each other that they know the lease's key, which is never sent: see wire.messages.Challenge.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import select
import selectors
import socket
import struct
import threading
import time
from collections import deque

from typing_extensions import override

from lora_server.errors import LeaseError, LoraServerError, ProtocolError, ShardUnavailableError
from lora_server.ports import ANY_PORT, TcpPort
from lora_server.transport.address import listen, parse, watch
from lora_server.transport.base import Connection, DeviceMemory, Grant, Link, Port, pin
from lora_server.transport.mapping import Mapping
from lora_server.wire import messages, slot
from lora_server.wire.messages import Answer, Challenge, Hello, Refused, Welcome, proves
from lora_server.wire.region import Region, RegionLayout

HANDSHAKE_SECONDS, SEND_SECONDS = 5.0, 30.0
MAX_STRANGERS = 256  # connections that have not proved a lease yet; the oldest goes
DIRECT_BYTES = 64 << 10  # what the loop sends by itself
HEADER = struct.Struct("<IIQ")  # kind, payload bytes, seq
_MESSAGE, _STEP, _BYE = 1, 2, 3


def _frame(kind: int, payload: bytes | memoryview = b"", seq: int = 0) -> list[bytes | memoryview]:
    return [HEADER.pack(kind, len(payload), seq), payload]


class TcpLink(Link):
    """The client's end; its region is private memory that mirrors the shard's."""

    transport = "tcp"

    def __init__(self, address: str, hello: Hello, shard: int, seconds: float = HANDSHAKE_SECONDS) -> None:
        self.shard, self.epoch = shard, hello.epoch
        self._memory: Mapping | None = None
        self._socket: socket.socket | None = None
        self._sender: _Sender | None = None
        try:
            self._socket = socket.create_connection(parse(address), seconds)
            watch(self._socket)
            self._socket.setblocking(False)
            layout = self._shake_hands(hello, time.monotonic() + seconds)
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
        self._connected().sendmsg(_frame(_MESSAGE, messages.encode(answer)))
        welcome = messages.decode_welcome(self._message(deadline))
        if not proves(welcome.proof, hello.key, b"shard", answer.nonce, challenge.nonce):
            raise ShardUnavailableError(f"shard {self.shard}: what answers there does not know this lease")
        return RegionLayout(welcome.depth, welcome.request_bytes, welcome.response_bytes)

    def _message(self, deadline: float) -> bytes:
        kind, nbytes, _ = HEADER.unpack(self._receive(bytearray(HEADER.size), deadline))
        if kind != _MESSAGE or nbytes > messages.MAX_MESSAGE_BYTES:
            raise ProtocolError(f"shard {self.shard}: got frame {kind} of {nbytes} bytes, expected a message")
        return bytes(self._receive(bytearray(nbytes), deadline))

    def _connected(self) -> socket.socket:
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
                if not select.select([self._connected()], [], [], max(0.0, deadline - time.monotonic()))[0]:
                    raise TimeoutError(f"{len(left)} bytes are missing") from None
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
            self._sender.send(_frame(_STEP, self.region.request(seq)[:nbytes], seq))
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
        if kind != _STEP or nbytes > self.region.layout.response_bytes:
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
        if not head or head[:4] == HEADER.pack(_BYE, 0, 0)[:4]:
            raise self._gone(self.responded() + 1)

    @override
    def close(self) -> None:
        sock, self._socket = self._socket, None
        if sock is None:
            return
        if self._sender is not None:
            with contextlib.suppress(OSError):
                self._sender.send(_frame(_BYE))
            self._sender.close()
        sock.close()
        if self._memory is not None:
            self._memory.drop()


class _Outbox:
    """What a socket did not take yet. `go_on` sends more; under its owner's lock."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket, self._left = sock, deque[memoryview]()

    def __bool__(self) -> bool:
        return bool(self._left)

    def put(self, frames: list[bytes | memoryview]) -> None:
        self._left.extend(memoryview(frame).cast("B") for frame in frames if len(frame))

    def go_on(self) -> bool:
        """As much as the socket takes now; whether all is sent. Raises OSError."""
        while self._left:
            try:
                sent = self._socket.sendmsg(list(self._left)[:8])
            except BlockingIOError:
                return False
            while sent:
                first = self._left.popleft()
                if sent < len(first):
                    self._left.appendleft(first[sent:])
                    break
                sent -= len(first)
        return True


class _Sender:
    """The client's: small frames go at once, the rest from a thread, which is started when there is the first."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket, self._outbox = sock, _Outbox(sock)
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
                if not select.select([], [self._socket], [], SEND_SECONDS)[1]:
                    raise TimeoutError(f"the shard took nothing for {SEND_SECONDS:g} s")
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


class _Peer:
    """The shard's end of a socket: a stranger until `connection` is set."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket, self.since = sock, time.monotonic()
        self.nonce = secrets.token_bytes(messages.NONCE_BYTES)
        self.connection: _TcpConnection | None = None
        self.outbox = _Outbox(sock)
        self.lock = threading.Lock()  # the outbox, and writes to the socket
        self.closing = False
        self._header = bytearray(HEADER.size)
        self._left: memoryview = memoryview(self._header)
        self._in_payload = False
        self._message = bytearray()
        self._kind = self._seq = self._nbytes = 0

    def receive(self) -> bool:
        """What is there, up to the end of a frame; whether one is complete. Raises OSError, ProtocolError."""
        while True:
            if not self._left:
                if self._in_payload:
                    return True
                self._begin_payload()
                continue
            received = self.socket.recv_into(self._left)
            if not received:
                raise ConnectionResetError("the client is gone")
            self._left = self._left[received:]

    def _begin_payload(self) -> None:
        self._kind, self._nbytes, self._seq = HEADER.unpack(self._header)
        self._in_payload = True
        connection = self.connection
        if connection is None:
            if self._kind != _MESSAGE or self._nbytes > messages.MAX_MESSAGE_BYTES:
                raise ProtocolError("expected a proof first")
            self._message = bytearray(self._nbytes)
            self._left = memoryview(self._message)
        elif self._kind == _STEP:
            target, newest = connection.region.request(self._seq), connection.requested()
            most = connection.served + connection.region.layout.depth
            if self._nbytes > len(target) or not newest < self._seq <= most:
                raise ProtocolError(f"{self._nbytes} bytes for seq {self._seq} after {newest}")
            self._left = target[: self._nbytes]
        elif self._kind != _BYE or self._nbytes:
            raise ProtocolError(f"frame {self._kind} of {self._nbytes} bytes")

    def take(self) -> tuple[int, int, bytes]:
        """The complete frame: kind, seq, and what it says if it is a message; the next may come."""
        said = self._kind, self._seq, bytes(self._message)
        self._in_payload, self._message, self._left = False, bytearray(), memoryview(self._header)
        return said


class _TcpConnection(Connection):
    transport = "tcp"

    def __init__(self, grant: Grant, region: Region, peer: _Peer, listener: TcpListener) -> None:
        self.client, self.epoch, self.region = grant.client, grant.epoch, region
        self._peer, self._listener = peer, listener

    @override
    def respond(self, seq: int, nbytes: int) -> None:
        self._listener.send(self._peer, _frame(_STEP, self.region.response(seq)[:nbytes], seq))

    @override
    def close(self) -> None:
        self._listener.let_go(self._peer)


class TcpListener:
    """Accepts clients on a TCP port and puts what they push into their slots, in a thread of its own."""

    def __init__(
        self,
        port: Port,
        host: str,
        advertise: str = "",
        tcp: TcpPort = ANY_PORT,
        device: DeviceMemory | None = None,
    ) -> None:
        """Listens at `host`, and tells clients to come to `advertise` if that is another.

        `device`: of a shard that computes on a GPU.
        """
        self._port, self._device = port, device
        self._listening, self.address = listen(host, advertise, tcp)
        self._selector = selectors.DefaultSelector()
        self._bell, self._bell_end = socket.socketpair()
        for sock in (self._listening, self._bell, self._bell_end):
            sock.setblocking(False)
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._strangers: deque[_Peer] = deque()
        self._asked: queue.SimpleQueue[_Peer] = queue.SimpleQueue()  # to be sent to, or closed
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="tcp-listener", daemon=True)
        self._thread.start()

    def send(self, peer: _Peer, frames: list[bytes | memoryview]) -> None:
        """From the shard's loop; a client that is gone gets nothing."""
        with peer.lock:
            idle = not peer.outbox
            peer.outbox.put(frames)
            if not idle:
                return  # the thread is at it
            with contextlib.suppress(OSError):  # the thread sees it, too
                if len(frames[-1]) <= DIRECT_BYTES and peer.outbox.go_on():
                    return
        self._ask(peer)

    def let_go(self, peer: _Peer) -> None:
        """From any thread: say goodbye, and close."""
        peer.closing = True
        self._ask(peer)

    def _ask(self, peer: _Peer) -> None:
        self._asked.put(peer)
        with contextlib.suppress(OSError):  # it is full, so it rings; or it is closed
            self._bell_end.send(b"!")

    # -- the thread

    def _run(self) -> None:
        while not self._stopping:
            for key, events in self._selector.select(0.2 if self._strangers else None):
                if key.fileobj is self._listening:
                    self._accept()
                elif key.fileobj is self._bell:
                    self._answer_bell()
                else:
                    self._serve(key.data, events)
            self._end_silent()

    def _accept(self) -> None:
        try:
            sock, _ = self._listening.accept()
        except OSError:  # it went away; or there are no descriptors, and strangers have to go
            self._end_oldest()
            return
        peer = _Peer(sock)
        try:
            sock.setblocking(False)
            watch(sock)
            sock.sendmsg(_frame(_MESSAGE, messages.encode(Challenge(peer.nonce))))
        except OSError:
            sock.close()
            return
        if len(self._strangers) >= MAX_STRANGERS:
            self._end_oldest()
        self._strangers.append(peer)
        self._selector.register(sock, selectors.EVENT_READ, peer)

    def _end_oldest(self) -> None:
        if self._strangers:
            self._close(self._strangers[0])
        else:
            time.sleep(0.05)  # the loop of this thread must not spin

    def _end_silent(self) -> None:
        now = time.monotonic()
        while self._strangers and now - self._strangers[0].since > HANDSHAKE_SECONDS:
            self._close(self._strangers[0])

    def _answer_bell(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._bell.recv(4096)
        with contextlib.suppress(queue.Empty):
            while True:
                self._flush(self._asked.get_nowait())

    def _serve(self, peer: _Peer, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush(peer)
        if events & selectors.EVENT_READ:
            try:
                while peer.receive():
                    self._on_frame(peer, *peer.take())
            except BlockingIOError:
                return
            except (OSError, LoraServerError):
                self._close(peer)

    def _flush(self, peer: _Peer) -> None:
        """Send more of what it is owed, and look again when it takes more; a last word before it is closed."""
        try:
            with peer.lock:
                if peer.closing and not peer.outbox:
                    peer.outbox.put(_frame(_BYE))
                done = peer.outbox.go_on()
            if peer.closing:
                self._close(peer)
                return
            events = selectors.EVENT_READ | (0 if done else selectors.EVENT_WRITE)
            self._selector.modify(peer.socket, events, peer)
        except (OSError, KeyError, ValueError):
            self._close(peer)

    def _on_frame(self, peer: _Peer, kind: int, seq: int, message: bytes) -> None:
        if kind == _MESSAGE:
            self._admit(peer, message)
        elif kind == _STEP and peer.connection is not None:
            peer.connection.region.request_signal[0] = slot.signal(peer.connection.epoch, seq)
            self._port.ring()
        else:
            raise ConnectionResetError("it said goodbye")

    def _admit(self, peer: _Peer, message: bytes) -> None:
        try:
            answer = messages.decode(message, Answer)
            grant = self._port.lease(answer.client, answer.epoch)
            if grant is None or not proves(answer.proof, grant.key, b"client", peer.nonce, answer.nonce):
                raise LeaseError(
                    f"client {answer.client} epoch {answer.epoch}: no such lease on this shard; join again"
                )
            region = Region(Mapping(self._port.layout.nbytes).view, self._port.layout)
            connection = _TcpConnection(grant, region, peer, self)
            pin(connection, self._device)
            self._port.connect(connection)
        except (LeaseError, ProtocolError) as error:
            peer.socket.sendmsg(_frame(_MESSAGE, messages.encode(Refused(error.code, str(error)))))
            raise
        peer.connection = connection
        self._strangers.remove(peer)
        layout, proof = self._port.layout, messages.proof(grant.key, b"shard", answer.nonce, peer.nonce)
        welcome = Welcome(layout.depth, layout.request_bytes, layout.response_bytes, proof=proof)
        peer.socket.sendmsg(_frame(_MESSAGE, messages.encode(welcome)))

    def _close(self, peer: _Peer) -> None:
        """It is gone, or has to go."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(peer.socket)
        with contextlib.suppress(ValueError):
            self._strangers.remove(peer)
        peer.socket.close()
        if peer.connection is not None:
            self._port.disconnect(peer.connection)

    def close(self) -> None:
        """Stop listening and cut all of its clients off; idempotent."""
        if self._stopping:
            return
        self._stopping = True
        with contextlib.suppress(OSError):
            self._bell_end.send(b"!")
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, _Peer):
                key.data.closing = True
                self._flush(key.data)
        self._selector.close()
        for sock in (self._listening, self._bell, self._bell_end):
            sock.close()
