"""TLS 1.3 on connections between hosts.

A shard has a certificate of its own; the key never leaves its process. The controller, which has the certificate from
the shard, sends it to clients: they accept this certificate and no other, and connect in no other way.
"""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

RECORD_BYTES = 16 << 10  # that TLS encrypts at a time
TOGETHER = 16  # records that are sent before the lock is free for reading
CLOSED = "the connection was closed"


class TlsSocket:
    """A non-blocking socket with TLS; the part of socket's interface that is used here.

    One thread may read while another writes. A read never has to write, nor a write to read: a peer that requires it,
    by asking for new keys while it takes nothing, for example, has broken the connection.
    """

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._socket = sock
        self._lock = threading.Lock()  # OpenSSL's state is for one thread at a time
        self._peeked = b""

    def fileno(self) -> int:
        """Return the descriptor, for select."""
        return self._socket.fileno()

    def shake_hands(self) -> bool:
        """Continue the handshake; return whether it is done. Raises OSError."""
        with self._lock:
            if self._socket.fileno() < 0:
                raise ConnectionResetError(CLOSED)
            try:
                self._socket.do_handshake()
            except ssl.SSLWantReadError:
                return False
            return True

    def recv(self, nbytes: int, flags: int = 0) -> bytes:
        """Receive as socket.recv does; the only flag is MSG_PEEK."""
        if len(self._peeked) < nbytes:
            more = bytearray(nbytes - len(self._peeked))
            try:
                self._peeked += more[: self._read(memoryview(more))]
            except BlockingIOError:
                if not self._peeked:
                    raise
        found = self._peeked[:nbytes]
        if not flags & socket.MSG_PEEK:
            self._peeked = self._peeked[nbytes:]
        return found

    def recv_into(self, memory: memoryview) -> int:
        """Receive into memory as socket.recv_into does."""
        if not self._peeked:
            return self._read(memory)
        taken = self.recv(min(len(memory), len(self._peeked)))
        memory[: len(taken)] = taken
        return len(taken)

    def _read(self, memory: memoryview) -> int:
        with self._lock:
            try:
                return int(self._socket.read(len(memory), memory))
            except ssl.SSLWantReadError:
                raise BlockingIOError from None
            except ValueError:
                raise ConnectionResetError(CLOSED) from None

    def sendmsg(self, views: Sequence[bytes | memoryview]) -> int:
        """Send as socket.sendmsg does. After a BlockingIOError the next call must begin with the same bytes."""
        with self._lock:
            sent, several = 0, sum(map(len, views)) > RECORD_BYTES
            if several:
                self._cork(True)
            try:
                for record in islice(_records(views), TOGETHER):
                    taken = self._socket.write(record)
                    sent += taken
                    if taken < len(record):
                        break
            except ssl.SSLWantWriteError:
                if not sent:
                    raise BlockingIOError from None
            except ValueError:
                raise ConnectionResetError(CLOSED) from None
            finally:
                if several:
                    self._cork(False)
            return sent

    def _cork(self, on: bool) -> None:
        """Send records together: each one that arrives alone wakes the reader."""
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, on)

    def shutdown(self, how: int) -> None:
        """Shut the connection beneath down, without a word of TLS."""
        socket.socket.shutdown(self._socket, how)

    def close(self) -> None:
        """Close the connection; idempotent."""
        with self._lock:
            self._socket.close()


Stream = socket.socket | TlsSocket


def _records(views: Sequence[bytes | memoryview]) -> Iterator[bytearray | memoryview]:
    """Yield records; a view smaller than one, such as a header, goes with what follows."""
    rest = bytearray()
    for view in (memoryview(one) for one in views):
        lacking = RECORD_BYTES - len(rest) if rest else 0
        rest += view[:lacking]
        view = view[lacking:]
        if len(rest) == RECORD_BYTES:
            yield rest
            rest = bytearray()
        while len(view) >= RECORD_BYTES:
            yield view[:RECORD_BYTES]
            view = view[RECORD_BYTES:]
        rest += view
    if rest:
        yield rest


@dataclass(frozen=True)
class ShardCertificate:
    """A shard's certificate (`der`) and key; lora_server.access.tls makes it."""

    der: bytes
    context: ssl.SSLContext

    def accept(self, sock: socket.socket) -> TlsSocket:
        """Wrap a connection, before its handshake; takes `sock` over. Raises OSError."""
        return TlsSocket(self.context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False))


def connect(sock: socket.socket, certificate: bytes, wait: Callable[[TlsSocket], None]) -> TlsSocket:
    """Connect over a non-blocking socket to the peer that has this certificate, and to no other.

    `wait` returns when there may be something to read, or raises OSError. Takes `sock` over, and closes it if this
    raises.
    """
    try:
        stream = TlsSocket(_context(certificate).wrap_socket(sock, do_handshake_on_connect=False))
    except BaseException:
        sock.close()
        raise
    try:
        while not stream.shake_hands():
            wait(stream)
    except ssl.SSLCertVerificationError:
        stream.close()
        raise ConnectionAbortedError(
            "the peer is not the shard that the controller knows (its certificate differs)"
        ) from None
    except ssl.SSLError as error:
        stream.close()
        raise ConnectionAbortedError(f"the peer speaks no TLS, or not ours ({error.reason})") from None
    except BaseException:
        stream.close()
        raise
    return stream


def _context(certificate: bytes) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.check_hostname = False  # it is known by all of its bytes, wherever it is reached
    made.load_verify_locations(cadata=certificate)
    return made
