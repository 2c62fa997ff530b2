"""Shared memory on one host: an anonymous memfd per (client, shard), passed over a Unix socket.

The socket (SOCK_SEQPACKET) carries Hello one way, Welcome and two descriptors (region, doorbell) the
other, and then nothing: it stays open, so that each side sees the other's death at once. Regions
have no name, are sealed against resizing, and vanish with their last holder.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from typing_extensions import override

from lora_server.errors import LeaseError, LoraServerError, ProtocolError, ShardUnavailableError
from lora_server.transport import park
from lora_server.transport.base import Connection, Grant, Link, Port
from lora_server.transport.mapping import Mapping
from lora_server.wire import messages, slot
from lora_server.wire.messages import Hello, Refused, Welcome
from lora_server.wire.region import PAGE_BYTES, Region, RegionLayout, Twin

HANDSHAKE_SECONDS = 5.0
QUARANTINE_SECONDS = 60.0
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class OwnedTwin(Twin, Protocol):
    """Device memory of one client that this process allocated."""

    handle: bytes

    def free(self) -> None:
        """Give it back; idempotent."""
        ...


MakeTwin = Callable[[RegionLayout], OwnedTwin]


def create_memory(label: str, nbytes: int) -> tuple[int, Mapping]:
    """A sealed memfd of `nbytes` zeros, and its mapping; the caller closes the descriptor."""
    fd = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd, Mapping(nbytes, fd)


class ShmLink(Link):
    """The client's end; see Link."""

    def __init__(self, address: str, hello: Hello, shard: int, seconds: float = HANDSHAKE_SECONDS) -> None:
        park.require_total_store_order()
        self.shard, self.epoch = shard, hello.epoch
        self._mappings: tuple[Mapping, ...] = ()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.settimeout(seconds)
            self._socket.connect(address)
            self._socket.send(messages.encode(hello))
            region, doorbell = self._mappings = self._receive()
            self.region = Region(region.view, Region.read_geometry(region.view))
        except OSError as error:
            self._give_up()
            raise ShardUnavailableError(f"shard {shard} at {address}: {error.strerror or error}") from error
        except LoraServerError:
            self._give_up()
            raise
        self._socket.setblocking(False)
        self._doorbell = park.Parker(doorbell.view[0:4])
        self._parker = park.Parker(self.region.parked)

    def _receive(self) -> tuple[Mapping, Mapping]:
        data, fds, _, _ = socket.recv_fds(self._socket, messages.MAX_MESSAGE_BYTES, 2)
        try:
            if not data:
                raise ShardUnavailableError(f"shard {self.shard}: it closed the connection during the handshake")
            self.welcome = answer = messages.decode_welcome(data)
            if len(fds) != 2:
                raise ProtocolError(f"shard {self.shard}: got {len(fds)} descriptors, expected 2")
            layout = RegionLayout(answer.depth, answer.request_bytes, answer.response_bytes)
            return Mapping(layout.nbytes, fds[0]), Mapping(PAGE_BYTES, fds[1])
        finally:
            for fd in fds:
                os.close(fd)

    def push(self, seq: int, nbytes: int) -> None:
        """The payload is in place already: only the signal is left."""
        self.region.request_signal[0] = slot.signal(self.epoch, seq)
        self._doorbell.wake()

    @override
    def wait(self, seq: int, deadline: float) -> None:
        """Looks at the peer's socket after each bounded sleep."""
        expected, word = slot.signal(self.epoch, seq), self.region.response_signal
        while not self._parker.wait(lambda: word[0] >= expected, deadline):
            if not self._peer_alive() and word[0] < expected:
                raise self._gone(seq)
            if time.monotonic() >= deadline:
                raise self._timeout(seq)

    def _peer_alive(self) -> bool:
        try:
            return self._socket.recv(1) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    @override
    def check(self) -> None:
        if not self._peer_alive():
            raise self._gone(self.responded() + 1)

    @override
    def close(self) -> None:
        self._give_up()

    def _give_up(self) -> None:
        self._socket.close()
        for mapping in self._mappings:
            mapping.drop()


class _ShmConnection(Connection):
    """The shard's end; see Connection."""

    def __init__(self, grant: Grant, region: Region, sock: socket.socket) -> None:
        self.client, self.epoch, self.region = grant.client, grant.epoch, region
        self.polled = region.twin is not None
        self._socket = sock
        self._parker = park.Parker(region.parked)

    def is_over(self, sock: socket.socket) -> bool:
        """Whether this is its handshake's socket."""
        return self._socket is sock

    def respond(self, seq: int, nbytes: int) -> None:
        """The payload is in place already: only the signal is left."""
        self.region.response_signal[0] = slot.signal(self.epoch, seq)
        self._parker.wake()

    @override
    def close(self) -> None:
        """The listener's selector then sees the end of file and drops the socket."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


class ShmListener:
    """Accepts clients on a Unix socket, in a thread of its own; gives each a region and watches for its end."""

    def __init__(self, port: Port, path: Path, make_twin: MakeTwin | None = None) -> None:
        """`make_twin`: device memory for the rows of a client that asks for it; see transport.cuda_ipc."""
        park.require_total_store_order()
        self._port, self._path, self._make_twin = port, path, make_twin
        self._twins: dict[socket.socket, OwnedTwin] = {}
        self._retired: list[tuple[float, OwnedTwin]] = []
        self._doorbell_fd, doorbell = create_memory("lora-doorbell", PAGE_BYTES)
        port.share_doorbell(doorbell.view)
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server.bind(str(path))
        path.chmod(0o600)
        self._server.listen(64)
        self._server.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ, None)
        self._waker, wakee = socket.socketpair()
        self._selector.register(wakee, selectors.EVENT_READ, "stop")
        self._thread = threading.Thread(target=self._run, name="shm-listener", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """The socket's path."""
        return str(self._path)

    def _run(self) -> None:
        while True:
            self._reap()
            for key, _ in self._selector.select(QUARANTINE_SECONDS if self._retired else None):
                if key.data == "stop":
                    return
                if key.data is None:
                    self._accept()
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._on_client(key.fileobj, key.data)

    def _accept(self) -> None:
        try:
            sock, _ = self._server.accept()
        except OSError:
            return
        sock.setblocking(False)
        _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid not in (os.getuid(), 0):
            sock.close()
            return
        self._selector.register(sock, selectors.EVENT_READ, "hello")

    def _on_client(self, sock: socket.socket, state: object) -> None:
        try:
            data = sock.recv(messages.MAX_MESSAGE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data and state == "hello":
            self._welcome(sock, data)
            return
        if isinstance(state, Connection):
            self._port.disconnect(state)
        self._selector.unregister(sock)
        self._retire(sock)
        sock.close()

    def _retire(self, sock: socket.socket) -> None:
        """A client that was cut off may still have a put under way: its memory is freed later."""
        if sock in self._twins:
            self._retired.append((time.monotonic() + QUARANTINE_SECONDS, self._twins.pop(sock)))

    def _reap(self) -> None:
        now = time.monotonic()
        for due, twin in self._retired:
            if due <= now:
                twin.free()
        self._retired = [(due, twin) for due, twin in self._retired if due > now]

    def _welcome(self, sock: socket.socket, data: bytes) -> None:
        try:
            hello = messages.decode(data, Hello)
            grant = self._port.admit(hello)
            layout = self._port.layout
            fd, memory = create_memory(f"lora-client-{grant.client}", layout.nbytes)
            try:
                region = Region(memory.view, layout)
                region.write_geometry()
                if hello.twin and self._make_twin is not None:
                    region.twin = self._twins[sock] = self._make_twin(layout)
                connection = _ShmConnection(grant, region, sock)
                self._port.connect(connection)
                self._selector.modify(sock, selectors.EVENT_READ, connection)
                handle = self._twins[sock].handle if sock in self._twins else b""
                welcome = Welcome(layout.depth, layout.request_bytes, layout.response_bytes, handle)
                _send_fds(sock, messages.encode(welcome), [fd, self._doorbell_fd])
            finally:
                os.close(fd)
        except (LeaseError, ProtocolError, ShardUnavailableError) as error:
            self._refuse(sock, error)
        except BrokenPipeError:  # the client went away in the middle of it: its end of file comes next
            return
        except OSError as error:  # out of descriptors or memory
            for half in self._port.connections:
                if isinstance(half, _ShmConnection) and half.is_over(sock):
                    self._port.disconnect(half)
            self._refuse(sock, ShardUnavailableError(f"the shard cannot set up shared memory: {error}"))

    def _refuse(self, sock: socket.socket, error: LoraServerError) -> None:
        with contextlib.suppress(OSError):
            sock.send(messages.encode(Refused(error.code, str(error))))
        self._selector.unregister(sock)
        self._retire(sock)
        sock.close()

    def close(self) -> None:
        """Stop listening and cut all of its clients off; idempotent."""
        if self._server.fileno() < 0:
            return
        self._waker.close()
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()
        os.close(self._doorbell_fd)
        self._path.unlink(missing_ok=True)


def _send_fds(sock: socket.socket, data: bytes, fds: list[int]) -> None:
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds).tobytes())]
    sock.sendmsg([data], ancillary)
