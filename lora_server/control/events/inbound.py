"""A bound on what peers send to a port whose connections say little. libzmq has none: it keeps a message without an end
in memory, part by part."""

from __future__ import annotations

import contextlib
import socket

import structlog

from lora_server.control.connections import end_socket, open_sockets
from lora_server.logs import Repeats

MOST_BYTES = 1 << 20  # of a connection in all; a reader that lives long connects again, and asks for what it missed
MOST_CONNECTIONS = 4096  # of the port; the oldest end
_INFO_BYTES, _RECEIVED_AT = 136, 128  # struct tcp_info: up to and at tcpi_bytes_received
log = structlog.get_logger()


class InboundLimit:
    """Ends connections of a port that have sent more than MOST_BYTES, and the oldest beyond MOST_CONNECTIONS. For one
    thread."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._seen: list[int] = []  # inodes of connections, oldest first
        self._complain = Repeats(log.warning)

    def enforce(self) -> None:
        """Look at all connections once. Call it periodically."""
        try:
            sockets = ((inode, fd, _received(fd, self._port)) for inode, fd in open_sockets())
            found = {inode: (fd, received) for inode, fd, received in sockets if received is not None}
        except OSError:  # no descriptor is free to look with
            return
        self._seen = [one for one in dict.fromkeys([*self._seen, *found]) if one in found]
        excess = len(self._seen) - MOST_CONNECTIONS
        for number, inode in enumerate(self._seen):
            fd, received = found[inode]
            if number < excess or received > MOST_BYTES:
                self._complain("inbound", "a reader of events sent too much, or there are too many", port=self._port)
                end_socket(fd, inode)


def _received(fd: int, port: int) -> int | None:
    """Return how many bytes a connection of the port has received; None for any other socket."""
    with contextlib.suppress(OSError), socket.socket(fileno=fd) as sock:
        try:
            own = sock.getsockname()
            if not isinstance(own, tuple) or own[1] != port or sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return None
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
            return int.from_bytes(info[_RECEIVED_AT:_INFO_BYTES], "little")
        finally:
            sock.detach()
    return None
