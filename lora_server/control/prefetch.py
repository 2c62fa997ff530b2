"""Prefetches: clients say what their coming steps need, out of band and one-way, over ZeroMQ.

Whoever reaches the port can send anything: what no client with a lease has said, about adapters that it holds, changes
nothing. It is counted, by why, and logged now and then.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

import structlog
import zmq

from lora_server.control.adapters import Adapters
from lora_server.control.leases import Leases
from lora_server.control.shards import ShardTable
from lora_server.errors import ProtocolError
from lora_server.logs import Repeats
from lora_server.ports import ANY_PORT, TcpPort
from lora_server.transport.address import bind
from lora_server.transport.session import Proof
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire import messages
from lora_server.wire.messages import Prefetch

MAX_AHEAD_US = 60_000_000  # what is expected later counts as expected then
MIN_SECONDS = 0.01  # between two of one client
log = structlog.get_logger()
_POLL_MS = 200


class Prefetches:
    """Judges what clients say, and passes it on. `receive` is for one thread, the rest thread-safe.

    At most messages.MAX_PREFETCHED handles of a client are outstanding: its last message, which took the place of the
    one before.
    """

    def __init__(self, leases: Leases, adapters: Adapters, shards: ShardTable) -> None:
        self._leases, self._adapters, self._shards = leases, adapters, shards
        self.ignored: Counter[str] = Counter()  # by why
        self._complain = Repeats(log.warning)
        self._announced: dict[int, set[int]] = {}  # by client
        self._quiet_until: dict[int, float] = {}
        self._lock = threading.Lock()

    def receive(self, data: bytes) -> None:
        """A message, of anybody."""
        self._complain.flush()
        try:
            asked = messages.decode(data, Prefetch)
        except ProtocolError as error:
            self._ignore("malformed", error=str(error))
            return
        with self._lock:  # a client that goes is forgotten before it, or after it
            if self._leases.proven(Proof(asked.client, asked.epoch, asked.key)) is None:
                self._ignore("no lease", client=asked.client)
            elif time.monotonic() < self._quiet_until.get(asked.client, 0.0):
                self._ignore("too many", client=asked.client)
            else:
                self._quiet_until[asked.client] = time.monotonic() + MIN_SECONDS
                self._pass_on(asked)

    def _pass_on(self, asked: Prefetch) -> None:
        needs = {handle: min(in_us, MAX_AHEAD_US) for handle, in_us in asked.needs}
        held = self._adapters.holds(asked.client, needs)
        if len(held) < len(needs):
            self._ignore("not held", client=asked.client, handles=sorted(needs.keys() - held)[:8])
        self._announced[asked.client] = held
        self._tell(asked.client, [pb.Need(handle=handle, in_us=needs[handle]) for handle in needs if handle in held])

    def released(self, client: int) -> None:
        """A client let go of something: with the last of what it announced it needs nothing any more."""
        with self._lock:
            announced = self._announced.get(client)
            if announced and not self._adapters.holds(client, announced):
                self._announced[client] = set()
                self._tell(client, [])

    def forget(self, client: int) -> None:
        """Its lease is gone; shards forget what it needs when they are told so."""
        with self._lock:
            self._announced.pop(client, None)
            self._quiet_until.pop(client, None)

    def _tell(self, client: int, needs: list[pb.Need]) -> None:
        self._shards.broadcast(pb.ShardCommand(prefetch=pb.Prefetch(client=client, needs=needs)))

    def _ignore(self, why: str, **fields: object) -> None:
        self.ignored[why] += 1
        self._complain(why, "prefetch ignored", why=why, **fields)


class PrefetchListener:
    """Receives messages and passes them on, in a thread of its own."""

    def __init__(self, host: str, advertise: str, receive: Callable[[bytes], None], port: TcpPort = ANY_PORT) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self._socket.setsockopt(zmq.MAXMSGSIZE, messages.MAX_MESSAGE_BYTES)
        self.address = bind(self._socket, host, advertise, port)
        self._receive = receive
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            if self._socket.poll(_POLL_MS):
                self._receive(self._socket.recv())
        self._socket.close(linger=0)

    def close(self) -> None:
        """Stop listening."""
        self._stop.set()
        self._thread.join()
