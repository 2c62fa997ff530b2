"""The shard's side of shared memory: every client gets a region of its own; see shm."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import structlog
from typing_extensions import override

from lora_server.errors import ConfigError, LeaseError, LoraServerError, ProtocolError, ShardUnavailableError
from lora_server.timings import Timings
from lora_server.transport import park
from lora_server.transport.base import DeviceMemory, Grant, Mirror, Port, pin
from lora_server.transport.bells import Bell, make_bell
from lora_server.transport.shm import ShmConnection, create_memory
from lora_server.transport.unauthenticated import accept_user, listen_user
from lora_server.wire import messages
from lora_server.wire.messages import Hello, Mapped, Refused, Welcome
from lora_server.wire.region import Region

log = structlog.get_logger()
MAX_MIRRORS = 2  # of one client that joins again and again, unless it works with one
BUSY_SECONDS = 5e-3  # after an answer the loop polls for a GPU's next push without a pause
POLL_SECONDS = 200e-6  # afterwards it polls this often


class _DeviceConnection(ShmConnection):
    """A connection to a client with a GPU that stores its signals; with a mirror its rows stay on GPUs."""

    transport = "cuda_ipc"
    rings = False

    def __init__(self, grant: Grant, region: Region, sock: socket.socket, bell: Bell, mirror: Mirror | None) -> None:
        super().__init__(grant, region, sock, bell)
        self._busy_until = time.monotonic() + BUSY_SECONDS
        if mirror is not None:
            self.rows = mirror.rows

    @override
    def respond(self, seq: int, nbytes: int) -> None:
        super().respond(seq, nbytes)
        self._busy_until = time.monotonic() + BUSY_SECONDS

    @override
    def pause(self) -> float:
        """Return 0 between the sites of a forward pass, and a short pause between passes."""
        return 0.0 if time.monotonic() < self._busy_until else POLL_SECONDS


@dataclass(eq=False)
class _ShmPeer:
    """A client's socket and what the client was given."""

    sock: socket.socket
    pid: int
    due: float  # the end of the handshake; of what is kept for a client that went
    hello: Hello | None = None
    region: Region | None = None
    bell: Bell | None = None
    connection: ShmConnection | None = None
    mirror: Mirror | None = None


class _Quarantine:
    """Mirrors of clients that are gone, which may still have a put under way: each is freed after a while, or later."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.peers: list[_ShmPeer] = []

    def add(self, peer: _ShmPeer) -> None:
        """Keep a peer's mirror from now on."""
        peer.due = time.monotonic() + self._seconds
        self.peers.append(peer)

    def sweep(self) -> None:
        """Free every mirror that is due; one that is in use is due again later."""
        due = [peer for peer in self.peers if peer.due <= time.monotonic()]
        for peer in due:
            self.peers.remove(peer)
            if peer.mirror is not None and not peer.mirror.free():
                self.add(peer)


class MirrorSlots(Protocol):
    """A mirror of kind "slots"; see Mirror."""

    def connect(self, grant: Grant, region: Region, sock: socket.socket, bell: Bell, fd: int) -> ShmConnection:
        """Connect a client, with its memory for answers. Raises ProtocolError; ConfigError if that cannot be mapped."""
        ...


class ShmListener:
    """Accepts clients on a Unix socket, in a thread of its own; gives each a region and watches for its end."""

    def __init__(
        self,
        port: Port,
        path: Path,
        device: DeviceMemory | None = None,
        handshake_seconds: float = Timings.handshake,
        quarantine_seconds: float = Timings.quarantine,
    ) -> None:
        """`device`: the memory of a shard that computes on a GPU, None otherwise."""
        self._handshake_seconds, self._quarantine = handshake_seconds, _Quarantine(quarantine_seconds)
        park.require_total_store_order()
        self._port, self._path, self._device = port, path, device
        self._shaking: list[_ShmPeer] = []
        self._server = listen_user(path, 64)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ, None)
        self._waker, wakee = socket.socketpair()
        self._selector.register(wakee, selectors.EVENT_READ, "stop")
        self._thread = threading.Thread(target=self._run, name="shm-listener", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Return the socket's path."""
        return str(self._path)

    def _run(self) -> None:
        while self._round():
            pass

    def _round(self) -> bool:
        """Handle what is due, or the next event; return False at the end. Keep no reference to a client that left."""
        for key, _ in self._selector.select(self._patience()):
            if key.data == "stop":
                return False
            if key.data is None:
                self._accept()
            else:
                self._on_client(key.data)
        for peer in [peer for peer in self._shaking if peer.due <= time.monotonic()]:
            self._end(peer)
        self._quarantine.sweep()
        return True

    def _patience(self) -> float | None:
        due = [peer.due for peer in (*self._shaking, *self._quarantine.peers)]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _accept(self) -> None:
        if (accepted := accept_user(self._server)) is None:
            return
        sock, pid = accepted
        peer = _ShmPeer(sock, pid, time.monotonic() + self._handshake_seconds)
        self._shaking.append(peer)
        self._selector.register(sock, selectors.EVENT_READ, peer)

    def _on_client(self, peer: _ShmPeer) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(peer.sock, messages.MAX_MESSAGE_BYTES, 1)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        try:
            self._hear(peer, data, fds[0] if fds else -1)
        finally:
            for fd in fds:
                os.close(fd)

    def _hear(self, peer: _ShmPeer, data: bytes, fd: int) -> None:
        if not data or peer.connection is not None:
            self._end(peer)
            return
        try:
            if peer.hello is None:
                self._welcome(peer, messages.decode(data, Hello))
            else:
                self._connect(peer, peer.hello, messages.decode(data, Mapped).mirror, fd)
        except (ConfigError, LeaseError, ProtocolError) as error:
            self._refuse(peer, error)
        except BrokenPipeError:  # the client went away in the middle of it: its end of file comes next
            return
        except Exception as error:  # out of descriptors or memory, or a GPU that fails: others are still accepted
            log.exception("a client could not be connected")
            self._refuse(peer, ShardUnavailableError(f"the shard cannot set up shared memory: {error}"))

    def _welcome(self, peer: _ShmPeer, hello: Hello) -> None:
        """Give a client its region and mirror; without a device it may push at once, else when it has mapped them."""
        grant = self._port.grants.admit(hello)
        if hello.mirror and not hello.device:
            raise ProtocolError(f"client {hello.client}: it asks for a mirror and has no device")
        layout = self._port.layout
        fd, memory = create_memory(f"lora-client-{grant.client}", layout.nbytes)
        try:
            peer.hello, peer.region = hello, Region(memory.view, layout)
            peer.bell = Bell(peer.region.unwatched, make_bell())
            fds = [fd, peer.bell.fd]
            peer.region.write_geometry()
            answer = Welcome(layout.depth, layout.request_bytes, layout.response_bytes, layout.table_bytes)
            answer.pinned = self._device is not None
            if hello.mirror:
                self._offer_mirror(peer, hello.client, answer, fds)
            if not hello.device:
                self._connect(peer, hello, False)
            socket.send_fds(peer.sock, [messages.encode(answer)], fds)
        finally:
            os.close(fd)

    def _offer_mirror(self, peer: _ShmPeer, client: int, answer: Welcome, fds: list[int]) -> None:
        """Offer a mirror, or tell why there is none; the client is served without one too."""
        answer.why = "the shard does not compute on a GPU"
        if self._device is None:
            return
        assert peer.hello is not None
        if self._device.slots != peer.hello.slots:
            asked, served = ("gpu", "cuda_ipc") if peer.hello.slots else ("cuda_ipc", "gpu")
            answer.why = f"the server was started with --gpu-transport {served}, and this engine asks for {asked}"
            return
        kept = [other.hello for other in (*self._shaking, *self._quarantine.peers) if other.mirror is not None]
        if sum(hello is not None and hello.client == client for hello in kept) >= MAX_MIRRORS:
            answer.why = "earlier mirrors of this client are not free yet"
            return
        try:
            peer.mirror = self._device.mirror(self._port.layout, peer.pid)
        except ShardUnavailableError as error:
            answer.why = str(error)
            log.warning("a client's rows go through host memory", reason=answer.why)
            return
        answer.mirror, answer.handle, answer.why = peer.mirror.kind, peer.mirror.handle, ""
        if peer.mirror.kind != "ipc":
            fds.append(peer.mirror.fd)

    def _connect(self, peer: _ShmPeer, hello: Hello, mirror: bool, fd: int = -1) -> None:
        """Hand the client to the loop."""
        grant, region, bell = self._port.grants.admit(hello), peer.region, peer.bell
        assert region is not None and bell is not None
        if mirror and peer.mirror is None:
            raise ProtocolError(f"client {hello.client}: it mapped a mirror that it was not given")
        if not mirror and peer.mirror is not None and peer.mirror.free():
            peer.mirror = None
        if mirror and peer.mirror is not None and peer.mirror.kind == "slots":
            peer.connection = cast(MirrorSlots, peer.mirror).connect(grant, region, peer.sock, bell, fd)
        elif hello.device:
            peer.connection = _DeviceConnection(grant, region, peer.sock, bell, peer.mirror if mirror else None)
        else:
            peer.connection = ShmConnection(grant, region, peer.sock, bell)
        if not mirror:
            pin(peer.connection, self._device)
        self._shaking.remove(peer)
        self._port.connect(peer.connection)

    def _refuse(self, peer: _ShmPeer, error: LoraServerError) -> None:
        with contextlib.suppress(OSError):
            peer.sock.send(messages.encode(Refused(error.code, str(error))))
        self._end(peer)

    def _end(self, peer: _ShmPeer) -> None:
        """Close a client's connection. A put of it may still be under way: device memory is freed later."""
        if peer.connection is not None:
            self._port.disconnect(peer.connection)
        if peer in self._shaking:
            self._shaking.remove(peer)
        if peer.bell is not None:
            peer.bell.close()
        self._selector.unregister(peer.sock)
        peer.sock.close()
        if peer.mirror is not None:
            self._quarantine.add(peer)

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
        self._path.unlink(missing_ok=True)
