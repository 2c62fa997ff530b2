"""The sockets that subscribers connect to: one over ipc, for processes of this user, and one over TCP, for readers
whose keys gRPC admitted. Each is used by one thread."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from typing import Protocol

import structlog
import zmq
from typing_extensions import override

from lora_server.access.identity import Identity
from lora_server.address import Address
from lora_server.control.connections import end_socket, open_sockets
from lora_server.control.events.keys import ReaderKeys
from lora_server.control.events.topics import topics_of_tenant
from lora_server.logs import Repeats
from lora_server.timings import Timings
from lora_server.wire.events import EventMessage

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


MOST_QUEUED = 1000  # messages for one subscriber; beyond them it loses messages
MOST_INBOUND = 1024  # bytes of a subscriber's message; a longer one ends its connection
BACKLOG = 1024
MOST_HEARD = 64  # messages that are read in a row
ZAP = "inproc://zeromq.zap.01"
USER_ID = "User-Id"


class EventSocket(Protocol):
    """A socket that sends to all its subscribers, and blocks for none. `heard`: what to poll, and then call `hear`."""

    endpoint: str
    heard: list[zmq.Socket[bytes]]

    def send(self, message: EventMessage) -> None:
        """Send a message to the subscribers of its topic; one whose queue is full loses it."""

    def hear(self) -> None:
        """Read what subscribers sent."""

    def look(self) -> None:
        """End connections that may not be any more. To be called about twice a second."""

    def close(self) -> None:
        """End all connections."""


class IpcEvents(EventSocket):
    """A PUB socket in a directory of mode 0700. libzmq keeps its subscriptions, and drops all else that is sent to it.

    Raises zmq.ZMQError where it cannot listen.
    """

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = _limited(self._context, zmq.PUB)
        self.heard = []
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError:
            self.close()
            raise
        self.endpoint = endpoint

    @override
    def send(self, message: EventMessage) -> None:
        self._socket.send_multipart(message.frames())

    @override
    def hear(self) -> None:
        pass

    @override
    def look(self) -> None:
        pass

    @override
    def close(self) -> None:
        self._context.destroy(linger=0)


class TcpEvents(EventSocket):
    """An XPUB socket with CURVE: a reader's key decides whether it may connect, and what it may subscribe to.

    libzmq asks for each key (ZAP), and gives its caller the subscriptions (XPUB_MANUAL). A reader that sends anything
    else loses its key, and all readers connect again: libzmq would give the next subscription to the wrong one.
    Raises OSError where it cannot listen.
    """

    def __init__(
        self, address: Address, keys: ReaderKeys, introduce: Callable[[frozenset[str]], object], held: bool
    ) -> None:
        """`introduce` is called with the topics of a tenant that subscribes. `held`: a socket of this user that does
        not listen already holds the port."""
        self._address, self._keys, self._introduce, self._held = address, keys, introduce, held
        self._open()

    def _open(self) -> None:
        listening = self._address.listen(BACKLOG, held=self._held)
        self._address = self._address._replace(port=listening.getsockname()[1])
        self.endpoint, self._limit = f"tcp://{self._address}", InboundLimit(self._address.port)
        self._context = zmq.Context()
        self._door = self._context.socket(zmq.REP)
        self._door.bind(ZAP)
        self._socket = _limited(self._context, zmq.XPUB)
        self._socket.set(zmq.XPUB_MANUAL, 1)
        self._socket.set(zmq.CURVE_SERVER, 1)
        self._socket.set(zmq.CURVE_SECRETKEY, self._keys.secret)
        self._socket.set(zmq.ZAP_DOMAIN, b"events")
        self._socket.set(zmq.IPV6, 1)
        self._socket.set(zmq.HANDSHAKE_IVL, int(Timings.handshake * 1e3))
        self._socket.set(zmq.USE_FD, listening.detach())
        self._socket.bind(self.endpoint)
        self.heard = [self._door, self._socket]

    @override
    def send(self, message: EventMessage) -> None:
        self._socket.send_multipart(message.frames())

    @override
    def hear(self) -> None:
        for _ in range(MOST_HEARD):
            if self._door.poll(0):
                self._admit()
            elif self._socket.poll(0):
                self._subscribe()
            else:
                return

    def _admit(self) -> None:
        """Answer whether a key may connect."""
        version, number, _domain, _address, _identity, mechanism, *shown = self._door.recv_multipart()
        is_known = mechanism == b"CURVE" and self._keys.reader(shown[0]) is not None
        answer = (b"200", b"OK", shown[0].hex().encode()) if is_known else (b"400", b"unknown key", b"")
        self._door.send_multipart((version, number, *answer, b""))

    def _subscribe(self) -> None:
        frame = self._socket.recv(copy=False)
        try:
            key = bytes.fromhex(str(frame.get(USER_ID)))
        except zmq.ZMQError:  # libzmq's own, of a reader that went
            return
        data, who = frame.bytes, self._keys.reader(key)
        if data[:1] not in (b"\0", b"\1") or len(data) > MOST_INBOUND:
            log.warning("a reader of events sent what is no subscription; its key is void", reader=str(who))
            self._keys.void(key)
            self._reopen()
            return
        option = zmq.SUBSCRIBE if data[0] else zmq.UNSUBSCRIBE
        for topic in self._topics(who, data[1:]):
            self._socket.set(option, topic)

    def _topics(self, who: Identity | None, prefix: bytes) -> list[bytes]:
        """Return the subscriptions that a caller gets for one that it asks for."""
        if who is None:  # its token was revoked
            return []
        if who.is_operator:
            return [prefix]
        topics = topics_of_tenant(who.tenant)
        self._introduce(topics)
        return [topic.encode() for topic in sorted(topics) if topic.encode().startswith(prefix)]

    def _reopen(self) -> None:
        """End all connections and listen again: readers with known keys connect again by themselves."""
        self.close()
        self._open()

    @override
    def look(self) -> None:
        if self._keys.take_void():
            self._reopen()
        self._limit.enforce()

    @override
    def close(self) -> None:
        self._context.destroy(linger=0)


def _limited(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    """Make a socket that limits what it queues and takes."""
    made = context.socket(kind)
    made.set(zmq.SNDHWM, MOST_QUEUED)
    made.set(zmq.MAXMSGSIZE, MOST_INBOUND)
    made.set(zmq.LINGER, 0)
    return made
