"""What goes over a TCP connection of a client and a shard: (kind, bytes, seq), and so many bytes."""

from __future__ import annotations

import struct
from collections import deque

from lora_server.transport.tls import Stream

HEADER = struct.Struct("<IIQ")  # kind, payload bytes, seq
MESSAGE, STEP, BYE = 1, 2, 3
DIRECT_BYTES = 64 << 10  # larger payloads are sent by a thread


def frame(kind: int, payload: bytes | memoryview = b"", seq: int = 0) -> list[bytes | memoryview]:
    """In two parts, so that the payload is not copied."""
    return [HEADER.pack(kind, len(payload), seq), payload]


class Outbox:
    """What a socket that does not block did not take yet. Not thread-safe."""

    def __init__(self, sock: Stream) -> None:
        self._socket, self._left = sock, deque[memoryview]()

    def __bool__(self) -> bool:
        return bool(self._left)

    def put(self, frames: list[bytes | memoryview]) -> None:
        """Behind what is there; not copied."""
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
