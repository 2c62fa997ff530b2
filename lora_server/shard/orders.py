"""Connections that carry a leader's orders to the followers of its stage: TCP, frames of transport.frames.

Leader and follower prove to each other that they know the follower's badge, a secret that the controller derives from
the leader's badge, and never send it. So a follower can pose neither as another follower nor as the leader. A peer
without a proof within `handshake_seconds` is cut off; until then it gets no order, and one small message of it is kept.
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
from lora_server.transport.frames import HEADER, MESSAGE, frame, receive_message
from lora_server.transport.tls import ShardCertificate, Stream, connect
from lora_server.transport.unauthenticated import Acceptor, UnauthenticatedPeer
from lora_server.wire import messages
from lora_server.wire.messages import Challenge, Follow, Lead, Order, badge_of, proves

MAX_UNAUTHENTICATED = 64  # connections that have proved nothing yet
MAX_OF_A_FOLLOWER = 4  # connections that proved one badge; one more ends the newest of them
MAX_BYTES = 1024  # of a message
STOP_SECONDS = 0.1  # within which a follower notices `close`, and between two tries to connect
_FOLLOWER, _LEADER = b"follower", b"leader"


class _FollowerPeer(UnauthenticatedPeer):
    """A connection to a leader; `shard` is set once it proved to be a follower."""

    heard = b""
    shard = -1

    def message(self) -> bytes | None:
        """Read more of the follower's proof; return the message once it is complete. Raises OSError, ProtocolError."""
        more = self.socket.recv(MAX_BYTES)
        self.heard += more
        if not more or len(self.heard) > HEADER.size + MAX_BYTES:
            raise ProtocolError("the peer closed the connection, or sent too many bytes")
        if len(self.heard) < HEADER.size:
            return None
        kind, nbytes, _ = HEADER.unpack_from(self.heard)
        if kind != MESSAGE or nbytes > MAX_BYTES or len(self.heard) > HEADER.size + nbytes:
            raise ProtocolError(f"frame {kind} of {nbytes} bytes")
        return self.heard[HEADER.size :] if len(self.heard) == HEADER.size + nbytes else None


class OrderSender:
    """The leader's end. The loop's thread calls `send`; a thread of its own accepts followers.

    `badge`: the leader's own, of which each follower's is derived. `certificate`: with it nothing goes in the clear.
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
        self._badge = badge
        self._listening, self.address = listen(host, advertise, port)
        self._selector = selectors.DefaultSelector()
        self._acceptor = Acceptor[_FollowerPeer](
            self._listening,
            self._selector,
            partial(_FollowerPeer, certificate=certificate),
            self._end,
            MAX_UNAUTHENTICATED,
            handshake_seconds,
        )
        self._followers: tuple[_FollowerPeer, ...] = ()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="followers", daemon=True)
        self._thread.start()

    @property
    def followers(self) -> int:
        """Return how many shards are connected as followers."""
        return len({peer.shard for peer in self._followers})

    def send(self, order: Order) -> None:
        """Send an order to all followers without blocking. A follower with a full connection is cut off."""
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
                    self._acceptor.accept()
                else:
                    self._hear(key.data)
            self._acceptor.end_silent()

    def _hear(self, peer: _FollowerPeer) -> None:
        try:
            said = peer.message() if peer.greet() else None
            if said is not None:
                self._admit(peer, messages.decode(said, Follow))
        except BlockingIOError:
            return
        except (OSError, ProtocolError):
            self._end(peer)

    def _admit(self, peer: _FollowerPeer, follow: Follow) -> None:
        badge = badge_of(self._badge, follow.shard)
        proven = proves(follow.proof, badge, _FOLLOWER, peer.nonce, follow.nonce)
        if peer not in self._acceptor.peers or not proven:
            raise ProtocolError("the peer does not know the badge")
        proof = messages.proof(badge, _LEADER, follow.nonce, peer.nonce)
        peer.socket.sendmsg(frame(MESSAGE, messages.encode(Lead(proof))))
        self._acceptor.forget(peer)
        peer.shard = follow.shard
        of_shard = [one for one in self._followers if one.shard == peer.shard]
        if len(of_shard) == MAX_OF_A_FOLLOWER:
            self._end(of_shard[-1])
        self._followers = (*self._followers, peer)

    def _end(self, peer: _FollowerPeer) -> None:
        self._selector.unregister(peer.socket)
        self._acceptor.forget(peer)
        self._followers = tuple(one for one in self._followers if one is not peer)
        peer.socket.close()

    def close(self) -> None:
        """Close all connections and end the thread; idempotent."""
        if self._stopping:
            return
        self._stopping = True
        self._thread.join()
        for peer in (*self._acceptor.peers, *self._followers):
            self._end(peer)
        self._selector.close()
        self._listening.close()


class OrderReceiver:
    """A follower's end: a thread that calls `take` with each order, and reconnects until it is closed.

    `badge` is this shard's. `certificate`: the leader's, if the connection uses TLS.
    """

    def __init__(
        self,
        address: str,
        shard: int,
        badge: bytes,
        take: Callable[[Order], None],
        certificate: bytes = b"",
        handshake_seconds: float = Timings.handshake,
    ) -> None:
        self._address, self._shard, self._badge, self._take = address, shard, badge, take
        self._certificate, self._handshake_seconds = certificate, handshake_seconds
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
            wait = partial(self._wait, deadline)
            challenge = messages.decode(receive_message(sock, MAX_BYTES, wait), Challenge)
            nonce = secrets.token_bytes(messages.NONCE_BYTES)
            proof = messages.proof(self._badge, _FOLLOWER, challenge.nonce, nonce)
            sock.sendmsg(frame(MESSAGE, messages.encode(Follow(self._shard, nonce, proof))))
            lead = messages.decode(receive_message(sock, MAX_BYTES, wait), Lead)
            if not proves(lead.proof, self._badge, _LEADER, nonce, challenge.nonce):
                raise ProtocolError("the peer is not the leader")
            forever = partial(self._wait, float("inf"))
            while not self._stop.is_set():
                self._take(messages.decode(receive_message(sock, MAX_BYTES, forever), Order))

    def _connect(self, deadline: float) -> Stream:
        sock = socket.create_connection(parse(self._address), self._handshake_seconds)
        try:
            watch(sock)
            sock.setblocking(False)
            return connect(sock, self._certificate, partial(self._wait, deadline)) if self._certificate else sock
        except BaseException:
            sock.close()
            raise

    def _wait(self, deadline: float, sock: Stream) -> None:
        if self._stop.is_set() or time.monotonic() >= deadline:
            raise ConnectionAbortedError("stopped, or nothing came")
        readable(sock, STOP_SECONDS)

    def close(self) -> None:
        """End the thread; `take` is not called any more."""
        self._stop.set()
        self._thread.join()
