"""CURVE keys of a server and its readers: gRPC hands the server's out, and admits the readers' by tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable

import zmq
from zmq.utils import z85

from lora_server.access.identity import Identity
from lora_server.errors import ConfigError

KEY_BYTES = 32
MOST_OF_A_TOKEN = 1024  # keys; beyond them the oldest is forgotten, and its reader opens again


class ReaderKeys:
    """The public keys of readers, and the caller that showed each. Thread-safe."""

    def __init__(self) -> None:
        public, self.secret = zmq.curve_keypair()
        self.public = z85.decode(public)
        self._readers: dict[bytes, Identity] = {}  # the oldest first
        self._any_void = False
        self._lock = threading.Lock()

    def admit(self, key: bytes, who: Identity) -> None:
        """Let a reader with this key connect. Raises ConfigError for what is no key."""
        if len(key) != KEY_BYTES:
            raise ConfigError(f"reader_key: got {len(key)} bytes, expected {KEY_BYTES}: a CURVE public key")
        with self._lock:
            own = [one for one, of in self._readers.items() if of == who]
            for one in own[: len(own) + 1 - MOST_OF_A_TOKEN]:
                del self._readers[one]
            self._readers[key] = who

    def reader(self, key: bytes) -> Identity | None:
        """Return the caller that showed a key."""
        with self._lock:
            return self._readers.get(key)

    def void(self, key: bytes) -> None:
        """Remove a key."""
        with self._lock:
            self._any_void = self._readers.pop(key, None) is not None or self._any_void

    def void_where(self, is_bad: Callable[[Identity], bool]) -> None:
        """Remove the keys of callers for which `is_bad`."""
        for key, who in list(self._readers.items()):
            if is_bad(who):
                self.void(key)

    def take_void(self) -> bool:
        """Return whether a key was removed since the last call: its connection has to end."""
        with self._lock:
            taken, self._any_void = self._any_void, False
        return taken
