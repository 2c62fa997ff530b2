"""Frames of a TCP connection between a client and a shard: (kind, bytes, seq), and so many bytes."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable

from lora_server.errors import ProtocolError
from lora_server.transport.tls import Stream

HEADER = struct.Struct("<IIQ")  # kind, payload bytes, seq
MESSAGE, STEP, BYE = 1, 2, 3
DIRECT_BYTES = 64 << 10  # larger payloads are sent by a thread


def frame(kind: int, payload: bytes | memoryview = b"", seq: int = 0) -> list[bytes | memoryview]:
    """Return a frame in two parts, so that the payload is not copied."""
    return [HEADER.pack(kind, len(payload), seq), payload]


def receive(sock: Stream, memory: bytearray | memoryview, wait: Callable[[Stream], None]) -> memoryview:
    """Fill `memory` from a socket that does not block; `wait` returns once it may be readable, or raises OSError.

    Raises ConnectionResetError at the end of the connection.
    """
    left = view = memoryview(memory)
    while left:
        try:
            received = sock.recv_into(left)
        except BlockingIOError:
            wait(sock)
            continue
        if not received:
            raise ConnectionResetError("the connection was closed")
        left = left[received:]
    return view


def receive_message(sock: Stream, max_bytes: int, wait: Callable[[Stream], None]) -> bytes:
    """Receive one MESSAGE frame and return its payload; raises ProtocolError for any other. See `receive`."""
    kind, nbytes, _ = HEADER.unpack(receive(sock, bytearray(HEADER.size), wait))
    if kind != MESSAGE or nbytes > max_bytes:
        raise ProtocolError(f"got frame {kind} of {nbytes} bytes, expected a message of at most {max_bytes}")
    return bytes(receive(sock, bytearray(nbytes), wait))


class FrameReceiver:
    """Receives one frame after the other, each payload straight into the memory where it belongs."""

    def __init__(self, sock: Stream) -> None:
        self._socket = sock
        self._header = bytearray(HEADER.size)
        self._left = memoryview(self._header)
        self._payload: memoryview | None = None
        self._kind = self._seq = 0

    def receive(self, place: Callable[[int, int, int], memoryview]) -> bool:
        """Receive what is there, up to the end of a frame; return whether one is complete. Raises OSError.

        `place(kind, nbytes, seq)` names the memory for a payload, or raises ProtocolError.
        """
        while True:
            if not self._left:
                if self._payload is not None:
                    return True
                self._kind, nbytes, self._seq = HEADER.unpack(self._header)
                self._left = self._payload = place(self._kind, nbytes, self._seq)
                continue
            received = self._socket.recv_into(self._left)
            if not received:
                raise ConnectionResetError("the connection was closed")
            self._left = self._left[received:]

    def take(self) -> tuple[int, int, memoryview]:
        """Return the complete frame's kind, seq and payload, and expect the next."""
        assert self._payload is not None
        taken = self._kind, self._seq, self._payload
        self._payload, self._left = None, memoryview(self._header)
        return taken


class Outbox:
    """The queue of bytes that a socket, which does not block, has not taken yet. Not thread-safe."""

    def __init__(self, sock: Stream) -> None:
        self._socket, self._left = sock, deque[memoryview]()

    def __bool__(self) -> bool:
        return bool(self._left)

    def put(self, frames: list[bytes | memoryview]) -> None:
        """Queue frames, without a copy."""
        self._left.extend(memoryview(frame).cast("B") for frame in frames if len(frame))

    def go_on(self) -> bool:
        """Send as much as the socket takes now; return whether the queue is empty. Raises OSError."""
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
