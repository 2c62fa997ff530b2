"""Prefetches on their way to the controller: out of band, one-way, over ZeroMQ."""

from __future__ import annotations

import contextlib
import threading

import zmq

from lora_server.transport.address import heartbeat
from lora_server.wire import messages
from lora_server.wire.messages import Prefetch


class PrefetchSender:
    """Thread-safe; never blocks."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, 0)
        heartbeat(self._socket)
        self._socket.setsockopt(zmq.IPV6, int("[" in address))
        self._socket.connect(address)

    def move(self, address: str) -> None:
        """The controller was restarted and listens elsewhere."""
        with self._lock:
            if address != self._address and not self._socket.closed:
                self._socket.disconnect(self._address)
                self._socket.connect(address)
                self._address = address

    def send(self, message: Prefetch) -> None:
        """A hint: what does not get through is asked for by the step itself."""
        with self._lock:
            if not self._socket.closed:
                with contextlib.suppress(zmq.Again):
                    self._socket.send(messages.encode(message), zmq.DONTWAIT)

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            self._socket.close()
