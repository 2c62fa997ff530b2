"""ZeroMQ over TCP, for clients on another host.

The shard's side runs a thread that does what a network card does for one-sided writes: it puts what
arrives into the client's slots, sets the signal word and rings the doorbell, so the shard's loop
cannot tell it from shared memory. Frames: client -> shard [kind, seq, slot bytes]; shard -> client the
same. A client sees a dead shard by the connection's end, or by ZeroMQ heartbeats when its host is
gone; a shard learns of a dead client when its lease expires.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections import deque

import zmq
from typing_extensions import override

from lora_server.errors import LeaseError, ProtocolError, ShardUnavailableError
from lora_server.ports import ANY_PORT, TcpPort
from lora_server.transport.address import bind, heartbeat
from lora_server.transport.base import Connection, DeviceMemory, Grant, Link, Port, pin
from lora_server.transport.mapping import Mapping
from lora_server.wire import messages, slot
from lora_server.wire.messages import Hello, Refused, Welcome
from lora_server.wire.region import Region, RegionLayout

HANDSHAKE_SECONDS = 5.0
_HELLO, _PUSH, _BYE = b"h", b"p", b"b"
_SEQ = struct.Struct("<Q")


def _tune(sock: zmq.Socket[bytes]) -> None:
    sock.setsockopt(zmq.LINGER, 0)
    sock.set_hwm(0)
    heartbeat(sock)


class ZmqLink(Link):
    """The client's end; its region is private memory that mirrors the shard's."""

    transport = "zmq"

    def __init__(self, address: str, hello: Hello, shard: int, seconds: float = HANDSHAKE_SECONDS) -> None:
        self.shard, self.epoch = shard, hello.epoch
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        _tune(self._socket)
        gone = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED  # it was there, or never was
        self._events: zmq.Socket[bytes] = self._socket.get_monitor_socket(gone)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._events, zmq.POLLIN)
        self._closed = False
        self._memory: Mapping | None = None
        try:
            self._socket.setsockopt(zmq.IPV6, int("[" in address))
            self._socket.connect(address)
            self._socket.send_multipart([_HELLO, messages.encode(hello)])
            layout = self._welcome(address, seconds)
            self._memory = Mapping(layout.nbytes)
        except OSError as error:
            self.close()
            raise ShardUnavailableError(f"shard {shard} at {address}: {error.strerror or error}") from error
        except BaseException:
            self.close()
            raise
        self.region = Region(self._memory.view, layout)

    def _welcome(self, address: str, seconds: float) -> RegionLayout:
        ready = dict(self._poller.poll(int(seconds * 1e3)))
        if self._socket not in ready:
            what = "it cannot be reached" if ready else f"no answer within {seconds:g} s"
            raise ShardUnavailableError(f"shard {self.shard} at {address}: {what}")
        answer = messages.decode_welcome(self._socket.recv_multipart()[-1])
        return RegionLayout(answer.depth, answer.request_bytes, answer.response_bytes)

    @override
    def push(self, seq: int, nbytes: int) -> None:
        """The slot is not written again before the response, so large frames are not copied."""
        frame = self.region.request(seq)[:nbytes]
        try:
            self._socket.send_multipart([_PUSH, _SEQ.pack(seq), frame], zmq.DONTWAIT, copy=False)
        except zmq.Again:
            raise self._gone(seq) from None

    @override
    def wait(self, seq: int, deadline: float) -> None:
        while self.responded() < seq:
            remaining = deadline - time.monotonic()
            ready = dict(self._poller.poll(max(0, round(remaining * 1e3))))
            if self._socket in ready:
                self._receive()
            elif self._events in ready:
                raise self._gone(seq)
            elif remaining <= 0:
                raise self._timeout(seq)

    def _receive(self) -> None:
        kind, *frames = self._socket.recv_multipart(copy=False)
        if kind.bytes == _BYE:
            raise self._gone(self.responded() + 1)
        (seq,) = _SEQ.unpack(frames[0].bytes)
        self.region.response(seq)[: len(frames[1])] = frames[1].buffer
        self.region.response_signal[0] = slot.signal(self.epoch, seq)

    @override
    def check(self) -> None:
        with contextlib.suppress(zmq.ZMQError):  # closed in this moment
            if not self._closed and not self._events.poll(0):
                return
        raise self._gone(self.responded() + 1)

    @override
    def close(self) -> None:
        if not self._closed:
            self._closed = True
            with contextlib.suppress(zmq.ZMQError):
                self._socket.send(_BYE, zmq.DONTWAIT)
            self._socket.disable_monitor()
            self._events.close(linger=0)
            self._socket.close(linger=100)
            if self._memory is not None:
                self._memory.drop()


class _ZmqConnection(Connection):
    transport = "zmq"

    def __init__(self, grant: Grant, region: Region, identity: bytes, listener: ZmqListener) -> None:
        self.client, self.epoch, self.region = grant.client, grant.epoch, region
        self.identity, self._listener = identity, listener

    @override
    def respond(self, seq: int, nbytes: int) -> None:
        frame = self.region.response(seq)[:nbytes]
        self._listener.send([self.identity, _PUSH, _SEQ.pack(seq), frame])

    @override
    def close(self) -> None:
        self._listener.send([self.identity, _BYE])


class ZmqListener:
    """Accepts clients on a TCP port and puts what they push into their slots, in a thread of its own."""

    def __init__(
        self,
        port: Port,
        host: str,
        advertise: str = "",
        tcp: TcpPort = ANY_PORT,
        device: DeviceMemory | None = None,
    ) -> None:
        """Binds to `host`, and tells clients to come to `advertise` if that is another.

        `device`: of a shard that computes on a GPU.
        """
        self._port, self._device = port, device
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._router: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        _tune(self._router)
        self._router.setsockopt(zmq.MAXMSGSIZE, max(port.layout.request_bytes, messages.MAX_MESSAGE_BYTES))
        self._address = bind(self._router, host, advertise, tcp)
        self._outbox: deque[list[bytes | memoryview]] = deque()
        self._outbox_lock = threading.Lock()
        self._bell_out: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        self._bell_in: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        self._bell_in.bind(f"inproc://outbox-{id(self)}")
        self._bell_out.connect(f"inproc://outbox-{id(self)}")
        self._clients: dict[bytes, _ZmqConnection] = {}
        self._thread = threading.Thread(target=self._run, name="zmq-listener", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """tcp://host:port."""
        return self._address

    def send(self, frames: list[bytes | memoryview]) -> None:
        """From any thread: hand frames to the listener's thread."""
        with self._outbox_lock:
            self._outbox.append(frames)
            if not self._bell_out.closed:
                self._bell_out.send(b"")

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._bell_in, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._bell_in in ready and self._bell_in.recv() == b"stop":
                break
            while self._outbox:
                self._send(self._outbox.popleft())
            if self._router in ready:
                self._receive()
        self._router.close(linger=200)
        self._bell_in.close(linger=0)

    def _send(self, frames: list[bytes | memoryview]) -> None:
        with contextlib.suppress(zmq.ZMQError):  # the client is gone; its lease tells the controller
            self._router.send_multipart(frames, zmq.DONTWAIT, copy=False)

    def _receive(self) -> None:
        identity, kind, *frames = self._router.recv_multipart(copy=False)
        connection = self._clients.get(identity.bytes)
        if kind.bytes == _HELLO and len(frames) == 1:
            self._welcome(identity.bytes, frames[0].bytes)
        elif connection is None:
            return
        elif kind.bytes == _PUSH and len(frames) == 2 and len(frames[0]) == _SEQ.size:
            self._put(connection, _SEQ.unpack(frames[0].bytes)[0], frames[1].buffer)
        elif kind.bytes == _BYE:
            del self._clients[identity.bytes]
            self._port.disconnect(connection)

    def _put(self, connection: _ZmqConnection, seq: int, payload: memoryview) -> None:
        target = connection.region.request(seq)
        if len(payload) > len(target) or seq > connection.served + connection.region.layout.depth:
            del self._clients[connection.identity]
            self._port.disconnect(connection)
            connection.close()
            return
        target[: len(payload)] = payload
        connection.region.request_signal[0] = slot.signal(connection.epoch, seq)
        self._port.ring()

    def _welcome(self, identity: bytes, data: bytes) -> None:
        try:
            grant = self._port.admit(messages.decode(data, Hello))
            region = Region(Mapping(self._port.layout.nbytes).view, self._port.layout)
            connection = _ZmqConnection(grant, region, identity, self)
            pin(connection, self._device)
            self._port.connect(connection)
        except (LeaseError, ProtocolError) as error:
            self._send([identity, _HELLO, messages.encode(Refused(error.code, str(error)))])
            return
        self._clients = {k: c for k, c in self._clients.items() if c in self._port.connections}
        self._clients[identity] = connection
        layout = self._port.layout
        welcome = Welcome(layout.depth, layout.request_bytes, layout.response_bytes)
        self._send([identity, _HELLO, messages.encode(welcome)])

    def close(self) -> None:
        """Stop listening and cut all of its clients off; idempotent."""
        with self._outbox_lock:
            if self._bell_out.closed:
                return
            self._bell_out.send(b"stop")
            self._bell_out.close()
        self._thread.join()
