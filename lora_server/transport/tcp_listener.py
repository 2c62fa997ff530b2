"""The shard's side of TCP: see tcp. A connection is unauthenticated until it has proved a lease."""

from __future__ import annotations

import contextlib
import queue
import selectors
import socket
import threading
from functools import partial

from typing_extensions import override

from lora_server.clock import SYSTEM, Clock
from lora_server.errors import LeaseError, LoraServerError, ProtocolError
from lora_server.ports import ANY_PORT, TcpPort
from lora_server.timings import Timings
from lora_server.transport.address import listen
from lora_server.transport.base import Connection, DeviceMemory, Grant, Port, pin
from lora_server.transport.frames import BYE, DIRECT_BYTES, MESSAGE, STEP, FrameReceiver, Outbox, frame
from lora_server.transport.mapping import Mapping
from lora_server.transport.tls import ShardCertificate, TlsSocket
from lora_server.transport.unauthenticated import Acceptor, UnauthenticatedPeer
from lora_server.wire import messages, slot
from lora_server.wire.messages import Answer, Refused, Welcome, proves
from lora_server.wire.region import Region

MAX_UNAUTHENTICATED = 256  # connections that have not proved a lease yet


class _TcpPeer(UnauthenticatedPeer):
    """The shard's end of a socket; it has proved a lease once `connection` is set."""

    def __init__(self, sock: socket.socket, certificate: ShardCertificate | None, clock: Clock) -> None:
        super().__init__(sock, certificate, clock)
        self.connection: _TcpConnection | None = None
        self.frames = FrameReceiver(self.socket)
        self.outbox = Outbox(self.socket)
        self.lock = threading.Lock()  # the outbox, and writes to the socket
        self.closing = False

    def place(self, kind: int, nbytes: int, seq: int) -> memoryview:
        """Return the memory for a frame's payload: for a step, the client's slot. Raises ProtocolError."""
        connection = self.connection
        if connection is None:
            if kind != MESSAGE or nbytes > messages.MAX_MESSAGE_BYTES:
                raise ProtocolError("expected a proof first")
            return memoryview(bytearray(nbytes))
        if kind == STEP:
            target, newest = connection.region.request(seq), connection.requested()
            most = connection.served + connection.region.layout.depth
            if nbytes > len(target) or not newest < seq <= most:
                raise ProtocolError(f"{nbytes} bytes for seq {seq} after {newest}")
            return target[:nbytes]
        if kind != BYE or nbytes:
            raise ProtocolError(f"frame {kind} of {nbytes} bytes")
        return memoryview(b"")


class _TcpConnection(Connection):
    def __init__(self, grant: Grant, region: Region, peer: _TcpPeer, listener: TcpListener) -> None:
        self.transport = "tls" if isinstance(peer.socket, TlsSocket) else "tcp"
        self.grant, self.region = grant, region
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
        max_unauthenticated: int = MAX_UNAUTHENTICATED,
        clock: Clock = SYSTEM,
    ) -> None:
        """Listen at `host`, which clients reach as `advertise` if that is another.

        `device`: of a shard that computes on a GPU. `certificate`: encrypt everything.
        """
        self._port, self._device = port, device
        listening, self.address = listen(host, advertise, tcp)
        self._selector = selectors.DefaultSelector()
        self._bell, self._bell_end = socket.socketpair()
        for sock in (self._bell, self._bell_end):
            sock.setblocking(False)
        self._selector.register(self._bell, selectors.EVENT_READ)
        make = partial(_TcpPeer, certificate=certificate, clock=clock)
        self._acceptor = Acceptor[_TcpPeer](
            listening, self._selector, make, self._close, max_unauthenticated, handshake_seconds, clock
        )
        self._asked: queue.SimpleQueue[_TcpPeer] = queue.SimpleQueue()  # to be sent to, or closed
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="tcp-listener", daemon=True)
        self._thread.start()

    def send(self, peer: _TcpPeer, frames: list[bytes | memoryview]) -> None:
        """Send frames, on the shard's loop; does nothing for a client that is gone."""
        with peer.lock:
            idle = not peer.outbox
            peer.outbox.put(frames)
            if not idle:
                return  # the thread is at it
            with contextlib.suppress(OSError):  # the thread sees it, too
                if len(frames[-1]) <= DIRECT_BYTES and peer.outbox.go_on():
                    return
        self._ask(peer)

    def let_go(self, peer: _TcpPeer) -> None:
        """Say goodbye and close, from any thread."""
        peer.closing = True
        self._ask(peer)

    def _ask(self, peer: _TcpPeer) -> None:
        self._asked.put(peer)
        with contextlib.suppress(OSError):  # it is full, so it rings; or it is closed
            self._bell_end.send(b"!")

    # -- the thread

    def _run(self) -> None:
        while not self._stopping:
            shaking_hands = list[_TcpPeer]()
            for key, events in self._selector.select(0.2 if self._acceptor.peers else None):
                if key.fileobj is self._acceptor.listening:
                    self._acceptor.accept()
                elif key.fileobj is self._bell:
                    self._answer_bell()
                elif key.data.greeted:
                    self._serve(key.data, events)
                else:
                    shaking_hands.append(key.data)
            if shaking_hands:  # one per round, since that is dear and clients' steps wait meanwhile
                self._serve(min(shaking_hands, key=lambda peer: peer.looked_at), selectors.EVENT_READ)
            self._acceptor.end_silent()

    def _answer_bell(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._bell.recv(4096)
        with contextlib.suppress(queue.Empty):
            while True:
                self._flush(self._asked.get_nowait())

    def _serve(self, peer: _TcpPeer, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush(peer)
        if events & selectors.EVENT_READ:
            try:
                while peer.greet() and peer.frames.receive(peer.place):
                    self._on_frame(peer, *peer.frames.take())
            except BlockingIOError:
                return
            except (OSError, LoraServerError):
                self._close(peer)

    def _flush(self, peer: _TcpPeer) -> None:
        """Send more of its outbox, the rest when the socket takes more; a closing peer is sent BYE and closed."""
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

    def _on_frame(self, peer: _TcpPeer, kind: int, seq: int, payload: memoryview) -> None:
        if kind == MESSAGE:
            self._admit(peer, bytes(payload))
        elif kind == STEP and peer.connection is not None:
            peer.connection.region.request_signal[0] = slot.signal(peer.connection.grant.epoch, seq)
            self._port.ring(peer.connection)
        else:
            raise ConnectionResetError("it said goodbye")

    def _admit(self, peer: _TcpPeer, message: bytes) -> None:
        try:
            answer = messages.decode(message, Answer)
            grant = self._port.grants.get(answer.client, answer.epoch)
            if grant is None or not proves(answer.proof, grant.key, b"client", peer.nonce, answer.nonce):
                raise LeaseError(
                    f"client {answer.client} epoch {answer.epoch}: no such lease on this shard; join again"
                )
            grant.require(answer.generation)
            region = Region(Mapping(self._port.layout.nbytes).view, self._port.layout)
            connection = _TcpConnection(grant, region, peer, self)
            pin(connection, self._device)
            self._port.connect(connection)
        except (LeaseError, ProtocolError) as error:
            peer.socket.sendmsg(frame(MESSAGE, messages.encode(Refused(error.code, str(error)))))
            raise
        peer.connection = connection
        self._acceptor.forget(peer)
        layout, proof = self._port.layout, messages.proof(grant.key, b"shard", answer.nonce, peer.nonce)
        welcome = Welcome(layout.depth, layout.request_bytes, layout.response_bytes, proof=proof)
        peer.socket.sendmsg(frame(MESSAGE, messages.encode(welcome)))

    def _close(self, peer: _TcpPeer) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(peer.socket)
        self._acceptor.forget(peer)
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
            if isinstance(key.data, _TcpPeer):
                key.data.closing = True
                self._flush(key.data)
        self._selector.close()
        for sock in (self._acceptor.listening, self._bell, self._bell_end):
            sock.close()
