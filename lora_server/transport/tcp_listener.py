"""The shard's side of TCP: see tcp. Everything that arrives is somebody's until a lease is proved."""

from __future__ import annotations

import contextlib
import queue
import selectors
import socket
import threading
import time
from collections import deque

from typing_extensions import override

from lora_server.clock import SYSTEM, Clock
from lora_server.errors import LeaseError, LoraServerError, ProtocolError
from lora_server.ports import ANY_PORT, TcpPort
from lora_server.timings import Timings
from lora_server.transport.address import listen
from lora_server.transport.base import Connection, DeviceMemory, Grant, Port, pin
from lora_server.transport.frames import BYE, DIRECT_BYTES, HEADER, MESSAGE, STEP, Outbox, frame
from lora_server.transport.mapping import Mapping
from lora_server.transport.stranger import Stranger
from lora_server.transport.tls import ShardCertificate, TlsSocket
from lora_server.wire import messages, slot
from lora_server.wire.messages import Answer, Refused, Welcome, proves
from lora_server.wire.region import Region

MAX_STRANGERS = 256  # connections that have not proved a lease yet; the oldest goes


class _Peer(Stranger):
    """The shard's end of a socket: a stranger until `connection` is set."""

    def __init__(self, sock: socket.socket, certificate: ShardCertificate | None, clock: Clock) -> None:
        super().__init__(sock, certificate, clock)
        self.connection: _TcpConnection | None = None
        self.outbox = Outbox(self.socket)
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
            if self._kind != MESSAGE or self._nbytes > messages.MAX_MESSAGE_BYTES:
                raise ProtocolError("expected a proof first")
            self._message = bytearray(self._nbytes)
            self._left = memoryview(self._message)
        elif self._kind == STEP:
            target, newest = connection.region.request(self._seq), connection.requested()
            most = connection.served + connection.region.layout.depth
            if self._nbytes > len(target) or not newest < self._seq <= most:
                raise ProtocolError(f"{self._nbytes} bytes for seq {self._seq} after {newest}")
            self._left = target[: self._nbytes]
        elif self._kind != BYE or self._nbytes:
            raise ProtocolError(f"frame {self._kind} of {self._nbytes} bytes")

    def take(self) -> tuple[int, int, bytes]:
        """The complete frame: kind, seq, and what it says if it is a message; the next may come."""
        said = self._kind, self._seq, bytes(self._message)
        self._in_payload, self._message, self._left = False, bytearray(), memoryview(self._header)
        return said


class _TcpConnection(Connection):
    def __init__(self, grant: Grant, region: Region, peer: _Peer, listener: TcpListener) -> None:
        self.transport = "tls" if isinstance(peer.socket, TlsSocket) else "tcp"
        self.client, self.epoch, self.region = grant.client, grant.epoch, region
        self._peer, self._listener = peer, listener

    @override
    def respond(self, seq: int, nbytes: int) -> None:
        self._listener.send(self._peer, frame(STEP, self.region.response(seq)[:nbytes], seq))

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
        certificate: ShardCertificate | None = None,
        handshake_seconds: float = Timings.handshake,
        max_strangers: int = MAX_STRANGERS,
        clock: Clock = SYSTEM,
    ) -> None:
        """Listens at `host`, and tells clients to come to `advertise` if that is another.

        `device`: of a shard that computes on a GPU. `certificate`: with it nothing goes in the clear.
        """
        self._port, self._device, self._certificate = port, device, certificate
        self._handshake_seconds, self._max_strangers, self._clock = handshake_seconds, max_strangers, clock
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
            shaking_hands = list[_Peer]()
            for key, events in self._selector.select(0.2 if self._strangers else None):
                if key.fileobj is self._listening:
                    self._accept()
                elif key.fileobj is self._bell:
                    self._answer_bell()
                elif key.data.greeted:
                    self._serve(key.data, events)
                else:
                    shaking_hands.append(key.data)
            if shaking_hands:  # one per round, since that is dear and clients' steps wait meanwhile
                self._serve(min(shaking_hands, key=lambda peer: peer.looked_at), selectors.EVENT_READ)
            self._end_silent()

    def _accept(self) -> None:
        try:
            sock, _ = self._listening.accept()
        except OSError:  # it went away; or there are no descriptors, and strangers have to go
            self._end_oldest()
            return
        try:
            peer = _Peer(sock, self._certificate, self._clock)
        except OSError:
            return
        try:
            peer.greet()
        except OSError:
            peer.socket.close()
            return
        if len(self._strangers) >= self._max_strangers:
            self._end_oldest()
        self._strangers.append(peer)
        self._selector.register(peer.socket, selectors.EVENT_READ, peer)

    def _end_oldest(self) -> None:
        if self._strangers:
            self._close(self._strangers[0])
        else:
            time.sleep(0.05)  # the loop of this thread must not spin

    def _end_silent(self) -> None:
        now = self._clock.now()
        while self._strangers and now - self._strangers[0].since > self._handshake_seconds:
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
                while peer.greet() and peer.receive():
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
                    peer.outbox.put(frame(BYE))
                done = peer.outbox.go_on()
            if peer.closing:
                self._close(peer)
                return
            events = selectors.EVENT_READ | (0 if done else selectors.EVENT_WRITE)
            self._selector.modify(peer.socket, events, peer)
        except (OSError, KeyError, ValueError):
            self._close(peer)

    def _on_frame(self, peer: _Peer, kind: int, seq: int, message: bytes) -> None:
        if kind == MESSAGE:
            self._admit(peer, message)
        elif kind == STEP and peer.connection is not None:
            peer.connection.region.request_signal[0] = slot.signal(peer.connection.epoch, seq)
            self._port.ring(peer.connection)
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
            peer.socket.sendmsg(frame(MESSAGE, messages.encode(Refused(error.code, str(error)))))
            raise
        peer.connection = connection
        self._strangers.remove(peer)
        layout, proof = self._port.layout, messages.proof(grant.key, b"shard", answer.nonce, peer.nonce)
        welcome = Welcome(layout.depth, layout.request_bytes, layout.response_bytes, proof=proof)
        peer.socket.sendmsg(frame(MESSAGE, messages.encode(welcome)))

    def _close(self, peer: _Peer) -> None:
        """It is gone, or has to go."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(peer.socket)
        with contextlib.suppress(ValueError):
            self._strangers.remove(peer)
        if peer.connection is not None:  # before the client can see it
            self._port.disconnect(peer.connection)
        peer.socket.close()

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
