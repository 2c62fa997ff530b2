"""Connections that have proved nothing yet: few at a time, and each for a short while."""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from lora_server.clock import SYSTEM, Clock
from lora_server.transport.address import watch
from lora_server.transport.frames import MESSAGE, frame
from lora_server.transport.tls import ShardCertificate, Stream, TlsSocket
from lora_server.wire import messages
from lora_server.wire.messages import Challenge

_P = TypeVar("_P", bound="UnauthenticatedPeer")


class UnauthenticatedPeer:
    """This side of a connection; `socket` does not block, and encrypts where there is a certificate."""

    def __init__(self, sock: socket.socket, certificate: ShardCertificate | None, clock: Clock = SYSTEM) -> None:
        """Take `sock` over; closes it if this raises OSError."""
        self.since, self.looked_at = clock.now(), time.monotonic()
        self.greeted = False
        self.nonce = secrets.token_bytes(messages.NONCE_BYTES)
        try:
            sock.setblocking(False)
            watch(sock)
            self.socket: Stream = sock if certificate is None else certificate.accept(sock)
        except OSError:
            sock.close()
            raise

    def greet(self) -> bool:
        """Send the challenge, after TLS's handshake if there is one; return whether it is sent. Raises OSError."""
        if self.greeted:
            return True
        self.looked_at = time.monotonic()
        if isinstance(self.socket, TlsSocket) and not self.socket.shake_hands():
            return False
        self.socket.sendmsg(frame(MESSAGE, messages.encode(Challenge(self.nonce))))
        self.greeted = True
        return True


class Acceptor(Generic[_P]):
    """Accepts connections for a listener's selector, and bounds how many may stay unauthenticated, and how long.

    Not thread-safe: the listener's thread calls everything.
    """

    def __init__(
        self,
        listening: socket.socket,
        selector: selectors.BaseSelector,
        make: Callable[[socket.socket], _P],
        end: Callable[[_P], None],
        most: int,
        handshake_seconds: float,
        clock: Clock = SYSTEM,
    ) -> None:
        """`make` may raise OSError; `end` closes a peer and calls `forget`. More than `most` end the oldest."""
        self.listening, self._selector, self._make, self._end = listening, selector, make, end
        self._most, self._seconds, self._clock = most, handshake_seconds, clock
        self.peers: deque[_P] = deque()  # the oldest first
        listening.setblocking(False)
        selector.register(listening, selectors.EVENT_READ)

    def accept(self) -> None:
        """Accept a connection, challenge it and register it with the selector."""
        try:
            sock, _ = self.listening.accept()
        except OSError:  # it is gone already; or no descriptor is free, and the oldest has to give one back
            if self.peers:
                self._end(self.peers[0])
            else:
                time.sleep(0.05)  # the listener's loop must not spin
            return
        try:
            peer = self._make(sock)
        except OSError:
            return
        try:
            peer.greet()
        except OSError:
            peer.socket.close()
            return
        if len(self.peers) >= self._most:
            self._end(self.peers[0])
        self.peers.append(peer)
        self._selector.register(peer.socket, selectors.EVENT_READ, peer)

    def end_silent(self) -> None:
        """End every peer that has not proved itself in time."""
        now = self._clock.now()
        while self.peers and now - self.peers[0].since > self._seconds:
            self._end(self.peers[0])

    def forget(self, peer: _P) -> None:
        """Stop counting a peer that has proved itself, or was closed."""
        with contextlib.suppress(ValueError):
            self.peers.remove(peer)


def listen_user(path: Path, backlog: int) -> socket.socket:
    """Listen, without blocking, on a Unix socket that only this user's processes may connect to. Raises OSError."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.bind(str(path))
    path.chmod(0o600)
    server.listen(backlog)
    server.setblocking(False)
    return server


def accept_user(server: socket.socket) -> tuple[socket.socket, int] | None:
    """Accept a connection on a Unix socket; return it, not blocking, and the pid behind it.

    None for a connection that is gone already, or of a user that is neither root nor this process's.
    """
    try:
        sock, _ = server.accept()
    except OSError:
        return None
    sock.setblocking(False)
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid in (os.getuid(), 0):
        return sock, pid
    sock.close()
    return None
