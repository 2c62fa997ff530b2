"""Sends prefetches to the controller: one call at a time, of which only the newest waits for its turn."""

from __future__ import annotations

import threading
from typing import Any

from lora_server.wire import lora_server_pb2 as pb

SECONDS = 5.0


class PrefetchSender:
    """Thread-safe; never blocks. `method` is Clients.Prefetch of a stub."""

    def __init__(self, method: Any) -> None:
        self._method = method
        self._lock = threading.RLock()  # a call that has ended already calls back at once
        self._busy = self._closed = False
        self._next: pb.PrefetchRequest | None = None

    def send(self, request: pb.PrefetchRequest) -> None:
        """Send a hint; if it is lost, the step itself asks for the weights."""
        with self._lock:
            self._next = request
            if not self._busy and not self._closed:
                self._start()

    def _start(self) -> None:
        request, self._next, self._busy = self._next, None, True
        try:
            self._method.future(request, timeout=SECONDS).add_done_callback(self._ended)
        except ValueError:  # the channel was closed
            self._closed = True

    def _ended(self, _: Any) -> None:
        with self._lock:
            self._busy = False
            if self._next is not None and not self._closed:
                self._start()

    def close(self) -> None:
        """Stop before the channel closes; idempotent."""
        with self._lock:
            self._closed = True
