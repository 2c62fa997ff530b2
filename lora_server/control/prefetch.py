"""Prefetch signals: out of band, one-way, over ZeroMQ, before a request's first step."""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog
import zmq

from lora_server.errors import ProtocolError
from lora_server.logs import Repeats
from lora_server.ports import ANY_PORT, TcpPort
from lora_server.transport.address import bind
from lora_server.wire import messages
from lora_server.wire.messages import Prefetch

log = structlog.get_logger()
_POLL_MS = 200


class PrefetchListener:
    """Receives Prefetch messages and passes their handles on, in a thread of its own."""

    def __init__(
        self, host: str, advertise: str, on_prefetch: Callable[[list[int]], None], port: TcpPort = ANY_PORT
    ) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self._socket.setsockopt(zmq.MAXMSGSIZE, messages.MAX_MESSAGE_BYTES)
        self.address = bind(self._socket, host, advertise, port)
        self._on_prefetch = on_prefetch
        self._complain = Repeats(log.warning)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            if not self._socket.poll(_POLL_MS):
                continue
            try:
                self._on_prefetch(messages.decode(self._socket.recv(), Prefetch).handles)
            except ProtocolError as error:
                self._complain("", "prefetch signal ignored", error=str(error))
        self._socket.close(linger=0)

    def close(self) -> None:
        """Stop listening."""
        self._stop.set()
        self._thread.join()
