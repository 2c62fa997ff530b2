"""Client and shard in one thread of one process: a client that waits runs the shard.

The same regions, slots and signals as between processes, so what is tested here is the wire itself;
no thread, no lock, no sleep. Also the fair baseline for what disaggregation costs.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from typing_extensions import override

from lora_server.transport.base import Connection, Grant, Link, Port
from lora_server.transport.mapping import Mapping
from lora_server.wire import slot
from lora_server.wire.messages import Hello
from lora_server.wire.region import Region


class _InprocConnection(Connection):
    transport = "inproc"
    rings = False

    def __init__(self, grant: Grant, region: Region) -> None:
        self.grant, self.region = grant, region
        self.open = True

    def respond(self, seq: int, nbytes: int) -> None:
        """Store the signal; see Connection."""
        self.region.response_signal[0] = slot.signal(self.grant.epoch, seq)

    @override
    def close(self) -> None:
        self.open = False


class InprocLink(Link):
    """A link with both ends in one object. `pump` serves at most one step of the shard; it returns whether it did."""

    transport = "inproc"

    def __init__(self, port: Port, hello: Hello, shard: int, pump: Callable[[], bool]) -> None:
        grant = port.grants.admit(hello)
        self.shard, self.epoch = shard, hello.epoch
        self.region = Region(Mapping(port.layout.nbytes).view, port.layout)
        self._port, self._pump = port, pump
        self._connection = _InprocConnection(grant, self.region)
        port.connect(self._connection)

    @override
    def push(self, seq: int, nbytes: int) -> None:
        if not self._connection.open:
            raise self._gone(seq)
        self.region.request_signal[0] = slot.signal(self.epoch, seq)

    @override
    def wait(self, seq: int, deadline: float) -> None:
        """Serve the shard's steps until the answer is there."""
        while self.responded() < seq:
            if not self._connection.open:
                raise self._gone(seq)
            if not self._pump() and time.monotonic() >= deadline:
                raise self._timeout(seq)

    @override
    def check(self) -> None:
        if not self._connection.open:
            raise self._gone(self.responded() + 1)

    @override
    def close(self) -> None:
        self._connection.open = False
        self._port.disconnect(self._connection)
