"""Bounds on a port's connections, for servers that accept every connection themselves.

gRPC offers no limit per host, and asyncio counts no connection before its TLS handshake. So they are found among the
descriptors of this process, and ended from outside: their server sees that the peer went.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import stat
from collections import defaultdict
from typing import NamedTuple
from urllib.parse import unquote

import structlog

from lora_server.logs import Repeats

MAX_OF_A_HOST, MAX_STRANGERS = 256, 1024  # connections that proved nothing yet
MAX_ENDED = 16  # of those beyond a limit, per look: a peer may open another for each, which costs the server 0.4 ms
MAX_EXCESS = 4096  # that wait to be ended, or a quarter of the descriptors where that is less; others end at once
_DESCRIPTORS = "/proc/self/fd"
log = structlog.get_logger()


class Peer(NamedTuple):
    """The other end of a connection. An IPv4 address is written as such on an IPv6 socket, too."""

    host: str
    port: int

    @classmethod
    def of(cls, host: str, port: int) -> Peer:
        """Return the peer of a socket address."""
        return cls(host.removeprefix("::ffff:").partition("%")[0], port)

    @classmethod
    def of_grpc(cls, text: str) -> Peer:
        """Return the peer of gRPC's text for it, such as ipv4:127.0.0.1:50000 or ipv6:%5B::1%5D:50000."""
        host, _, port = unquote(text.partition(":")[2]).rpartition(":")
        return cls.of(host.strip("[]"), int(port) if port.isdigit() else 0)


class ConnectionLimit:
    """Ends the oldest unauthenticated connections beyond a limit per host, and in all. For one thread.

    It ends them at a bounded pace: an idle connection costs a descriptor, a new one in its place costs CPU time that
    steps on this host lack.
    """

    def __init__(
        self,
        port: int,
        max_of_a_host: int = MAX_OF_A_HOST,
        max_strangers: int = MAX_STRANGERS,
        proven: set[Peer] | None = None,
        max_ended: int = MAX_ENDED,
        max_excess: int = MAX_EXCESS,
    ) -> None:
        """`proven`: connections that showed a good token or lease. They are never ended; closed ones are removed.
        `max_ended`: per look, unless more than `max_excess` wait to be ended."""
        self._port, self._max_of_a_host, self._max_strangers = port, max_of_a_host, max_strangers
        self._max_ended, self._max_excess = max_ended, max_excess
        self.proven: set[Peer] = set() if proven is None else proven
        self._sockets: dict[int, Peer | None] = {}  # by inode, oldest first; None: not of this port, or ended
        self._complain = Repeats(log.warning)

    def enforce(self) -> None:
        """Look at all connections once, and end some of those over the limits. Call it periodically."""
        try:
            descriptors = dict(open_sockets())
            known = {inode: peer for inode, peer in self._sockets.items() if inode in descriptors}
            new = {inode: self._peer(fd) for inode, fd in descriptors.items() if inode not in known}
        except OSError:  # no descriptor is free to look with: what is known stays
            return
        self._sockets = known | new
        here = {inode: peer for inode, peer in self._sockets.items() if peer is not None}
        self.proven.intersection_update(here.values())
        excess = self._excess({inode: peer for inode, peer in here.items() if peer not in self.proven})
        most = min(self._max_excess, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        for inode in excess[: max(self._max_ended, len(excess) - most)]:
            self._complain(
                here[inode].host,
                "too many connections that showed no token or lease; closing the oldest",
                port=self._port,
                host=here[inode].host,
            )
            if end_socket(descriptors[inode], inode):
                self._sockets[inode] = None  # its server closes it

    def _excess(self, strangers: dict[int, Peer]) -> list[int]:
        hosts: dict[str, list[int]] = defaultdict(list)
        for inode, peer in strangers.items():
            hosts[peer.host].append(inode)
        excess = []
        for of_host in hosts.values():
            while len(of_host) > self._max_of_a_host:
                excess.append(of_host.pop(0))
        for _ in range(len(strangers) - len(excess) - self._max_strangers):
            excess.append(max(hosts.values(), key=len).pop(0))
        return excess

    def _peer(self, fd: int) -> Peer | None:
        """Return the other end of a descriptor if it is a connection of the port, else None.

        Raises OSError if no descriptor is free.
        """
        try:
            copy = os.dup(fd)
        except OSError as error:
            if error.errno == errno.EBADF:  # closed meanwhile
                return None
            raise
        with contextlib.suppress(OSError), socket.socket(fileno=copy) as sock:
            own = sock.getsockname()
            if isinstance(own, tuple) and own[1] == self._port:
                return Peer.of(*sock.getpeername()[:2])
        return None


def open_sockets() -> list[tuple[int, int]]:
    """Yield the inode and descriptor of each socket of this process. Raises OSError if no descriptor is free."""
    found = []
    for name in os.listdir(_DESCRIPTORS):  # noqa: PTH208  (many)
        with contextlib.suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found.append((status.st_ino, int(name)))
    return found


def end_socket(fd: int, inode: int) -> bool:
    """Shut down the socket of a descriptor, unless the descriptor names another socket by now; return whether it is."""
    with contextlib.suppress(OSError), socket.fromfd(fd, socket.AF_INET6, socket.SOCK_STREAM) as sock:
        if os.fstat(sock.fileno()).st_ino == inode:
            sock.shutdown(socket.SHUT_RDWR)
            return True
    return False
