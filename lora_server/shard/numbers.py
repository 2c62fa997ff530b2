"""Leader mode of kernels that serve by themselves. A follower passes a table for the leader's numbers over a Unix
socket of their host; the two kernels do the rest (device/host/leader.cuh).

A table belongs to one leader and one follower until either ends: then the other's kernel forgets it, and the next table
is a new one. The leader admits no follower without its badge.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import selectors
import socket
import threading
import time
from pathlib import Path

import structlog
from typing_extensions import override

from kernels_cuda.residency import LANES
from lora_server.device.host.kernel import ServeKernel
from lora_server.device.host.mailbox import TAKEN_SECONDS
from lora_server.device.protocol.codes import KernelRole
from lora_server.device.protocol.gpu import Memory
from lora_server.errors import LoraServerError, ProtocolError
from lora_server.logs import Repeats
from lora_server.shard.coordination import StageRole, new_badge
from lora_server.timings import Timings
from lora_server.transport.unauthenticated import accept_user, listen_user
from lora_server.wire import messages
from lora_server.wire.messages import Numbers

MAX_FOLLOWERS = LANES  # each is served by a lane of the leader's poller
RETRY_SECONDS = 0.1  # within which a thread stops, and a follower retries
HEARD = b"heard"
log = structlog.get_logger()


class KernelLeader(StageRole):
    """Has its kernel store every number into the tables of its followers, which a thread admits."""

    def __init__(self, kernel: ServeKernel, path: Path, handshake_seconds: float = Timings.handshake) -> None:
        self._kernel, self._handshake_seconds = kernel, handshake_seconds
        self.address, self.badge = str(path), new_badge()
        self._tables: dict[socket.socket, Memory] = {}
        self._lead()
        self._unauthenticated: dict[socket.socket, float] = {}  # deadline of each
        self._server = listen_user(path, MAX_FOLLOWERS)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="followers", daemon=True)
        self._thread.start()

    @property
    @override
    def followers(self) -> int:
        return len(self._tables)

    def _run(self) -> None:
        while not self._stopping.is_set():
            for key, _ in self._selector.select(RETRY_SECONDS):
                if key.fileobj is self._server:
                    self._accept()
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._hear(key.fileobj)
            for sock in [one for one, due in self._unauthenticated.items() if due < time.monotonic()]:
                self._end(sock)

    def _accept(self) -> None:
        if (accepted := accept_user(self._server)) is None:
            return
        sock, _ = accepted
        if len(self._unauthenticated) >= MAX_FOLLOWERS:
            sock.close()
            return
        self._unauthenticated[sock] = time.monotonic() + self._handshake_seconds
        self._selector.register(sock, selectors.EVENT_READ)

    def _hear(self, sock: socket.socket) -> None:
        """Receive a follower's table, or the end of its connection."""
        fds: list[int] = []
        try:
            data, fds, _, _ = socket.recv_fds(sock, messages.MAX_MESSAGE_BYTES, 1)
            if not data or sock not in self._unauthenticated or not fds or len(self._tables) >= MAX_FOLLOWERS:
                raise ProtocolError("it disconnected, or sent more than its table")
            said = messages.decode(data, Numbers)
            if not hmac.compare_digest(said.badge, messages.badge_of(self.badge, said.shard)):
                raise ProtocolError("the peer does not know the badge")
            self._admit(sock, fds[0])
        except BlockingIOError:
            return
        except (LoraServerError, OSError) as error:
            log.info("follower disconnected", reason=str(error))
            self._end(sock)
        finally:
            for fd in fds:
                os.close(fd)

    def _admit(self, sock: socket.socket, fd: int) -> None:
        table = self._kernel.gpu.map(fd, self._kernel.arguments.numbers_bytes)
        try:
            self._lead(table)
        except BaseException:
            table.close()
            raise
        del self._unauthenticated[sock]
        self._tables[sock] = table
        sock.send(HEARD)

    def _lead(self, *more: Memory) -> None:
        """Have the kernel store numbers into the followers' tables."""
        addresses = [one.address for one in (*self._tables.values(), *more)]
        self._kernel.between(lambda: self._kernel.arguments.lead(addresses))

    def _end(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        self._unauthenticated.pop(sock, None)
        table = self._tables.pop(sock, None)
        sock.close()
        if table is not None:
            self._lead()  # before it is unmapped
            table.close()

    @override
    def close(self) -> None:
        """Close, once the kernel has stopped. Idempotent."""
        if not self._stopping.is_set():
            self._stopping.set()
            self._thread.join()
            for sock in (*self._unauthenticated, *self._tables):
                self._end(sock)
            self._selector.close()
            self._server.close()
            Path(self.address).unlink(missing_ok=True)


class KernelFollower(StageRole):
    """Has its kernel serve by its leader's numbers; a thread passes a table to the leader."""

    def __init__(self, shard: int, kernel: ServeKernel, handshake_seconds: float = Timings.handshake) -> None:
        self._shard, self._kernel, self._leader = shard, kernel, ("", b"")
        self._heard_seconds = handshake_seconds + TAKEN_SECONDS  # within which a leader's kernel takes a table
        self._follow(0)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @override
    def follow(self, address: str, badge: bytes, certificate: bytes = b"") -> None:
        if self._leader != (address, badge):
            self.close()
            self._leader, self._stop = (address, badge), threading.Event()
            self._thread = threading.Thread(target=self._run, args=(self._stop,), name="numbers", daemon=True)
            self._thread.start()

    def _follow(self, table: int) -> None:
        """Have the kernel serve only steps with a number in this table, the least first; 0: none."""
        self._kernel.between(lambda: self._kernel.arguments.set(role=KernelRole.FOLLOWS, numbers=table))

    def _run(self, stop: threading.Event) -> None:
        say = Repeats(log.info)
        while not stop.is_set():
            try:
                self._be_led(stop)
            except (LoraServerError, OSError) as error:
                say(type(error).__name__, "shard has no leader", reason=str(error))
            stop.wait(RETRY_SECONDS)

    def _be_led(self, stop: threading.Event) -> None:
        """Follow the leader until it disconnects."""
        with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as sock:
            sock.settimeout(RETRY_SECONDS)
            sock.connect(self._leader[0])
            table = self._kernel.gpu.create(self._kernel.arguments.numbers_bytes)
            try:
                self._follow(table.address)
                socket.send_fds(sock, [messages.encode(Numbers(self._shard, self._leader[1]))], [table.fd])
                self._listen(sock, stop)
            finally:
                self._follow(0)
                table.close()

    def _listen(self, sock: socket.socket, stop: threading.Event) -> None:
        due, heard = time.monotonic() + self._heard_seconds, False
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                if sock.recv(len(HEARD)) != HEARD:
                    raise ConnectionResetError("the leader disconnected, or refused the table")
                heard = True
            if not heard and time.monotonic() > due:
                raise ConnectionResetError(f"the leader did not take its table in {self._heard_seconds:g} s")

    @override
    def close(self) -> None:
        """Follow no leader. Idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
