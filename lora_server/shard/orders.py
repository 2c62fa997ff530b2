"""A leader's orders on their way to the followers of its stage: TCP, frames of transport.frames.

Both sides prove that they know the leader's badge, which the controller gave to the stage's shards, and never send it.
Who does not within `handshake_seconds` is cut off, has never more than one small message stored, and hears no order.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from functools import partial

from lora_server.errors import ProtocolError
from lora_server.ports import ANY_PORT, TcpPort
from lora_server.timings import Timings
from lora_server.transport.address import listen, parse, readable, watch
from lora_server.transport.frames import HEADER, MESSAGE, frame
from lora_server.transport.stranger import Stranger
from lora_server.transport.tls import ShardCertificate, Stream, connect
from lora_server.wire import messages
from lora_server.wire.messages import Challenge, Follow, Lead, Order, proves

MAX_STRANGERS = 64  # that have proved nothing yet; the oldest goes
MAX_BYTES = 1024  # of a message
STOP_SECONDS = 0.1  # within which a follower stops, and tries again
_FOLLOWER, _LEADER = b"follower", b"leader"


class _Peer(Stranger):
    """Who connected to a leader, until it has proved to be a follower."""

    heard = b""

    def message(self) -> bytes | None:
        """Its proof, when all of it is there. Raises OSError, ProtocolError."""
        more = self.socket.recv(MAX_BYTES)
        self.heard += more
        if not more or len(self.heard) > HEADER.size + MAX_BYTES:
            raise ProtocolError("it went, or says too much")
        if len(self.heard) < HEADER.size:
            return None
        kind, nbytes, _ = HEADER.unpack_from(self.heard)
        if kind != MESSAGE or nbytes > MAX_BYTES or len(self.heard) > HEADER.size + nbytes:
            raise ProtocolError(f"frame {kind} of {nbytes} bytes")
        return self.heard[HEADER.size :] if len(self.heard) == HEADER.size + nbytes else None


class OrderSender:
    """The leader's end. `send` is the loop's; a thread lets followers in.

    `certificate`: with it nothing goes in the clear.
    """

    def __init__(
        self,
        badge: bytes,
        host: str,
        advertise: str = "",
        port: TcpPort = ANY_PORT,
        certificate: ShardCertificate | None = None,
        handshake_seconds: float = Timings.handshake,
    ) -> None:
        self._badge, self._certificate, self._handshake_seconds = badge, certificate, handshake_seconds
        self._listening, self.address = listen(host, advertise, port)
        self._listening.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._strangers: list[_Peer] = []
        self._followers: tuple[_Peer, ...] = ()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="followers", daemon=True)
        self._thread.start()

    @property
    def followers(self) -> int:
        """How many hear what is sent now."""
        return len(self._followers)

    def send(self, order: Order) -> None:
        """To all followers. One that took none for so long that its connection is full is cut off."""
        data = b"".join(frame(MESSAGE, messages.encode(order)))
        for peer in self._followers:
            try:
                taken = peer.socket.sendmsg([data]) == len(data)
            except OSError:
                taken = False
            if not taken:
                with contextlib.suppress(OSError):
                    peer.socket.shutdown(socket.SHUT_RDWR)  # the thread sees it

    def _run(self) -> None:
        while not self._stopping:
            for key, _ in self._selector.select(STOP_SECONDS):
                if key.data is None:
                    self._accept()
                else:
                    self._hear(key.data)
            while self._strangers and time.monotonic() - self._strangers[0].since > self._handshake_seconds:
                self._end(self._strangers[0])

    def _accept(self) -> None:
        try:
            sock, _ = self._listening.accept()
        except OSError:  # it went away; or there are no descriptors, and a stranger has to go
            if self._strangers:
                self._end(self._strangers[0])
            else:
                time.sleep(0.05)  # the loop of this thread must not spin
            return
        try:
            peer = _Peer(sock, self._certificate)
        except OSError:
            return
        try:
            peer.greet()
        except OSError:
            peer.socket.close()
            return
        if len(self._strangers) >= MAX_STRANGERS:
            self._end(self._strangers[0])
        self._strangers.append(peer)
        self._selector.register(peer.socket, selectors.EVENT_READ, peer)

    def _hear(self, peer: _Peer) -> None:
        try:
            said = peer.message() if peer.greet() else None
            if said is not None:
                self._admit(peer, messages.decode(said, Follow))
        except BlockingIOError:
            return
        except (OSError, ProtocolError):
            self._end(peer)

    def _admit(self, peer: _Peer, follow: Follow) -> None:
        if peer not in self._strangers or not proves(follow.proof, self._badge, _FOLLOWER, peer.nonce, follow.nonce):
            raise ProtocolError("it does not know the badge")
        proof = messages.proof(self._badge, _LEADER, follow.nonce, peer.nonce)
        peer.socket.sendmsg(frame(MESSAGE, messages.encode(Lead(proof))))
        self._strangers.remove(peer)
        self._followers = (*self._followers, peer)

    def _end(self, peer: _Peer) -> None:
        self._selector.unregister(peer.socket)
        self._strangers = [one for one in self._strangers if one is not peer]
        self._followers = tuple(one for one in self._followers if one is not peer)
        peer.socket.close()

    def close(self) -> None:
        """Idempotent."""
        if self._stopping:
            return
        self._stopping = True
        self._thread.join()
        for peer in (*self._strangers, *self._followers):
            self._end(peer)
        self._selector.close()
        self._listening.close()


class OrderReceiver:
    """A follower's end: a thread that gives each order to `take`, and connects anew until it is closed.

    `certificate`: of the leader, which speaks TLS alone.
    """

    def __init__(
        self,
        address: str,
        badge: bytes,
        take: Callable[[Order], None],
        certificate: bytes = b"",
        handshake_seconds: float = Timings.handshake,
    ) -> None:
        self._address, self._badge, self._take, self._certificate = address, badge, take, certificate
        self._handshake_seconds = handshake_seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="orders", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(OSError, ProtocolError):
                self._listen()
            self._stop.wait(STOP_SECONDS)

    def _listen(self) -> None:
        deadline = time.monotonic() + self._handshake_seconds
        with contextlib.closing(self._connect(deadline)) as sock:
            challenge = messages.decode(self._message(sock, deadline), Challenge)
            nonce = secrets.token_bytes(messages.NONCE_BYTES)
            proof = messages.proof(self._badge, _FOLLOWER, challenge.nonce, nonce)
            sock.sendmsg(frame(MESSAGE, messages.encode(Follow(nonce, proof))))
            lead = messages.decode(self._message(sock, deadline), Lead)
            if not proves(lead.proof, self._badge, _LEADER, nonce, challenge.nonce):
                raise ProtocolError("what answers there is not the leader")
            while True:
                self._take(messages.decode(self._message(sock), Order))

    def _connect(self, deadline: float) -> Stream:
        sock = socket.create_connection(parse(self._address), self._handshake_seconds)
        try:
            watch(sock)
            sock.setblocking(False)
            return connect(sock, self._certificate, partial(self._wait, deadline)) if self._certificate else sock
        except BaseException:
            sock.close()
            raise

    def _message(self, sock: Stream, deadline: float = float("inf")) -> bytes:
        kind, nbytes, _ = HEADER.unpack(self._read(sock, HEADER.size, deadline))
        if kind != MESSAGE or nbytes > MAX_BYTES:
            raise ProtocolError(f"frame {kind} of {nbytes} bytes")
        return self._read(sock, nbytes, deadline)

    def _read(self, sock: Stream, nbytes: int, deadline: float) -> bytes:
        data = b""
        while len(data) < nbytes:
            self._check(deadline)
            try:
                more = sock.recv(nbytes - len(data))
            except BlockingIOError:
                readable(sock, STOP_SECONDS)
                continue
            if not more:
                raise ConnectionResetError("the leader is gone")
            data += more
        return data

    def _wait(self, deadline: float, sock: Stream) -> None:
        self._check(deadline)
        readable(sock, STOP_SECONDS)

    def _check(self, deadline: float) -> None:
        if self._stop.is_set() or time.monotonic() >= deadline:
            raise ConnectionAbortedError("stopped, or nothing came")

    def close(self) -> None:
        """Nothing is taken any more."""
        self._stop.set()
        self._thread.join()
