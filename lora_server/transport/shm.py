"""Shared memory on one host: an anonymous memfd per (client, shard), passed over a Unix socket.

The socket (SOCK_SEQPACKET) carries Hello one way, Welcome and two or three descriptors (region, bell, the
mirror of a client with a device) the other, then Mapped from such a client, and then nothing: it stays open, so
that each side sees the other's death at once. Regions have no name, are sealed against resizing, and vanish
with their last holder. Here are a region's two ends; shm_listener accepts clients.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Callable

from typing_extensions import override

from lora_server.errors import ProtocolError, ShardUnavailableError
from lora_server.timings import Timings
from lora_server.transport import park
from lora_server.transport.base import Connection, Grant, Link
from lora_server.transport.bells import Bell
from lora_server.transport.mapping import Mapping
from lora_server.transport.slack import GIVE_BYTES, Slack
from lora_server.wire import messages, slot
from lora_server.wire.messages import Hello, Mapped, Welcome
from lora_server.wire.region import Region, RegionLayout

# maps the mirror that a shard offers, by a descriptor or -1; returns whether rows lie there, and descriptors for it
Prepare = Callable[[Region, Welcome, int], tuple[bool, list[int]]]
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def create_memory(label: str, nbytes: int) -> tuple[int, Mapping]:
    """Create a sealed memfd of `nbytes` zeros; return it and its mapping. The caller closes the descriptor. Raises
    OSError."""
    fd = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return fd, Mapping(nbytes, fd)
    except BaseException:
        os.close(fd)
        raise


class ShmLink(Link):
    """The client's end; see Link."""

    transport = "shm"

    def __init__(
        self,
        address: str,
        hello: Hello,
        shard: int,
        seconds: float = Timings.handshake,
        keep_seconds: float = Timings.region_keep,
        give_bytes: int = GIVE_BYTES,
        prepare: Prepare | None = None,
    ) -> None:
        """`keep_seconds`, `give_bytes`: see Slack. `prepare`: of a client with a device; see Prepare."""
        park.require_total_store_order()
        self.shard, self.epoch = shard, hello.epoch
        self._mapping: Mapping | None = None
        self._bell: Bell | None = None
        self._slack: Slack | None = None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.settimeout(seconds)
            self._socket.connect(address)
            self._socket.send(messages.encode(hello))
            mapping, has_to_stay = self._shake_hands(hello, prepare)
            if not has_to_stay:
                self._slack = Slack(mapping, self.region.layout, keep_seconds, give_bytes)
        except OSError as error:
            self.close()
            raise ShardUnavailableError(f"shard {shard} at {address}: {error.strerror or error}") from error
        except BaseException:
            self.close()
            raise
        self._socket.setblocking(False)

    def _shake_hands(self, hello: Hello, prepare: Prepare | None) -> tuple[Mapping, bool]:
        """Map the region; return that, and whether a GPU uses its pages."""
        data, fds, _, _ = socket.recv_fds(self._socket, messages.MAX_MESSAGE_BYTES, 3)
        try:
            if not data:
                raise ShardUnavailableError(f"shard {self.shard}: it closed the connection during the handshake")
            answer = messages.decode_welcome(data)
            shares = answer.mirror in ("fd", "slots")
            if len(fds) != 2 + shares:
                raise ProtocolError(f"shard {self.shard}: got {len(fds)} descriptors with {answer}")
            layout = RegionLayout(answer.depth, answer.request_bytes, answer.response_bytes, answer.table_bytes)
            mapping = self._mapping = Mapping(layout.nbytes, fds[0])
            self.region = Region(mapping.view, Region.read_geometry(mapping.view))
            self._bell, self._parker = Bell(self.region.unwatched, os.dup(fds[1])), park.Parker(self.region.parked)
            if prepare is not None:
                mirror, offers = prepare(self.region, answer, fds[2] if shares else -1)
                socket.send_fds(self._socket, [messages.encode(Mapped(mirror))], offers)
            return mapping, hello.device or answer.pinned
        finally:
            for fd in fds:
                os.close(fd)

    def push(self, seq: int, nbytes: int) -> None:
        """Store the signal; the payload is in place already."""
        self.region.request_signal[0] = slot.signal(self.epoch, seq)
        self.ring()

    def ring(self) -> None:
        """Wake the shard if it sleeps."""
        if self._bell is not None:
            self._bell.ring()

    @override
    def wait(self, seq: int, deadline: float) -> None:
        """Wait as Link.wait does; checks after each bounded sleep whether the peer's socket is still open."""
        expected, word = slot.signal(self.epoch, seq), self.region.response_signal
        while not self._parker.wait(lambda: word[0] >= expected, deadline):
            if not self.is_open() and word[0] < expected:
                raise self._gone(seq)
            if time.monotonic() >= deadline:
                raise self._timeout(seq)

    @override
    def consumed(self, request_bytes: int, response_bytes: int, idle: bool) -> None:
        if self._slack is not None:
            self._slack.consumed(request_bytes, response_bytes, idle)

    def is_open(self) -> bool:
        """Tell whether the shard keeps its end of the socket open."""
        try:
            return self._socket.recv(1) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    @override
    def check(self) -> None:
        if not self.is_open():
            raise self._gone(self.responded() + 1)

    @override
    def close(self) -> None:
        self._socket.close()
        if self._bell is not None:
            self._bell.close()
        if self._mapping is not None:
            self._mapping.drop()


class ShmConnection(Connection):
    """The shard's end; see Connection."""

    transport = "shm"

    def __init__(self, grant: Grant, region: Region, sock: socket.socket, bell: Bell) -> None:
        self.grant, self.region = grant, region
        self._socket, self.bell = sock, bell
        self._parker = park.Parker(region.parked)

    def respond(self, seq: int, nbytes: int) -> None:
        """Store the signal; the payload is in place already."""
        self.region.response_signal[0] = slot.signal(self.grant.epoch, seq)
        self._parker.wake()

    @override
    def close(self) -> None:
        """Shut the socket down; the listener's selector then sees the end of file and drops it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
