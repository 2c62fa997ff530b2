"""Who connected and has proved nothing yet."""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time

from lora_server.clock import SYSTEM, Clock
from lora_server.transport.address import watch
from lora_server.transport.frames import MESSAGE, frame
from lora_server.transport.tls import ShardCertificate, Stream, TlsSocket
from lora_server.wire import messages
from lora_server.wire.messages import Challenge


class Stranger:
    """`socket` is this side's, which does not block, with TLS where there is a certificate."""

    def __init__(self, sock: socket.socket, certificate: ShardCertificate | None, clock: Clock = SYSTEM) -> None:
        """`sock` is not used any more, and closed where this raises OSError."""
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
        """Challenge it, encrypted where that is to be; whether that was done, now or before. Raises OSError."""
        if self.greeted:
            return True
        self.looked_at = time.monotonic()
        if isinstance(self.socket, TlsSocket) and not self.socket.shake_hands():
            return False
        self.socket.sendmsg(frame(MESSAGE, messages.encode(Challenge(self.nonce))))
        self.greeted = True
        return True


def accept_user(server: socket.socket) -> tuple[socket.socket, int] | None:
    """On a Unix socket: a connection, which does not block, and the pid behind it. None for one that went already, and
    for another user's than this process's, or root's."""
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
